"""Solutions of the chapters' exercises, in one module per chapter; `solution_source.py` finds and shows them."""
