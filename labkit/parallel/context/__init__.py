"""Context parallelism: how a sequence is cut over ranks, and attention over its parts."""
