"""Bytes of memory that a rank needs, predicted and counted."""
