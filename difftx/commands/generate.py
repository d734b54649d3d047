"""Text from a trained run: python -m difftx generate --workdir=DIR --prompt=TEXT | --prompts=FILE.jsonl."""

import argparse
import contextlib
import dataclasses
import io
import json
import logging
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from difftx.commands.flags import parse_command
from difftx.commands.prompts import SEEDS, Prompt, read_prompts
from difftx.errors import UserError, printable
from difftx.files import json_sha256, require_writable_file, write_atomically
from difftx.parallel import multihost

if TYPE_CHECKING:
    from difftx.inference.decode import LanguageModel
    from difftx.inference.generate import Request
    from difftx.inference.sampling import Sampling

NEW_TOKENS = 256  # Default of --new_tokens, if the context has room.
PROGRESS_SECONDS = 10.0


def main(arguments: Sequence[str]) -> int:
    """Read the flags and generate text. Exit codes: 0 done, 2 bad input, 1 any other error."""
    parser = argparse.ArgumentParser("difftx generate", description=__doc__, allow_abbrev=False)
    parser.add_argument("--workdir", type=Path, required=True, help="directory of the run")
    parser.add_argument("--step", type=int, help="checkpoint; the newest if not given")
    parser.add_argument("--prompt", help="text to complete")
    parser.add_argument("--prompts", type=Path, metavar="FILE.jsonl", help='objects with "prompt" and perhaps "seed"')
    parser.add_argument("--out", type=Path, metavar="FILE.jsonl", help="those objects with completions; else stdout")
    parser.add_argument("--batch_rows", type=int, default=16, help="prompts of a file that are completed together")
    parser.add_argument("--new_tokens", type=int, help=f"at most; if not given {NEW_TOKENS}, or what the context holds")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 takes the most likely token")
    parser.add_argument("--top_k", type=int, help="sample among so many tokens, the most likely")
    parser.add_argument("--top_p", type=float, help="sample among the most likely tokens that reach this probability")
    parser.add_argument("--repetition_penalty", type=float, help="more than 1: tokens of the text become less likely")
    parser.add_argument("--seed", type=int, default=0, help="of the samples; prompt i of a file has seed + i")
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before it; may be repeated")
    multihost.add_flags(parser)
    parser.epilog = "--mesh.field=value changes a field of the run's mesh"
    options, overrides = parse_command(parser, arguments, "mesh")
    prompts = _prompts(options)
    logging.getLogger("absl").setLevel(logging.ERROR)  # orbax logs every restore.

    # These modules are slow to import, so the flags are checked first.
    from difftx.inference.load import load
    from difftx.inference.sampling import Sampling

    sampling = Sampling(
        repetition_penalty=options.repetition_penalty,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
    )
    lm = load(options.workdir, options.step, overrides, options)
    requests = multihost.agree(
        "the prompts",
        lambda: [_request(lm, prompt, options.new_tokens) for prompt in prompts],
        lambda requests: {"prompts": json_sha256([dataclasses.astuple(request) for request in requests])},
        lm.config.multihost.barrier_timeout_seconds,
    )
    if options.prompt is not None:
        _stream(lm, prompts[0], requests[0], sampling, options.stop)
    else:
        _complete_file(lm, prompts, requests, sampling, options)
    return 0


def _prompts(options: argparse.Namespace) -> list[Prompt]:
    if (options.prompt is None) == (options.prompts is None):
        raise UserError("give --prompt=TEXT or --prompts=FILE.jsonl, one of them")
    if options.out is not None and options.prompts is None:
        raise UserError(f"--out={options.out}: it is for --prompts; --prompt prints its text")
    if options.out is not None and not options.out.parent.is_dir():
        raise UserError(f"--out={options.out}: there is no folder {options.out.parent}")
    if options.out is not None:
        require_writable_file(options.out)
    if not 0 <= options.seed < SEEDS:
        raise UserError(f"--seed={options.seed} must lie in 0 … 2**32 - 1")
    for flag in ("batch_rows", "new_tokens"):
        value = getattr(options, flag)
        if value is not None and value < 1:
            raise UserError(f"--{flag}={value} must be at least 1")
    if "" in options.stop:
        raise UserError("--stop='': nothing comes before it; give a text")
    if options.prompts is not None:
        return read_prompts(options.prompts, options.seed)
    if not options.prompt:
        raise UserError("--prompt='' is empty; give at least a character")
    return [Prompt(name="--prompt", text=options.prompt, seed=options.seed, record={})]


def _request(lm: "LanguageModel", prompt: Prompt, new_tokens: int | None) -> "Request":
    from difftx.inference.generate import Request, check

    tokens = lm.tokenizer.encode_ordinary(prompt.text)
    if new_tokens is None:
        new_tokens = max(1, min(NEW_TOKENS, lm.window - len(tokens)))
    request = Request(prompt=tokens, new_tokens=new_tokens, seed=prompt.seed)
    check(lm, request, prompt.name)
    return request


def _stream(lm: "LanguageModel", prompt: Prompt, request: "Request", sampling: "Sampling", stop: list[str]) -> None:
    """Print a prompt, and its completion while it is generated."""
    from difftx.inference.generate import generate

    def show(index: int, text: str) -> None:
        if multihost.is_primary():
            print(printable(text), end="", flush=True)

    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # The terminal may not use UTF-8.
    show(0, prompt.text)
    with contextlib.suppress(KeyboardInterrupt):  # Ctrl-C ends the completion.
        generate(lm, [request], sampling, stop=stop, on_text=show)
    show(0, "\n")


def _complete_file(
    lm: "LanguageModel",
    prompts: list[Prompt],
    requests: "list[Request]",
    sampling: "Sampling",
    options: argparse.Namespace,
) -> None:
    """Complete all prompts, and write the completions in the order of the prompts, to --out atomically or to stdout."""
    from difftx.inference.generate import generate

    # Batch prompts of similar lengths: a batch takes as long as its longest row.
    order = sorted(range(len(prompts)), key=lambda i: len(requests[i].prompt))
    done: dict[int, dict[str, Any]] = {}
    began = reported = time.monotonic()
    for start in range(0, len(order), options.batch_rows):
        batch = order[start : start + options.batch_rows]
        completions = generate(lm, [requests[i] for i in batch], sampling, stop=options.stop)
        for i, completion in zip(batch, completions, strict=True):
            done[i] = prompts[i].record | {
                "completion": completion.text,
                "ended_by": completion.ended_by,
                "new_tokens": len(completion.tokens),
            }
        now = time.monotonic()
        if now - reported >= PROGRESS_SECONDS and len(done) < len(order) and multihost.is_primary():
            reported, seconds = now, now - began
            rate = sum(record["new_tokens"] for record in done.values()) / seconds
            left = (len(order) - len(done)) * seconds / len(done)
            print(f"{len(done)} of {len(order)} prompts, {rate:,.0f} tokens/s, {left:,.0f} s left", file=sys.stderr)
    if not multihost.is_primary():
        return
    text = "".join(json.dumps(done[i]) + "\n" for i in range(len(order)))
    if options.out is None:
        print(text, end="")
        return
    write_atomically(options.out, text)
    print(printable(f"{options.out}: {len(order)} completions"))
