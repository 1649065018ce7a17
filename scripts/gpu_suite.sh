#!/usr/bin/env bash
# Tests and benchmarks on one rented GPU, phase by phase: scripts/gpu_suite.sh 1, then 2, then 3; or all. Needs no install.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
exec env PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" "${PYTHON:-python3}" "$root/scripts/gpu_suite.py" "$@"
