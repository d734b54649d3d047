#!/bin/bash
# Train $name on every worker of the TPU VM $tpu, which has the repository in ~/$directory and its packages in
# ~/$directory/.venv. Training is started again whenever the workers exit with 75. Ctrl-C or SIGTERM to this script
# stops the workers after a checkpoint.

on_workers() {
    gcloud compute tpus tpu-vm ssh $tpu --zone=$zone --worker=all --command="$$1" </dev/null
}

train=$$(cat <<'END'
cd ~/$directory && export PATH="$$PWD/.venv/bin:$$PATH" && exec $command --distributed
END
)

signals=0
stop() {
    signals=$$((signals + 1))
    on_workers $stop
}
trap stop INT TERM

while :; do
    # Training runs in the background: bash runs a trap only between commands, but a signal interrupts `wait`, which is
    # then called again.
    on_workers "$$train" &
    training=$$!
    before=
    while [ "$$before" != "$$signals" ]; do
        before=$$signals
        wait "$$training"
        code=$$?
    done
    if [ "$$code" != 75 ] || [ "$$signals" != 0 ]; then
        exit "$$code"
    fi
done
