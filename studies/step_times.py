"""Times of a training step of the arms on novels with 0.15M parameters, interleaved in one process on one core.

JAX_PLATFORMS=cpu XLA_FLAGS=--xla_cpu_multi_thread_eigen=false python studies/step_times.py

In each round, every arm takes some steps in turn, on rows of random tokens. The script writes the study `step-times`
of docs/results.json, with a record for each arm and round, and prints the median ratios to the Transformer. The seed of
a record is the number of its round. Let nothing else run meanwhile. For the page, `taskset -c 0` preceded the
command. The wall times of the runs of a study do not replace this: they come from sessions with other loads.
"""

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax

from benchmarks.throughput import prepare
from difftx.config.recipes import load_config
from difftx.errors import run_command
from difftx.json_files import read_json
from difftx.model.abstract import count_parameters
from studies import results
from studies.size_tables import SMALLEST, step_times_table
from studies.study_records import REFERENCE, STEP_TIME

STUDY = "step-times"
# Recipe → arms. The models that are made from a Transformer have a recipe of their own.
ARMS = {
    "controls": (REFERENCE, "zero-norm", "diff", "diff_v2", "gdla", "gated", "top_k", "signed_mask"),
    "toy_continued": ("zero-branch", "dex", "split"),
}


def main(arguments: Sequence[str]) -> int:
    """Measure all arms, write their records, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--steps", type=int, default=40, help="steps of a round (%(default)s)")
    args = parser.parse_args(arguments)
    specs = {arm: f"configs/{recipe}.py:{SMALLEST}-{arm}" for recipe, arms in ARMS.items() for arm in arms}
    described = ["git", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+"]
    commit = subprocess.run(described, cwd=results.ROOT, capture_output=True, text=True, check=True).stdout.strip()
    contestants = {arm: prepare(load_config(spec, {"data.path": "none"})) for arm, spec in specs.items()}
    for contestant in contestants.values():
        contestant.run(2)  # Warm-up.
        contestant.reset()
    for _ in range(args.rounds):
        for contestant in contestants.values():
            contestant.run(args.steps)
    records = [
        {
            "task": SMALLEST,
            "arm": arm,
            "seed": number,
            "changes": {},
            "sweep": __doc__.splitlines()[2],
            "command": f"python train.py --config={specs[arm]}",
            "learning_rate": contestant.config.optimizer.learning_rate,
            "parameters": count_parameters(contestant.config.model).total,
            "tokens": (tokens := args.steps * contestant.config.train.global_batch_tokens),
            "commit": commit,
            "jax": jax.__version__,
            "hardware": results.hardware({"kind": jax.devices()[0].device_kind, "count": 1}),
            "wall_seconds": round(tokens / rate, 3),
            "numbers": {STEP_TIME: round(1000 * tokens / rate / args.steps, 4)},
        }
        for arm, contestant in contestants.items()
        for number, rate in enumerate(contestant.rates)
    ]
    results.write_collected({**read_json(results.COLLECTED), STUDY: records})
    print(step_times_table(records))
    return 0


if __name__ == "__main__":
    run_command(lambda: main(sys.argv[1:]))
