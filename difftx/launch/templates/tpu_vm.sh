#!/bin/bash
# Train {{ name }} on every worker of the TPU VM {{ tpu }}, which has the repository in ~/{{ directory }} and its packages in
# ~/{{ directory }}/.venv. As in a JobSet, training is started again after a preemption or a crash, at most {{ restarts }} times, and
# not after exit code 2, which means wrong input. It is not started again after 255 either: gcloud has lost the workers,
# which may still be training. Ctrl-C or SIGTERM to this script stops the workers after a checkpoint.

on_workers() {
    gcloud compute tpus tpu-vm ssh {{ tpu }} --zone={{ zone }} --worker=all --command="$1" </dev/null
}

train=$(cat <<'END'
cd ~/{{ directory }} && export PATH="$PWD/.venv/bin:$PATH" && exec {{ command }} --distributed
END
)

signals=0
stop() {
    signals=$((signals + 1))
    on_workers {{ stop }}
}
trap stop INT TERM

for ((restarts = {{ restarts }}; ; restarts--)); do
    # Training runs in the background: bash runs a trap only between commands, but a signal interrupts `wait`, which is
    # then called again.
    on_workers "$train" &
    training=$!
    before=
    while [ "$before" != "$signals" ]; do
        before=$signals
        wait "$training"
        code=$?
    done
    case "$code" in
        0 | 2 | 255) exit "$code" ;;
    esac
    if [ "$restarts" = 0 ] || [ "$signals" != 0 ]; then
        exit "$code"
    fi
    echo "exit code $code: training starts again, $restarts restarts left" >&2
done
