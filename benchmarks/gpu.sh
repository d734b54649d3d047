#!/usr/bin/env bash
# Test the kernels, or measure speed, on a machine with an NVIDIA GPU. One call takes under 10 minutes and builds nothing.
# Usage, from the project's root:
#   benchmarks/gpu.sh all
#     Do everything that no record covers yet, piece by piece: doctor, kernels, long, racecheck, throughput, small. Exit code
#     75: pieces are left, and the same call continues.
#   benchmarks/gpu.sh doctor|kernels|long|racecheck|throughput|small [NAME=VALUES …]
#     Do one piece.
# It needs a Python with the packages of requirements.txt and a CUDA jaxlib. Each piece writes what it prints to the record
# ${OUT:-benchmarks/records}/YYYY-MM-DD_gpu_<piece>.md.
set -uo pipefail
cd "$(dirname "$0")/.."
export JAX_PLATFORMS=cuda,cpu PYTHONPATH=.
what=${1:-all}
records=${OUT:-benchmarks/records}
PIECES=(doctor kernels long racecheck throughput small)
UNFINISHED=75

# Run one piece and keep its output as a record, unless the piece is unfinished.
run_piece() {
  local piece=$1 log code
  log=$(mktemp)
  {
    echo "# $piece on $(nvidia-smi --query-gpu=name,driver_version,clocks.max.sm --format=csv,noheader | head -1): $(date +%F)"
    echo
    echo "Commit $(git rev-parse --short HEAD 2>/dev/null || echo unknown). \`benchmarks/gpu.sh $*\`:"
    echo
    echo '```'
  } >"$log"
  piece "$@" 2>&1 | tee -a "$log"
  code=${PIPESTATUS[0]}
  printf '```\n\nExit code %s.\n' "$code" >>"$log"
  mkdir -p "$records"
  if ((code != UNFINISHED)); then
    mv "$log" "$records/$(date +%F)_gpu_$piece.md"
  fi
  return "$code"
}

# Do one piece, the first argument, and print what it measures.
piece() {
  case $1 in
  doctor)
    # Data and tokenizer that need neither files nor a network. The vocabulary keeps its size.
    timeout 300 python -m difftx doctor --config=configs/diff_3b.py:diff --config.data.path=stdlib \
      --config.data.tokenizer=bytes --config.mesh.preset=auto
    ;;
  kernels)
    # The tests run on the device because the interpreter lacks wgmma operands in registers, FMA and real concurrency.
    # Eight processes share the memory of the device.
    XLA_PYTHON_CLIENT_MEM_FRACTION=.08 timeout 240 python -m pytest -q -n 8 tests/device || return 1
    timeout 330 python benchmarks/kernels.py --widths=128,64 --lengths=4096,1024,16384
    ;;
  long) timeout 560 python benchmarks/kernels.py --batch=1 --widths=128 --lengths=65536,32768 --rounds=5 ;;
  racecheck)
    timeout 560 compute-sanitizer --tool racecheck --error-exitcode 9 \
      python -m pytest -q tests/device -k "pallas_gpu and (smallest or window)" -p no:cacheprovider
    ;;
  throughput)
    # Table 9's widths and row length, with a third of its layers, so that train state and activations fit one GPU.
    timeout 560 python benchmarks/throughput.py --config=configs/diff_3b.py:diff --rounds=7 --steps=10 \
      --profile="${OUT:-/tmp}/trace" --config.model.num_layers=9 --config.train.global_batch_tokens=16384 ;;
  small)
    # Train a grid of configs/small.py, by default all of it. After exit code 75, the same call resumes; it needs the folders
    # RUNS and stores/ of the call before.
    shift
    grid=("$@")
    ((${#grid[@]})) || grid=(size=10m,20m,40m,80m,160m task=books,recall
      arm=transformer,transformer-8x256,transformer-8x256-norm,diff,diff-no_norm,diff-lambda_0.8,diff-lambda_0.5,diff_v2
      seed=0,1,2)
    runs=${RUNS:-runs/small}
    books=${BOOKS:-stores/novels-text}
    # An existing store is kept.
    python -m difftx prepare --input="$books/train.jsonl.gz" --valid_input="$books/valid.jsonl.gz" --tokenizer=bytes \
      --out=stores/books || return
    [[ -e stores/books.bigrams ]] || python -m difftx data bigrams stores/books --out=stores/books.bigrams || return
    # The sweep forwards SIGTERM to its run, which saves. SIGKILL follows after a minute.
    timeout --preserve-status --signal=TERM --kill-after=60 500 \
      python -m difftx sweep --config=configs/small.py --grid "${grid[@]}" --out="$runs"
    ;;
  esac
}

case $what in
all)
  began=$SECONDS failed=0
  for name in "${PIECES[@]}"; do
    compgen -G "$records/*_gpu_$name.md" >/dev/null && continue
    # A piece may take up to 570 seconds, so it starts only at the beginning of a call.
    ((SECONDS - began < 20)) || exit "$UNFINISHED"
    run_piece "$name"
    code=$?
    ((code == UNFINISHED)) && exit "$UNFINISHED"
    ((code == 0)) || failed=1
  done
  exit "$failed"
  ;;
doctor | kernels | long | racecheck | throughput | small) run_piece "$@" ;;
*) echo "usage: benchmarks/gpu.sh all|doctor|kernels|long|racecheck|throughput|small [NAME=VALUES …]" >&2; exit 2 ;;
esac
