"""Exercises on pipeline schedules: idle time, rows of 1F1B, orders of several stages a rank, and own tables."""
