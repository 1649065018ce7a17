"""`python -m labkit.cli ...`, which is how torchrun starts a command: `-m labkit.cli train --config f.yaml`."""

from __future__ import annotations

import sys

from labkit.cli import main

if __name__ == "__main__":
    sys.exit(main())
