"""`python -m labkit ...` is the command `labkit ...`, for where its script is not on the path."""

from __future__ import annotations

import sys

from labkit.cli import main

if __name__ == "__main__":
    sys.exit(main())
