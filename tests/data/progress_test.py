"""The progress line of long commands."""

import types

from difftx import progress


def test_line_every_ten_seconds_shows_the_time_left(monkeypatch, capsys):
    """Track 20 parts of four seconds without a terminal. Lines appear after 12, 24, … seconds, but not at the end."""
    now = [100.0]
    monkeypatch.setattr(progress, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
    with progress.Work() as work:
        for _ in work.track(range(20), "parts", 20):
            now[0] += 4
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == ["parts: 3 of 20, 0:01:08 left", "parts: 6 of 20, 0:00:56 left"]
    assert lines[-1] == "parts: 18 of 20, 0:00:08 left"
    assert len(lines) == 6
