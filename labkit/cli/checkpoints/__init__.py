"""Subcommands that begin with a checkpoint: `checkpoint`, `eval`, `finetune`, `generate`."""
