"""Text that grows by tokens: whole characters only, and never past a stop string."""

import codecs
from collections.abc import Sequence


class TextStream:
    """Turns one row's tokens into text as they come.

    A character that several tokens share is held back until it is whole; text that may be the beginning of a stop
    string, until it is clear whether it is one.
    """

    def __init__(self, bytes_of: Sequence[bytes | None], stop: Sequence[str]):
        """Begin; `bytes_of` are the tokens' bytes, as `token_bytes` returns them."""
        self.text = ""  # All that was released.
        self.stopped = False  # A stop string came: the text ends before it.
        self._bytes_of, self._stop = bytes_of, tuple(stop)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""

    def add(self, token: int) -> str:
        """Take a token and return the text that it releases."""
        return self._release(self._decoder.decode(self._bytes_of[token] or b""), final=False)

    def finish(self) -> str:
        """Return what was held back: no token follows."""
        return self._release(self._decoder.decode(b"", final=True), final=True)

    def _release(self, new: str, *, final: bool) -> str:
        if self.stopped:
            return ""
        text, self._held = self._held + new, ""
        # The one that is complete first, so that it does not matter where tokens end; of several, the longest.
        found = [(at + len(stop), at) for stop in self._stop if (at := text.find(stop)) >= 0]
        if found:
            self.stopped, text = True, text[: min(found)[1]]
        elif not final:
            held = max((_overlap(text, stop) for stop in self._stop), default=0)
            text, self._held = text[: len(text) - held], text[len(text) - held :]
        self.text += text
        return text


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` with which `stop` begins."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if stop.startswith(text[-n:])), 0)
