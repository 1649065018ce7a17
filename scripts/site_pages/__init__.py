"""Pages of the documentation's site that `scripts/make_docs.py` writes or changes: one module for each kind."""
