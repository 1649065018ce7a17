"""Context parallelism: the cut of a sequence over ranks, and attention over its parts."""
