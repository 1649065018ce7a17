#!/usr/bin/env bash
# Transformer Engine from PyPI into labkit's environment, compiled for the torch and the CUDA that are installed.
#
#   scripts/install_te.sh            check, then build (10 to 40 minutes; MAX_JOBS=4 to use less memory)
#   scripts/install_te.sh --check    say what is missing, build nothing
#
# PYTHON names another interpreter than .venv/bin/python, TE_VERSION another release. Everything that is missing is named
# at once. Its CUDA kernels come as a wheel; what is compiled here is the half that torch loads.
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-.venv/bin/python}
version=${TE_VERSION:-2.20.2}
missing=()

need() { missing+=("$1"); }

major() { echo "${1%%.*}"; }

if ! command -v "$python" >/dev/null; then
    echo "no interpreter $python: run 'make run' first, or set PYTHON" >&2
    exit 2
fi

torch_cuda=$("$python" -c 'import torch; print(torch.version.cuda or "cpu")' 2>/dev/null || echo none)
case $torch_cuda in
none) need "torch: install labkit with 'make run'" ;;
cpu) need "a torch with CUDA: this one is the CPU build (make run without TORCH_INDEX installs the other on Linux)" ;;
esac

nvcc=""
if [ -n "${CUDA_HOME:-}" ] && [ -x "$CUDA_HOME/bin/nvcc" ]; then
    nvcc=$CUDA_HOME/bin/nvcc
elif command -v nvcc >/dev/null; then
    nvcc=$(command -v nvcc)
fi
if [ -z "$nvcc" ]; then
    need "nvcc: install the CUDA toolkit of torch's major version and set CUDA_HOME (conda: cuda-nvcc and cuda-cudart-dev)"
else
    toolkit=$("$nvcc" --version 2>/dev/null | sed -n 's/.*release \([0-9.]*\).*/\1/p')
    if [ -z "$toolkit" ]; then
        need "an nvcc that works: $nvcc does not tell its version"
    elif [ "$torch_cuda" != none ] && [ "$torch_cuda" != cpu ] && [ "$(major "$toolkit")" != "$(major "$torch_cuda")" ]; then
        need "nvcc of CUDA $(major "$torch_cuda").x: torch was built for $torch_cuda, and $nvcc is of $toolkit"
    fi
fi

command -v "${CXX:-g++}" >/dev/null || need "a C++ compiler: ${CXX:-g++} is not on the path (g++ 9 or newer; CXX names another)"

headers() { # header, folder of its pip package: the folder that holds it, or nothing
    "$python" -c "
import glob, os, site
places = [os.path.join(p, 'nvidia', '$2', 'include') for p in site.getsitepackages()]
places += [os.environ[v] + '/include' for v in ('CUDNN_HOME', 'NCCL_HOME', 'CUDA_HOME', 'CONDA_PREFIX') if v in os.environ]
places += ['/usr/include', '/usr/local/include', '/usr/local/cuda/include', *glob.glob('/usr/include/*-linux-gnu')]
print(next((p for p in places if os.path.exists(os.path.join(p, '$1'))), ''))" 2>/dev/null || true
}
cudnn=$(headers cudnn.h cudnn)
nccl=$(headers nccl.h nccl)
[ -n "$cudnn" ] || need "cudnn.h: pip install nvidia-cudnn-cu12 (or -cu13, as torch's CUDA), or set CUDNN_HOME"
[ -n "$nccl" ] || need "nccl.h: pip install nvidia-nccl-cu12 (or -cu13), or set NCCL_HOME"

free_kb=$(df -Pk . | awk 'NR == 2 {print $4}')
[ "$free_kb" -gt 8000000 ] || need "8 GB of free disk: here are $((free_kb / 1000000)) GB"

if [ ${#missing[@]} -gt 0 ]; then
    echo "Transformer Engine $version cannot be built here. Missing:" >&2
    printf '  - %s\n' "${missing[@]}" >&2
    echo "Without it labkit uses its own layers (model.transformer_impl: local) and graphs (graph.cuda_graph_impl: local)." >&2
    exit 1
fi
echo "torch for CUDA $torch_cuda, nvcc $toolkit, cudnn.h in $cudnn, nccl.h in $nccl: Transformer Engine $version can be built"
[ "${1:-}" != --check ] || exit 0

export NVTE_FRAMEWORK=pytorch CUDA_HOME=${CUDA_HOME:-$(dirname "$(dirname "$(readlink -f "$nvcc")")")}
export CPLUS_INCLUDE_PATH="$cudnn:$nccl${CPLUS_INCLUDE_PATH:+:$CPLUS_INCLUDE_PATH}"
"$python" -m pip install setuptools wheel ninja pybind11
# Compiled against the torch that is here, so without an environment of its own.
"$python" -m pip install --no-build-isolation "transformer_engine[pytorch]==$version"
"$python" -c 'import transformer_engine.pytorch as te; print("Transformer Engine is installed:", te.__file__)' ||
    echo "installed, but it cannot be imported here: it needs a GPU (labkit doctor says why)"
