"""labkit: a workbench for the Megatron-style parallel training stack."""
