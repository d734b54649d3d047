"""Confirmation of config fields that make a suite contact an address, send a secret or execute code.

A run directory may come from another person. eval.py therefore accepts these fields only from the command line or with
a confirmation. Two downloads need no confirmation, because their addresses are fixed and they neither send data nor
execute code: a tiktoken vocabulary, whose SHA-256 tiktoken checks, and the data of the tasks in `PLAIN_TASKS`.
"""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from difftx import evals
from difftx.config import Config
from difftx.config.eval import JudgeConfig
from difftx.errors import UserError
from difftx.evals.harness.suite import LOCAL_TASKS
from difftx.parallel.multihost import say

FLAG = "--trust_run_config"
# Tasks of lm-eval whose data are plain files on the Hugging Face hub. Other tasks may execute code.
PLAIN_TASKS = {path.stem for path in LOCAL_TASKS.glob("[!_]*.yaml")}


def confirm_outward(
    config: Config, workdir: Path, suites: Sequence[str], overrides: Mapping[str, str], *, trusted: bool
) -> None:
    """Print the values that the user confirms with `FLAG`, or raise an error without the flag.

    Args:
        config: Config of the run, with the overrides.
        workdir: Directory of the run, for messages.
        suites: Suites to evaluate.
        overrides: Fields given on the command line, which need no confirmation.
        trusted: Whether the flag is given.

    Raises:
        UserError: A suite reads such a field, its value comes from the run directory, and the flag is not given.
    """
    for field, value, effect in _outward_fields(config, suites, overrides):
        if field in overrides:
            continue
        source = f"{field}={value!r} in {workdir / 'config.json'}"
        if not trusted:
            flag = shlex.quote(f"--{field}={value}")
            raise UserError(f"{source} would {effect}; to allow it, add {flag}, or {FLAG} for all such fields")
        say(f"{FLAG}: {source} is trusted to {effect}")


def _outward_fields(
    config: Config, suites: Sequence[str], overrides: Mapping[str, str]
) -> Iterator[tuple[str, str, str]]:
    """Yield (field, value, effect) for each such field that the suites would use."""
    settings, judge = config.eval, config.eval.judge
    names = {name for suite in suites for name in evals.with_inner(config, suite)}
    if "hallucination" in names and settings.hallucination.judge_model is not None:
        # A user who names a judge model on the command line, but no endpoint, expects the default endpoint.
        if judge.base_url != JudgeConfig.base_url or "eval.hallucination.judge_model" not in overrides:
            yield "eval.judge.base_url", judge.base_url, "send documents and answers to that address"
        if judge.key_variable is not None and judge.key_variable != JudgeConfig.key_variable:
            yield "eval.judge.key_variable", judge.key_variable, "send the content of that environment variable"
    if "harness" in names:
        if settings.harness.include_path is not None:
            yield "eval.harness.include_path", settings.harness.include_path, "execute code of that folder"
        if not set(settings.harness.tasks) <= PLAIN_TASKS:
            tasks = ",".join(settings.harness.tasks)
            yield "eval.harness.tasks", tasks, "download data of those tasks, and execute their code"
