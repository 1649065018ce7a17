"""Configurations of other training stacks, read key by key into ours: one module with one table for each stack."""
