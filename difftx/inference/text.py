"""Conversion of streamed tokens to text, in whole characters and only up to a stop string."""

import codecs
from collections.abc import Sequence


class TextStream:
    """A converter of one row's tokens to text, as the tokens arrive.

    The stream holds back an incomplete character until later tokens complete it. It also holds back text that may be
    the beginning of a stop string, until later text decides.
    """

    def __init__(self, bytes_of: Sequence[bytes | None], stop: Sequence[str]):
        """Start with an empty text; `bytes_of` are the bytes of all tokens, as `token_bytes` returns them."""
        self.text = ""  # All released text.
        self.stopped = False  # True after a stop string; the text ends before the stop string.
        self._bytes_of, self._stop = bytes_of, tuple(stop)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""

    def add(self, token: int) -> str:
        """Take a token and return the text that it releases."""
        return self._release(self._decoder.decode(self._bytes_of[token] or b""), final=False)

    def finish(self) -> str:
        """Return the text that was held back, after the last token."""
        return self._release(self._decoder.decode(b"", final=True), final=True)

    def _release(self, new: str, *, final: bool) -> str:
        if self.stopped:
            return ""
        text, self._held = self._held + new, ""
        # Choose the stop string that ends first, so that token boundaries do not matter; of several, the longest.
        found = [(at + len(stop), at) for stop in self._stop if (at := text.find(stop)) >= 0]
        if found:
            self.stopped, text = True, text[: min(found)[1]]
        elif not final:
            held = max((_overlap(text, stop) for stop in self._stop), default=0)
            text, self._held = text[: len(text) - held], text[len(text) - held :]
        self.text += text
        return text


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if stop.startswith(text[-n:])), 0)
