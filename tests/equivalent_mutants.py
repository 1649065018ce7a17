"""Mutants of `scripts/mutations.py` that change nothing a user could see, each with the reason."""

EQUIVALENT: dict[str, str] = {}
