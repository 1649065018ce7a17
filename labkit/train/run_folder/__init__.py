"""The folder of a run: who writes there, what is in it, and what becomes of an earlier run's files."""
