"""Refusals of captures and replays that would be silently wrong: before a capture, during it, and at each replay."""
