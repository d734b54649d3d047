#!/usr/bin/env bash
# Test the kernels, or measure speed, on a machine with an NVIDIA GPU. One call takes under 10 minutes and builds nothing.
# Usage, from the project's root: benchmarks/gpu.sh [kernels|long|racecheck|throughput|small [NAME=VALUES …]]     (default: kernels)
# It needs a Python with the packages of requirements.txt and a CUDA jaxlib. Commit its output as
# records/YYYY-MM-DD_<what>.md.
set -uo pipefail
cd "$(dirname "$0")/.."
export JAX_PLATFORMS=cuda,cpu PYTHONPATH=.
what=${1:-kernels}
nvidia-smi --query-gpu=name,driver_version,clocks.max.sm --format=csv,noheader
git rev-parse --short HEAD 2>/dev/null

case $what in
kernels)
  # The tests run on the device because the interpreter lacks wgmma operands in registers, FMA and real concurrency.
  timeout 240 python -m pytest -q tests/device || exit 1
  timeout 330 python benchmarks/kernels.py --widths=128,64 --lengths=4096,1024,16384
  ;;
long) timeout 560 python benchmarks/kernels.py --batch=1 --widths=128 --lengths=65536,32768 --rounds=5 ;;
racecheck)
  compute-sanitizer --tool racecheck --error-exitcode 9 \
    python -m pytest -q tests/device -k "smallest" -p no:cacheprovider
  ;;
throughput)  # Table 9's widths and row length, with a third of its layers so that train state and activations fit one GPU.
  timeout 560 python benchmarks/throughput.py --config=configs/diff_3b.py:diff --rounds=7 --steps=10 --profile="${OUT:-/tmp}/trace" \
    --config.model.num_layers=9 --config.train.global_batch_tokens=16384 ;;
small)
  # Train a grid of configs/small.py, by default all of it. After exit code 75, the same call resumes; it needs the folders
  # RUNS and stores/ of the call before.
  shift
  grid=("$@")
  ((${#grid[@]})) || grid=(size=10m,20m,40m,80m,160m task=books,recall
    arm=transformer,transformer-8x256,transformer-8x256-norm,diff,diff-no_norm,diff-lambda_0.8,diff-lambda_0.5,diff_v2
    seed=0,1,2)
  runs=${RUNS:-runs/small}
  books=${BOOKS:-../shared/data/books}
  # An existing store is kept.
  python -m difftx prepare --input="$books/train.jsonl.gz" --valid_input="$books/valid.jsonl.gz" --tokenizer=bytes \
    --out=stores/books || exit
  [[ -e stores/books.bigrams ]] || python -m difftx data bigrams stores/books --out=stores/books.bigrams || exit
  # The sweep forwards SIGTERM to its run, which saves. SIGKILL follows after a minute.
  timeout --preserve-status --signal=TERM --kill-after=60 500 \
    python -m difftx sweep --config=configs/small.py --grid "${grid[@]}" --out="$runs"
  ;;
*) echo "usage: benchmarks/gpu.sh [kernels|long|racecheck|throughput|small [NAME=VALUES …]]" >&2; exit 2 ;;
esac
