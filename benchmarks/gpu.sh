#!/usr/bin/env bash
# One call on a machine with an NVIDIA GPU: correctness of the kernels, then their speed. Under 10 minutes; builds nothing.
# Usage, from the project's root: benchmarks/gpu.sh [kernels|long|racecheck|throughput]     (default: kernels)
# It needs a Python with requirements.txt and a CUDA jaxlib. Commit what it prints as records/YYYY-MM-DD_<what>.md.
set -uo pipefail
cd "$(dirname "$0")/.."
export JAX_PLATFORMS=cuda,cpu PYTHONPATH=.
what=${1:-kernels}
nvidia-smi --query-gpu=name,driver_version,clocks.max.sm --format=csv,noheader
git rev-parse --short HEAD 2>/dev/null

case $what in
kernels)
  # On the device: wgmma operands in registers, FMA and true concurrency, none of which the interpreter has.
  timeout 240 python -m pytest -q tests/device || exit 1
  timeout 330 python benchmarks/kernels.py --widths=128,64 --lengths=4096,1024,16384
  ;;
long) timeout 560 python benchmarks/kernels.py --batch=1 --widths=128 --lengths=65536,32768 --rounds=5 ;;
racecheck)
  compute-sanitizer --tool racecheck --error-exitcode 9 \
    python -m pytest -q tests/device -k "smallest" -p no:cacheprovider
  ;;
throughput)  # Table 9's widths and rows; a third of its layers, so that parameters, moments and activations fit one GPU.
  timeout 560 python benchmarks/throughput.py --config=configs/diff_3b.py:diff --rounds=7 --steps=10 --profile="${OUT:-/tmp}/trace" \
    --config.model.num_layers=9 --config.train.global_batch_tokens=16384 ;;
*) echo "usage: benchmarks/gpu.sh [kernels|long|racecheck|throughput]" >&2; exit 2 ;;
esac
