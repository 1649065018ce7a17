"""Rules of capture and replay, and their refusals."""
