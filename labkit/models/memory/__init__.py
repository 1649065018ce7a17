"""Bytes that a rank needs, predicted and counted."""
