"""Checkpoints: whole tensors in boxes, saved by all ranks and loaded under any layout."""
