"""Checks that reject captures and replays which would be silently wrong: before, during and after a capture."""
