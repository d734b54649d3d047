"""Run directories for tests, written as a training writes them."""

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
from conftest import ROOT, replace

from difftx.config.recipes import load_config
from difftx.evals.result import Result
from difftx.files import make_folder
from difftx.run_files import small_files
from difftx.training.checkpoint.checkpointer import Checkpointer
from difftx.training.metrics import MetricsWriter
from difftx.training.run import RUN_FORMAT, Run
from difftx.training.state import init_state


def tiny(architecture, **overrides):
    changes = {
        "logging.trackers": "",
        "optimizer.warmup_steps": "0",
        **{k.replace("__", "."): str(v) for k, v in overrides.items()},
    }
    return load_config(f"{ROOT / 'configs' / 'quickstart.py'}:{architecture}", changes)


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
    text="x",
):
    """Write config, manifest and metrics of `config.train.steps` steps with the given loss, and return the folder.

    `text` is the fingerprint of the training text.
    """
    workdir.mkdir(parents=True)
    (workdir / "config.json").write_text(config.to_json())
    manifest = {
        "format": RUN_FORMAT,
        "extensions": [],
        "commit": "0123abc",
        "python": "3.12.1",
        "packages": {"jax": "0.12.0"},
        "command": "difftx train",
        "attention_kernel": "xla",
        "devices": {"kind": "cpu", "count": 2, "mesh": {"data": 1, "fsdp": 2}},
        "data": {"tokenizer": tokenizer, "train_tokens": {"text": 1000}, "valid_tokens": {"text": 100}},
    }
    manifest["data"]["source train"] = text
    (workdir / "manifest.json").write_text(json.dumps(manifest))
    writer = MetricsWriter(workdir, dataclasses.replace(config.logging, trackers=()), 0)
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


def write_result(workdir, suite, step, numbers, charts=(), details=None, options=None):
    """Write a result. `options` is what `difftx eval` records of its settings."""
    folder = workdir / "evals" / suite
    folder.mkdir(parents=True, exist_ok=True)
    numbers = Result(numbers=numbers).numbers
    result = {"suite": suite, "step": step, "numbers": numbers, "charts": list(charts), "details": details or {}}
    result |= {"measures": {name: vars(number) for name, number in numbers.items()}, "options": options or {}}
    (folder / f"{step}.json").write_text(json.dumps(result))


def save_run(config, workdir, steps):
    """Create a run directory with checkpoints of these steps, whose parameters differ, and return the run."""
    run = Run.open(config, workdir)
    make_folder(workdir)
    with small_files(workdir) as owner:
        dataclasses.replace(run, owner=owner).write_files()
    with jax.set_mesh(run.mesh):
        state = jax.jit(lambda: init_state(config))()
        scaled = jax.jit(lambda params, factor: jax.tree.map(lambda x: factor * x, params))
        writer = Checkpointer(workdir, replace(config, "checkpoint", keep=9).checkpoint)
        for step in steps:
            saved = dataclasses.replace(state, step=jnp.int32(step), params=scaled(state.params, 1 + step / 100))
            writer.save(saved, {"examples": 0, "signature": run.data.signature}, config)
        writer.close()
    return run
