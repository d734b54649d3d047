"""Talk to a trained model: difftx chat --workdir=DIR. The model is loaded and compiled once.

If the tokenizer has a chat template, the lines are messages of one conversation. Without one, the model continues each
line by itself.
"""

import argparse
import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from difftx.commands.flags import Parser, PathFlag, add_weights_flag
from difftx.commands.generate import NEW_TOKENS
from difftx.config.build import parse_text
from difftx.config.fields import Positive, Seed, types_of
from difftx.errors import UserError, did_you_mean, printable
from difftx.inference.sampling import Sampling, derived_seed
from difftx.parallel import multihost

if TYPE_CHECKING:
    from difftx.data.chat_template import Message
    from difftx.inference.decode import LanguageModel

HELP = """\
/temperature 0.7         divides the logits; 0 takes the most likely token
/top_p 0.9               sample among the most likely tokens that reach this probability; none: all
/top_k 40                sample among this number of most likely tokens; none: all
/repetition_penalty 1.1  above 1: repeated tokens become less likely; none: off
/tokens 256              at most this many new tokens
/seed 7                  seed of the next answer; that of each later answer is a hash of it
/reset                   begin a new conversation
/help                    print this list
/quit                    end, as Ctrl-D does; Ctrl-C ends an answer"""


def main(arguments: Sequence[str]) -> int:
    """Read the flags, then lines until the input ends. Exit codes: 0 done, 2 bad input, 1 any other error."""
    parser = Parser("difftx chat", __doc__.splitlines()[0], "mesh")
    parser.add_argument("--workdir", action=PathFlag, required=True, help="directory of the run")
    parser.add_argument("--step", type=int, help="step of the checkpoint; default: the newest")
    add_weights_flag(parser)
    parser.add_argument("--system", help="first message of each conversation, which instructs the model")
    multihost.add_flags(parser)
    parser.epilog = f"--mesh.field=value changes a field of the run's mesh. Commands in the loop:\n{HELP}"
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    options, overrides = parser.parse(arguments)

    # Imported after the flags are checked, because the import is slow.
    import jax

    from difftx.inference.load import load
    from difftx.training.checkpoint.checkpointer import Checkpoints

    lm = load(Checkpoints(options.workdir), options.step, overrides, options, options.weights)
    if jax.process_count() > 1:
        raise UserError("difftx chat reads from one terminal, so it runs in one process; use difftx generate")
    if options.system is not None:
        lm.tokenizer.require_chat_template("--system")
    what = "The model continues each line" if lm.tokenizer.chat_template is None else "A conversation"
    print(f"{what}; /help lists the commands")
    converse(lm, _lines(), lambda text: print(printable(text), end="", flush=True), system=options.system)
    return 0


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings that lines such as "/seed 7" change."""

    sampling: Sampling
    tokens: Positive[int] = NEW_TOKENS  # Maximum number of new tokens.
    seed: Seed = 0  # Seed of the next answer.

    def changed(self, name: str, value: str) -> "Settings":
        """Return the settings after the line "/name value". Raise `UserError` if the value is invalid."""
        group = self if name in types_of(Settings) else self.sampling
        changed = dataclasses.replace(group, **{name: parse_text(value, types_of(type(group))[name], f"/{name}")})
        return changed if isinstance(changed, Settings) else dataclasses.replace(self, sampling=changed)


CHANGES = ("temperature", "top_p", "top_k", "repetition_penalty", "tokens", "seed")


def converse(
    lm: "LanguageModel", lines: Iterable[str], write: Callable[[str], None], *, system: str | None = None
) -> None:
    """Answer each line, and write each answer while it is generated. A line that is a command changes the settings."""
    settings = Settings(Sampling(repetition_penalty=None, temperature=0.8, top_k=None, top_p=None))
    start: list[Message] = [] if system is None else [{"role": "system", "content": system}]
    messages = [*start]
    for line in lines:
        name, _, value = line.removeprefix("/").partition(" ")
        try:
            if not line.strip():
                continue
            if not line.startswith("/"):
                messages = _answer(lm, messages, line, settings, write)
                settings = dataclasses.replace(settings, seed=derived_seed(settings.seed, 1))
            elif name == "quit":
                return
            elif name == "reset":
                messages = [*start]
            elif name == "help":
                write(f"{HELP}\n")
            elif name in CHANGES:
                settings = settings.changed(name, value.strip())
            else:
                raise UserError(f"/{name}: no such command.{did_you_mean(name, [*CHANGES, 'reset', 'help', 'quit'])}")
        except UserError as error:
            write(f"error: {error}\n")


def _answer(
    lm: "LanguageModel", messages: "list[Message]", line: str, settings: Settings, write: Callable[[str], None]
) -> "list[Message]":
    """Write the model's answer to a line. Return the conversation, with line and answer added."""
    from difftx.inference.generate import Request, check, generate

    asked = [*messages, {"role": "user", "content": line}]
    is_conversation = lm.tokenizer.chat_template is not None
    name = "the conversation" if is_conversation else "the line"
    prompt = lm.tokenizer.encode_messages(asked, name) if is_conversation else lm.tokenizer.encode_prompt(line)
    room = lm.context_length - len(prompt)
    request = Request(prompt=prompt, new_tokens=max(1, min(settings.tokens, room)), seed=settings.seed)
    try:
        check(lm, request, name)
    except UserError as error:
        raise UserError(f"{error}" + ("; /reset begins a new one" if is_conversation else "")) from error
    pieces: list[str] = []

    def show(_: int, text: str) -> None:
        pieces.append(text)
        write(text)

    with contextlib.suppress(KeyboardInterrupt):  # Ctrl-C ends the answer.
        generate(lm, [request], settings.sampling, on_text=show)
    answer = "".join(pieces)
    write("" if answer.endswith("\n") else "\n")
    # Text after the end of the message, such as a line break in the template, is not part of the answer.
    return [*asked, {"role": "assistant", "content": answer.rstrip()}]


def _lines() -> Iterator[str]:
    """Yield the lines of standard input. If it is a terminal, show a prompt before each line."""
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "")
        except (EOFError, KeyboardInterrupt):
            return
        yield line
