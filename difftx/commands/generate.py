"""Generate text with a trained model: difftx generate --workdir=DIR --prompt=TEXT | --prompts=FILE.jsonl."""

import argparse
import contextlib
import dataclasses
import itertools
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from difftx.commands.flags import CountFlag, Parser, PathFlag, add_weights_flag, require_file_path, value_flag
from difftx.config.build import parse
from difftx.config.fields import Seed
from difftx.data.records import Record, read_records
from difftx.errors import UserError, printable
from difftx.files import write_atomically
from difftx.inference.sampling import Sampling, derived_seed
from difftx.json_files import json_sha256
from difftx.parallel import multihost
from difftx.progress import Work

if TYPE_CHECKING:
    from difftx.inference.decode import LanguageModel
    from difftx.inference.generate import Request

NEW_TOKENS = 256  # Default of --new_tokens, if the context has enough room.


def main(arguments: Sequence[str]) -> int:
    """Read the flags and generate text. Exit codes: 0 done, 2 bad input, 1 any other error."""
    parser = Parser("difftx generate", __doc__, "mesh")
    parser.add_argument("--workdir", action=PathFlag, required=True, help="directory of the run")
    parser.add_argument("--prompt", help="text to complete")
    prompts = 'objects with "prompt" or "messages", optionally "seed"'
    parser.add_argument("--prompts", action=PathFlag, metavar="FILE.jsonl", help=prompts)
    parser.add_argument("--step", type=int, help="step of the checkpoint; default: the newest")
    add_weights_flag(parser)
    completions = "objects with completions; default: stdout"
    parser.add_argument("--out", action=PathFlag, metavar="FILE.jsonl", help=completions)
    rows = "prompts of a file that are completed together"
    parser.add_argument("--batch_rows", action=CountFlag, default=16, help=rows)
    tokens = f"at most; default: {NEW_TOKENS}, or what the context holds"
    parser.add_argument("--new_tokens", action=CountFlag, help=tokens)
    parser.add_argument("--temperature", type=float, default=0.8, help="0 takes the most likely token")
    parser.add_argument("--top_k", type=int, help="sample among this number of most likely tokens")
    parser.add_argument("--top_p", type=float, help="sample among the most likely tokens that reach this probability")
    parser.add_argument("--repetition_penalty", type=float, help="above 1: repeated tokens become less likely")
    seed = "of the samples; in a file, hashed with a prompt's index"
    parser.add_argument("--seed", action=value_flag(Seed), default=0, help=seed)
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before it; may be repeated")
    multihost.add_flags(parser)
    parser.epilog = "--mesh.field=value changes a field of the run's mesh"
    options, overrides = parser.parse(arguments)
    _check(options)
    records = _read_prompts(options)

    # Imported after the flags are checked, because the imports are slow.
    from difftx.inference.load import load
    from difftx.training.checkpoint.checkpointer import Checkpoints

    sampling = Sampling(**{field.name: getattr(options, field.name) for field in dataclasses.fields(Sampling)})
    lm = load(Checkpoints(options.workdir), options.step, overrides, options, options.weights)
    requests = multihost.agree(
        "the prompts",
        lambda: [_request(lm, record, seed, options.new_tokens) for record, seed in records],
        lambda requests: {"prompts": json_sha256([dataclasses.astuple(request) for request in requests])},
        lm.config.multihost.barrier_timeout_seconds,
    )
    if options.prompt is not None:
        _stream(lm, options.prompt, requests[0], sampling, options.stop)
    else:
        _complete_file(lm, [record for record, _ in records], requests, sampling, options)
    return 0


def _check(options: argparse.Namespace) -> None:
    if (options.prompt is None) == (options.prompts is None):
        raise UserError("give --prompt=TEXT or --prompts=FILE.jsonl, one of them")
    if options.out is not None:
        if options.prompts is None:
            raise UserError(f"--out={options.out} requires --prompts; the completion of --prompt is printed")
        require_file_path("--out", options.out)
    if "" in options.stop:
        raise UserError("--stop='' is empty; give a text")


def _read_prompts(options: argparse.Namespace) -> list[tuple[Record, int]]:
    """Return the prompt, or the prompts in the file, each with the seed of its completion."""
    if options.prompt is not None:
        return [(Record("--prompt", {"prompt": options.prompt}), options.seed)]
    prompts = []
    for i, record in enumerate(read_records(options.prompts, field="--prompts", what="prompts")):
        if "messages" not in record.values:
            record.text("prompt")  # Raises an error if the prompt is not text.
        elif "prompt" in record.values:
            raise UserError(f"{record.name} has both prompt and messages; remove one of them")
        seed = record.values.get("seed", derived_seed(options.seed, i))
        prompts.append((record, parse(seed, Seed, f"{record.name}: seed")))
    return prompts


def _request(lm: "LanguageModel", record: Record, seed: int, new_tokens: int | None) -> "Request":
    from difftx.inference.generate import Request, check

    if "messages" in record.values:
        try:
            tokens = lm.tokenizer.encode_messages(record.field("messages"), "messages")
        except UserError as error:
            raise UserError(f"{record.name}: {error}") from error
    else:
        tokens = lm.tokenizer.encode_prompt(record.text("prompt"))
    if new_tokens is None:
        new_tokens = max(1, min(NEW_TOKENS, lm.context_length - len(tokens)))
    request = Request(prompt=tokens, new_tokens=new_tokens, seed=seed)
    check(lm, request, record.name)
    return request


def _stream(lm: "LanguageModel", prompt: str, request: "Request", sampling: Sampling, stop: list[str]) -> None:
    """Print a prompt, then its completion while it is generated."""
    from difftx.inference.generate import generate

    def show(index: int, text: str) -> None:
        if multihost.is_primary():
            print(printable(text), end="", flush=True)

    show(0, prompt)
    with contextlib.suppress(KeyboardInterrupt):  # Ctrl-C ends the completion.
        generate(lm, [request], sampling, stop=stop, on_text=show)
    show(0, "\n")


def _complete_file(
    lm: "LanguageModel",
    records: list[Record],
    requests: "list[Request]",
    sampling: Sampling,
    options: argparse.Namespace,
) -> None:
    """Complete all prompts. Write the completions to --out or standard output, in the order of the prompts."""
    from difftx.inference.generate import REQUESTS_PER_ROW, generate

    # Batch prompts of similar length, because the longest one determines the size of the cache.
    order = sorted(range(len(requests)), key=lambda i: len(requests[i].prompt))
    done: dict[int, dict[str, Any]] = {}
    with Work(enabled=multihost.is_primary()) as work, work.task("prompts", len(requests)) as advance:
        for batch in itertools.batched(order, options.batch_rows * REQUESTS_PER_ROW):
            rows = options.batch_rows
            completions = generate(lm, [requests[i] for i in batch], sampling, stop=options.stop, batch_rows=rows)
            for i, completion in zip(batch, completions, strict=True):
                done[i] = records[i].values | {
                    "seed": requests[i].seed,
                    "completion": completion.text,
                    "ended_by": completion.ended_by,
                    "new_tokens": len(completion.tokens),
                }
            advance(len(batch))
    if not multihost.is_primary():
        return
    text = "".join(json.dumps(done[i]) + "\n" for i in range(len(order)))
    if options.out is None:
        print(text, end="")
        return
    write_atomically(options.out, text)
    print(printable(f"{options.out}: {len(order)} completions"))
