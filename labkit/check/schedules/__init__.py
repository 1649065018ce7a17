"""Exercises on pipeline schedules with several stages a rank."""
