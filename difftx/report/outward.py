"""Fields of a run's config with which a suite contacts an address, sends a secret or executes code.

A run directory may come from somebody else, so eval.py takes these fields from the command line or asks for a
confirmation. Two kinds of downloads need none, since they go to fixed addresses, send nothing and execute nothing: a
vocabulary of tiktoken, which tiktoken compares with its SHA-256, and the data of the tasks in `PLAIN_TASKS`.
"""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from difftx import evals
from difftx.config import Config
from difftx.config.build import config_from_dict
from difftx.errors import UserError
from difftx.evals.harness import LOCAL_TASKS
from difftx.parallel.multihost import say

FLAG = "--trust_run_config"
# Tasks of lm-eval whose data are plain files of the Hugging Face hub; other tasks may execute code.
PLAIN_TASKS = {path.stem for path in LOCAL_TASKS.glob("[!_]*.yaml")}


def confirm_outward(
    config: Config, workdir: Path, suites: Sequence[str], overrides: Mapping[str, str], *, trusted: bool
) -> None:
    """Print the values that the user confirms with `FLAG`; without the flag, refuse them.

    Args:
        config: of the run, with the overrides.
        workdir: of the run, for messages.
        suites: that are to be evaluated.
        overrides: fields that are given on the command line and need no confirmation.
        trusted: whether the flag is given.

    Raises:
        UserError: a suite reads such a field, and its value is from the run directory alone.
    """
    for field, value, effect in _outward_fields(config, suites, overrides):
        if field in overrides:
            continue
        named = f"{field}={value!r} in {workdir / 'config.json'}"
        if not trusted:
            flag = shlex.quote(f"--{field}={value}")
            raise UserError(f"{named} would {effect}; if you want that, add {flag}, or {FLAG} for all such fields")
        say(f"{FLAG}: {named} is trusted to {effect}")


def _outward_fields(
    config: Config, suites: Sequence[str], overrides: Mapping[str, str]
) -> Iterator[tuple[str, str, str]]:
    """Yield field, value and effect of what the suites would use."""
    settings, defaults = config.eval, config_from_dict({}).eval
    names = {name for suite in suites for name in evals.with_inner(config, suite)}
    if "hallucination" in names and settings.hallucination.judge_model is not None:
        url, key_variable = settings.judge.base_url, settings.judge.key_variable
        # Who asks for a judge on the command line and names no endpoint expects the default one.
        if url != defaults.judge.base_url or "eval.hallucination.judge_model" not in overrides:
            yield "eval.judge.base_url", url, "send documents and answers to that address"
        if key_variable is not None and key_variable != defaults.judge.key_variable:
            yield "eval.judge.key_variable", key_variable, "send the content of that environment variable"
    if "harness" in names:
        if settings.harness.include_path is not None:
            yield "eval.harness.include_path", settings.harness.include_path, "execute code of that folder"
        if not set(settings.harness.tasks) <= PLAIN_TASKS:
            tasks = ",".join(settings.harness.tasks)
            yield "eval.harness.tasks", tasks, "download data of those tasks, and execute their code"
