"""Rules of capture and replay: what is set aside, noted and refused."""
