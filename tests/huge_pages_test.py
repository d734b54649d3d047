"""The restart of commands with huge pages."""

import os
import subprocess
import sys

import pytest
from conftest import ROOT

from difftx import huge_pages

COMMAND = """
import os, sys
from difftx.errors import run_command
print("start", os.getpid(), *sys.argv[1:], flush=True)

def main():
    memory = b"x" * 2**26
    lines = open("/proc/self/smaps_rollup").read().splitlines()
    print(next(int(line.split()[1]) for line in lines if line.startswith("AnonHugePages")))

run_command(main)
"""


@pytest.mark.skipif(not huge_pages.SETTING.exists(), reason="no Linux with huge pages")
@pytest.mark.skipif(
    huge_pages.SETTING.exists() and "[madvise]" not in huge_pages.SETTING.read_text(),
    reason="Linux gives huge pages always or never",
)
@pytest.mark.parametrize("tunables", [None, ""])
def test_a_command_gets_huge_pages_unless_the_user_has_set_the_variable(tunables):
    environment = {name: value for name, value in os.environ.items() if name != huge_pages.VARIABLE}
    if tunables is not None:
        environment[huge_pages.VARIABLE] = tunables
    command = [sys.executable, "-W", "error", "-c", COMMAND, "a b", "--flag"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    *starts, kib = done.stdout.splitlines()
    assert starts == [starts[0]] * (2 if tunables is None else 1)  # The restart keeps the process id and arguments.
    assert starts[0].endswith(" a b --flag")
    assert (int(kib) > 2**15) == (tunables is None)


def test_other_systems_are_left_alone(tmp_path, monkeypatch):
    monkeypatch.delenv(huge_pages.VARIABLE, raising=False)
    monkeypatch.setattr(os, "execv", lambda *_: pytest.fail("started again"))
    monkeypatch.setattr(huge_pages, "SETTING", tmp_path / "enabled")
    huge_pages.restart_with_huge_pages()
    huge_pages.SETTING.write_text("[always] madvise never\n")
    huge_pages.restart_with_huge_pages()
