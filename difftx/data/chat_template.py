"""Chat templates: Jinja templates that turn a conversation into text. They are rendered as in transformers."""

import datetime
import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from difftx.errors import UserError

REASONING = ("reasoning_content", "thinking", "reasoning")  # Keys of a message's reasoning. The first one found counts.
ROLES = "role and content, such as {'role': 'user', 'content': 'Hello'}"

type Message = Mapping[str, Any]  # Has "role", and usually "content".
type Date = datetime.datetime | None  # The date that a template's `strftime_now` writes. None: today.


class ChatTemplate:
    """A tokenizer's chat template. `special_tokens` are its variables bos_token, eos_token, …."""

    def __init__(self, text: str, special_tokens: Mapping[str, str], name: str):
        """Compile the template. Raise `UserError` with the tokenizer's `name` if it is invalid."""
        self.text, self._special_tokens, self._name = text, dict(special_tokens), name
        try:
            self._template = _environment().from_string(text)
        except Exception as error:  # Jinja evaluates constants while compiling, so any type of error may occur.
            raise UserError(f"{name}: the chat template is not valid ({error})") from error

    @property
    def sha256(self) -> str:
        """SHA-256 of the template's text, recorded in `meta.json` of a store of conversations."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool, date: Date = None) -> str:
        """Return the text of a conversation, and optionally the start of the assistant's next message."""
        _require_valid(messages)
        try:
            return self._template.render(
                messages=[_normalised(message) for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                strftime_now=(date or datetime.datetime.now()).strftime,
                **self._special_tokens,
            )
        except Exception as error:  # A template may raise errors of many types, such as TypeError.
            raise UserError(f"{self._name}: the chat template refuses the messages: {error}") from error

    def turns(self, messages: Sequence[Message], date: Date = None) -> list[tuple[str, str]]:
        """Return a pair for each assistant message: the text before it, as a prompt in generation, and its own text.

        Skip an assistant message at the start, because a model is never prompted without a message.
        """
        _require_valid(messages)
        found = []
        for i, message in enumerate(messages):
            if message["role"] == "assistant" and i > 0:
                before = self.render(messages[:i], add_generation_prompt=True, date=date)
                whole = self.render(messages[: i + 1], add_generation_prompt=False, date=date)
                if not whole.startswith(before):
                    raise UserError(
                        f"{self._name}: the chat template writes messages 1 … {i} in another way when message {i + 1} "
                        "follows, so that the assistant's text cannot be told from its prompt; use another template"
                    )
                found.append((before, whole[len(before) :]))
        if not found:
            raise UserError("messages: no message has the role assistant after the first, so there is no target")
        return found


class _Generation(jinja2.ext.Extension):
    """The block {% generation %} … {% endgeneration %}, which marks the assistant's tokens for transformers."""

    tags = {"generation"}  # noqa: RUF012  # Jinja declares this attribute without ClassVar.

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _require_valid(messages: object) -> None:
    if isinstance(messages, str) or not isinstance(messages, Sequence) or not messages:
        raise UserError(f"messages: not a list of at least one message with {ROLES}")
    for i, message in enumerate(messages, start=1):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise UserError(f"messages: message {i} is not an object with {ROLES}")


def _normalised(message: Message) -> dict[str, Any]:
    # Drop missing values and set both keys, as in transformers: many templates test whether a key exists, and read the
    # reasoning under one of two keys.
    found = {key: value for key, value in message.items() if value is not None}
    reasoning = [found[name] for name in REASONING if name in found]
    return {"thinking": reasoning[0], **found, "reasoning_content": reasoning[0]} if reasoning else found


@functools.cache
def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """Return the sandbox that transformers uses, with the same functions, except those with random results."""

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
        # Jinja's own filter would escape HTML characters.
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    # The output is a prompt, not HTML, so escape nothing.
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(  # nosec B701
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception  # pyrefly: ignore[unsupported-operation]
    del environment.globals["lipsum"], environment.filters["random"]
    return environment
