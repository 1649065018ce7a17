"""Mamba: layers of a selective scan, alone or in a row with layers of attention and of an MLP."""
