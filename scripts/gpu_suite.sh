#!/usr/bin/env bash
# Tests and benchmarks on one rented GPU, phase by phase: scripts/gpu_suite.sh 1, then 2, then 3; or all. Needs no install.
set -euo pipefail
cd "$(dirname "$0")/.."
exec env PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" "${PYTHON:-python3}" scripts/gpu_suite.py "$@"
