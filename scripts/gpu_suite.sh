#!/usr/bin/env bash
# Tests and benchmarks on a GPU that is lent for minutes: scripts/gpu_suite.sh --minutes 15 --per-command 10. Needs no install.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
exec env PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" "${PYTHON:-python3}" "$root/scripts/gpu_suite.py" "$@"
