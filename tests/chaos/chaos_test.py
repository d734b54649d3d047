"""Chaos tests of training runs.

`make chaos` injects faults into real processes. The environment variables FAULTS and SEED set the number and the seed
of the faults. RUN selects a single run by its number.
"""

import concurrent.futures
import os
import random
import shutil
import time
import traceback

import pytest
from conftest import write_text

from chaos.driver import Run, Tally, impossible_faults, train_undisturbed
from chaos.plan import make_plan

pytestmark = pytest.mark.chaos
LANES = min(4, (os.cpu_count() or 1) + 1)  # Concurrent runs. Those of two processes mostly wait.


class Harness:
    """Carries out plans. Each run is compared with the uninterrupted run of the same layout and data."""

    def __init__(self, text_file, folder):
        self._text_file, self._folder, self._uninterrupted = text_file, folder, {}

    def prepare(self, plan):
        """Train the uninterrupted run of a plan's layout and data, unless it exists."""
        key = (plan.layout, plan.nan)
        if key not in self._uninterrupted:
            self._uninterrupted[key] = train_undisturbed(
                *key, self._text_file, self._folder / f"uninterrupted {plan.name}"
            )

    def carry_out(self, plan):
        """Carry out a plan. Return its tally, and the error as text or None."""
        began, folder = time.monotonic(), self._folder / plan.name
        folder.mkdir()
        run = Run(plan, self._text_file, folder, self._uninterrupted[plan.layout, plan.nan])
        error = None
        try:
            run.carry_out()
            shutil.rmtree(folder)
        except Exception:  # Any error goes into the report, and the other runs continue.
            error = f"run {plan.name}, kept in {folder}:\n{traceback.format_exc()}"
        wrong = "" if error is None else ", FAILED"
        print(f"{plan.name}: {run.tally.faults} faults, {time.monotonic() - began:.0f} s{wrong}", flush=True)
        return run.tally, error


@pytest.fixture(scope="module")
def harness(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chaos")
    return Harness(write_text(folder / "text.txt"), folder)


def test_runs_resume_bit_for_bit_after_faults(harness):
    faults = int(os.environ.get("FAULTS", "200"))
    seed = int(os.environ.get("SEED") or random.SystemRandom().randrange(10**6))
    only = os.environ.get("RUN")
    print(f"\nmake chaos FAULTS={faults} SEED={seed}", flush=True)
    without = impossible_faults()
    for fault, why in without.items():
        print(f"NOT TRIED HERE: {fault}: {why}", flush=True)
    total, errors, number = Tally(), [], 0
    with concurrent.futures.ThreadPoolExecutor(LANES) as pool:
        while not errors and total.faults < faults:
            plans = [make_plan(seed, int(only), without)] if only else []
            while sum(each.faults for each in plans) < faults - total.faults and not only:
                plans.append(make_plan(seed, number, without))
                number += 1
            list(pool.map(harness.prepare, {(each.layout, each.nan): each for each in plans}.values()))
            for tally, error in pool.map(harness.carry_out, plans):
                total.update(tally)
                errors += [error] if error is not None else []
            if only:
                break
    print(total.table())
    assert not errors, "\n\n".join(errors) + f"\n\nagain: make chaos FAULTS={faults} SEED={seed}, one run: RUN=<number>"
