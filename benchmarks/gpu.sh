#!/usr/bin/env bash
# Test the kernels, or measure speed, on a machine with an NVIDIA GPU. One call takes under 10 minutes and builds nothing.
# Usage, from the project's root:
#   benchmarks/gpu.sh all
#     Run the pieces below that have no record of this commit, in their order of importance, as many as fit into one call.
#     Exit code 75: pieces are left, and the same call continues. Three calls suffice.
#   benchmarks/gpu.sh PIECE
#     Run one piece.
#   benchmarks/gpu.sh small [NAME=VALUES …]
#     Train a grid of configs/small.py, which takes many calls and is not part of `all`.
#   DRY=1 benchmarks/gpu.sh …
#     Run the same programs on the CPU, with tiny shapes and interpreted kernels, to test this script.
# It needs a Python with the packages of requirements.txt and a CUDA jaxlib. Each piece writes what it prints to the record
# ${OUT:-benchmarks/records}/YYYY-MM-DD_gpu_<piece>.md when it ends, also if it fails. `all` continues after a failure.
set -uo pipefail
cd "$(dirname "$0")/.."
export JAX_PLATFORMS=cuda,cpu PYTHONPATH=.
what=${1:-all}
records=${OUT:-benchmarks/records}
commit=$(git rev-parse --short HEAD 2>/dev/null || echo unknown)
# Name and longest time in seconds of each piece.
PIECES=(profile:70 tests:110 kernels:110 ncu:120 racecheck:90 throughput:250 peers:210 long:120 lengths:180 doctor:250 generate:150)
CALL=580  # Seconds of a call.
UNFINISHED=75
if [[ -n ${DRY:-} ]]; then
  # The interpreter blocks a thread per warpgroup, and needs more threads than small machines have cores.
  export JAX_PLATFORMS=cpu NPROC=16
  tiny=(--config.data.path=stdlib --config.data.tokenizer=bytes --config.data.sequence_length=32
    --config.model.d_model=32 --config.model.num_layers=2 --config.model.num_heads=2 --config.model.mlp_dim=64
    --config.train.global_batch_tokens=256)
fi

# Print the first arguments on a GPU, and those after `--or` in a dry run.
on_gpu() {
  local gpu=()
  while [[ $1 != --or ]]; do gpu+=("$1"); shift; done
  shift
  [[ -n ${DRY:-} ]] && printf '%s\n' "$@" || printf '%s\n' "${gpu[@]}"
}

# Run one piece within its time and keep its output as a record, unless the piece is unfinished.
run_piece() {
  local piece=$1 limit=570 log code began=$SECONDS entry
  for entry in "${PIECES[@]}"; do [[ ${entry%:*} == "$piece" ]] && limit=${entry#*:}; done
  mkdir -p "$records"
  log=$(mktemp)
  {
    echo "# $piece on $(nvidia-smi --query-gpu=name,driver_version,clocks.max.sm --format=csv,noheader 2>/dev/null | head -1): $(date +%F)"
    echo
    echo "Commit $commit. \`benchmarks/gpu.sh $*\`:"
    echo
    echo '```'
  } >"$log"
  # Clocks and power while the piece runs: times mean little without them.
  nvidia-smi --query-gpu=clocks.sm,power.draw,temperature.gpu --format=csv,noheader,nounits -lms 200 >"$log.clocks" 2>/dev/null &
  local sampler=$!
  piece "$limit" "$@" 2>&1 | tee -a "$log"
  code=${PIPESTATUS[0]}
  kill "$sampler" 2>/dev/null
  wait "$sampler" 2>/dev/null
  {
    printf '```\n\nExit code %s after %s of %s seconds.' "$code" $((SECONDS - began)) "$limit"
    sort -n "$log.clocks" | awk -F, '{clock[NR] = $1; power += $2}
      END {if (NR) printf " SM clock %d to %d MHz, median %d; %d W on average.", clock[1], clock[NR], clock[int((NR + 1) / 2)], power / NR}'
    echo
  } >>"$log"
  rm -f "$log.clocks"
  if ((code != UNFINISHED)); then
    mv "$log" "$records/$(date +%F)_gpu_$piece.md"
  fi
  return "$code"
}

# Run one piece, the second argument, for at most as many seconds as the first argument says.
piece() {
  local limit="timeout --kill-after=5 $1" shape
  shift
  mapfile -t shape < <(on_gpu --batch=4 --heads=12 --or --batch=1 --heads=1)
  case $1 in
  profile)
    $limit python benchmarks/gpu_profile.py "${shape[@]}" $(on_gpu --widths=128,64 --or --widths=32 --length=128 --runs=2)
    ;;
  ncu)
    # The first launch of each kernel. Its clocks are those of the other pieces, because ncu does not lock them.
    $limit $(on_gpu ncu --clock-control none --set full --launch-count 3 --kernel-name regex:difftx --or env) \
      python benchmarks/gpu_profile.py --runs=1 $(on_gpu --batch=1 --widths=128 --or --batch=1 --heads=1 --widths=32 --length=64)
    ;;
  tests)
    # The tests run on the device because the interpreter lacks wgmma operands in registers, FMA and real concurrency.
    # Eight processes share the memory of the device.
    XLA_PYTHON_CLIENT_MEM_FRACTION=.08 $limit python -m pytest -q $(on_gpu -n 8 --or -p no:cacheprovider) tests/device
    ;;
  kernels)
    $limit python benchmarks/kernels.py "${shape[@]}" $(on_gpu --widths=128,64 --lengths=4096 --rounds=7 \
      --only=pallas_gpu,cudnn,transformer --or --widths=32 --lengths=128 --rounds=1 --only=pallas_gpu,transformer)
    ;;
  lengths)
    $limit python benchmarks/kernels.py "${shape[@]}" $(on_gpu --widths=128,64 --lengths=4096,1024,16384 --rounds=5 \
      --only=pallas_gpu,cudnn,transformer --or --widths=32 --lengths=128,64 --rounds=1 --only=xla,transformer)
    ;;
  long)
    $limit python benchmarks/kernels.py $(on_gpu --batch=1 --lengths=65536,32768 --rounds=3 --only=pallas_gpu,transformer \
      --or --batch=1 --heads=1 --widths=32 --lengths=512 --rounds=1 --only=xla,transformer)
    ;;
  racecheck)
    # With four tiles, buffers are refilled and CTAs of a cluster wait for each other.
    $limit $(on_gpu compute-sanitizer --tool racecheck --error-exitcode 9 --or env) \
      python -m pytest -q tests/device -k "pallas_gpu and (smallest or four)" -p no:cacheprovider
    ;;
  throughput)
    # Table 9's widths and row length, with a third of its layers, so that train state and activations fit one GPU.
    $limit python benchmarks/throughput.py $(on_gpu --config=configs/diff_3b.py:diff --rounds=7 --steps=5 \
      --profile="${OUT:-/tmp}/trace" --config.model.num_layers=9 --config.train.global_batch_tokens=16384 \
      --or --config=configs/quickstart.py:diff --rounds=1 --steps=1 ${DRY:+"${tiny[@]}"})
    ;;
  peers)
    # transformers' Llama and DiffLlama, compiled by torch. TORCH is a Python with both, whose torch supports CUDA.
    $limit python benchmarks/peers.py --rounds=3 --torch="${TORCH:-$(command -v python)}" \
      $(on_gpu --sizes=gpu --only=difftx,torch.compile --or --sizes=dry --only=difftx,eager)
    ;;
  doctor)
    # Data and tokenizer that need neither files nor a network. The vocabulary keeps its size.
    $limit python -m difftx doctor $(on_gpu --config=configs/diff_3b.py:diff --config.data.path=stdlib \
      --config.data.tokenizer=bytes --config.mesh.preset=auto --or --config=configs/quickstart.py:diff ${DRY:+"${tiny[@]}"})
    ;;
  generate)
    $limit python benchmarks/generate.py $(on_gpu --config=configs/diff_3b.py --new_tokens=128 --rounds=2 \
      --or --config=configs/quickstart.py --new_tokens=8 --rounds=1)
    ;;
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
  began=$SECONDS failed=0 left=0
  for entry in "${PIECES[@]}"; do
    name=${entry%:*}
    grep -qs "^Commit $commit\." "$records"/*_gpu_"$name".md && continue
    if ((SECONDS - began + ${entry#*:} > CALL)); then
      left=1
      continue
    fi
    run_piece "$name" || failed=1
    echo "$name took $((SECONDS - began)) of the call's $CALL seconds so far."
  done
  ((left)) && exit "$UNFINISHED"
  exit "$failed"
  ;;
profile | tests | kernels | ncu | racecheck | throughput | peers | long | lengths | doctor | generate | small) run_piece "$@" ;;
*) echo "usage: benchmarks/gpu.sh all|profile|tests|kernels|ncu|racecheck|throughput|peers|long|lengths|doctor|generate|small" >&2; exit 2 ;;
esac
