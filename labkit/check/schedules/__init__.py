"""Exercises on pipeline schedules: orders of several stages a rank, and tables of the reader's own."""
