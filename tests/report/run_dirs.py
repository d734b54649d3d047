"""Run directories for tests, written as a training writes them."""

import json
import math

from difftx.training.metrics import MetricsWriter
from difftx.training.run import RUN_FORMAT


def write_run(
    workdir,
    config,
    *,
    loss=lambda step: 1 + 1 / step,
    tokenizer="a" * 64,
    every=1,
    layers=0,
    valid_every=3,
    skipped_step=None,
):
    """Write config, manifest and metrics of `config.train.steps` steps with a loss a step; return the folder."""
    workdir.mkdir(parents=True)
    (workdir / "config.json").write_text(config.to_json())
    manifest = {
        "format": RUN_FORMAT,
        "commit": "0123abc",
        "python": "3.12.1",
        "packages": {"jax": "0.12.0"},
        "extensions": [],
        "devices": {"kind": "cpu", "count": 2, "mesh": {"data": 1, "fsdp": 2}},
        "data": {"tokenizer": tokenizer, "train_tokens": {"text": 1000}, "valid_tokens": {"text": 100}},
    }
    (workdir / "manifest.json").write_text(json.dumps(manifest))
    writer = MetricsWriter(workdir, config.logging, 0)
    for step in range(every, config.train.steps + 1, every):
        row = {
            "loss": loss(step),
            "grad_norm": 0.5 + 0.1 * (step % 7),
            "tokens": step * config.train.global_batch_tokens,
            "tokens_per_second": 100.0 * step,
            "step_seconds": 2.0,
            "skipped": int(step == skipped_step),
        }
        writer.write("train", step, row | ({"lambda": [0.2 + 0.02 * i for i in range(layers)]} if layers else {}))
        if step % valid_every == 0:
            bits = loss(step) / math.log(2) / 4
            writer.write("valid", step, {"suite": "loss", "loss": loss(step), "perplexity": 2.0, "bits_per_byte": bits})
    writer.close()
    return workdir
