"""make chaos: faults upon faults, in real processes; and the mistakes that would pass if nobody looked.

FAULTS, SEED and RUN in the environment: how many, which, and one run alone.
"""

import concurrent.futures
import os
import random
import shutil
import time
import traceback

import pytest

from chaos.driver import Run, Tally, train_undisturbed
from chaos.plan import plan

pytestmark = pytest.mark.chaos
LANES = max(1, min(4, (os.cpu_count() or 1)))  # Runs at a time.


class Harness:
    """Runs plans, each next to the uninterrupted run of its layout and data."""

    def __init__(self, text_file, folder):
        self._text_file, self._folder, self._whole = text_file, folder, {}

    def prepare(self, plan):
        """Train the uninterrupted run, once."""
        key = (plan.layout, plan.nan)
        if key not in self._whole:
            self._whole[key] = train_undisturbed(*key, self._text_file, self._folder / f"whole {len(self._whole)}")

    def carry_out(self, plan, mistake=None):
        """Return the tally, and what went wrong."""
        began, folder = time.monotonic(), self._folder / (mistake or plan.name)
        folder.mkdir()
        run = Run(plan, self._text_file, folder, self._whole[plan.layout, plan.nan], mistake)
        error = None
        try:
            run.carry_out()
            shutil.rmtree(folder)
        except Exception:
            error = f"run {plan.name}, kept in {folder}:\n{traceback.format_exc()}"
        wrong = "" if error is None else ", FAILED"
        print(f"{plan.name}: {run.tally.faults} faults, {time.monotonic() - began:.0f} s{wrong}", flush=True)
        return run.tally, error


@pytest.fixture
def harness(text_file, tmp_path):
    return Harness(text_file, tmp_path)


def test_whatever_strikes_a_run_goes_on_bit_for_bit(harness):
    faults = int(os.environ.get("FAULTS", "200"))
    seed = int(os.environ.get("SEED") or random.SystemRandom().randrange(10**6))
    only = os.environ.get("RUN")
    print(f"\nmake chaos FAULTS={faults} SEED={seed}", flush=True)
    total, errors, number = Tally(), [], 0
    with concurrent.futures.ThreadPoolExecutor(LANES) as pool:
        while not errors and total.faults < faults:
            plans = [plan(seed, int(only))] if only else []
            while sum(each.faults for each in plans) < faults - total.faults and not only:
                plans.append(plan(seed, number))
                number += 1
            list(pool.map(harness.prepare, {(each.layout, each.nan): each for each in plans}.values()))
            for tally, error in pool.map(harness.carry_out, plans):
                total.update(tally)
                errors += [error] if error is not None else []
            if only:
                break
    print(total.table())
    assert not errors, "\n\n".join(errors) + f"\n\nagain: make chaos FAULTS={faults} SEED={seed}, one run: RUN=<number>"
