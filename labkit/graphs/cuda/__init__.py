"""Graphs on a GPU: torch's own, and those of Transformer Engine."""
