"""Commands of difftx as processes that need not import JAX again.

`SERVER` is a process that has imported what the commands import. It forks for each command, and the fork runs the
command's own `__main__` block and ends as any process does. This saves two to four seconds per command. Tests of
start-up and of imports start new interpreters instead (`run_new`).
"""

import atexit
import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from conftest import ROOT, child_environment

SERVER = """
import contextlib, gc, importlib, json, os, runpy, sys, warnings
import difftx.commands.evaluate, difftx.inference.load, difftx.launch.runner, difftx.training.loop

# Part of a command line → module that such commands import. It takes seconds, and only some tests need it.
LATER = {
    "report": "difftx.report.page",
    "--curves": "difftx.report.curves",
    "gs://": "gcsfs",
    "s3://": "s3fs",
}

def serve():
    for line in sys.stdin:
        request = json.loads(line)
        if "poll" in request:
            pid, status = os.waitpid(request["poll"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        else:
            for part, module in LATER.items():
                if module not in sys.modules and any(part in word for word in request["command"]):
                    with contextlib.suppress(ImportError):  # The command will say what is missing.
                        importlib.import_module(module)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=".*os.fork")  # JAX has no threads before its first use.
                answer = os.fork()
            if answer == 0:
                return request
        print(json.dumps(answer), flush=True)
    sys.exit()

sys.path[0] = os.getcwd()  # The entry "" would mean another folder after os.chdir.
gc.freeze()  # The forks' garbage collectors then pass over the imported modules.
request = serve()
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
for number, path in ((1, request["stdout"]), (2, request["stderr"])):
    os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), number)
os.environ.clear()
os.environ.update(request["environment"])
os.chdir(request["folder"])
sys.argv = request["command"]
if sys.argv[0] == "difftx":
    runpy.run_module("difftx", run_name="__main__", alter_sys=True)
else:
    sys.path.insert(0, os.path.dirname(os.path.abspath(sys.argv[0])))  # As Python does for a script.
    runpy.run_path(sys.argv[0], run_name="__main__")
"""


class CommandServer:
    """Starts commands as forks of one process."""

    def __init__(self, before: Sequence[str] = ()):
        """Start the process, with `before` in front of its command line."""
        self._lock = threading.Lock()  # Threads of the chaos test start and wait for commands at the same time.
        self._process = subprocess.Popen(
            [*before, sys.executable, "-c", SERVER],
            cwd=ROOT,
            env=child_environment(1),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def start(
        self,
        command: Sequence[object],
        *,
        stdout: str | Path = os.devnull,
        stderr: str | Path = os.devnull,
        environment: Mapping[str, str] | None = None,
        folder: Path = ROOT,
    ) -> "Command":
        """Start a command, such as `["train.py", "--workdir=run"]` or `["difftx", "plan"]`.

        It runs in `folder`, and its output is appended to the files, which exist on return. The default environment has
        one CPU device. An environment cannot change the variables of JAX, which the server has read already.
        """
        environment = dict(child_environment(1) if environment is None else environment)
        changed = {k for k, _ in environment.items() ^ child_environment(1).items() if k.startswith("JAX_")}
        assert not changed, f"a fork cannot change {changed}; start a new interpreter"
        for path in (stdout, stderr):
            open(path, "a").close()
        request = {"command": [str(word) for word in command], "environment": environment, "folder": str(folder)}
        return Command(self, self.ask(request | {"stdout": str(stdout), "stderr": str(stderr)}))

    def ask(self, request: dict[str, Any]) -> Any:
        """Return the server's answer to a request. Several threads may ask."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._lock:
            print(json.dumps(request), file=self._process.stdin, flush=True)
            return json.loads(self._process.stdout.readline())

    def run(
        self,
        command: Sequence[object],
        *,
        environment: Mapping[str, str] | None = None,
        folder: Path = ROOT,
        timeout: float = 300,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command, and return its exit code and output."""
        (result,) = self.run_together([command], environment=environment, folder=folder, timeout=timeout)
        return result

    def run_together(
        self,
        commands: Sequence[Sequence[object]],
        *,
        environment: Mapping[str, str] | None = None,
        folder: Path = ROOT,
        timeout: float = 300,
    ) -> list[subprocess.CompletedProcess[str]]:
        """Run commands at the same time, and return the exit code and output of each."""
        with tempfile.TemporaryDirectory() as outputs_folder:
            outputs = [
                (Path(outputs_folder, f"{i}.out"), Path(outputs_folder, f"{i}.err")) for i in range(len(commands))
            ]
            started = [
                self.start(command, stdout=out, stderr=errors, environment=environment, folder=folder)
                for command, (out, errors) in zip(commands, outputs, strict=True)
            ]
            codes = [command.wait(timeout) for command in started]
            return [
                subprocess.CompletedProcess(list(map(str, command)), code, out.read_text(), errors.read_text())
                for command, code, (out, errors) in zip(commands, codes, outputs, strict=True)
            ]

    def stop(self) -> None:
        """Stop the server, but not the commands that it has started."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)
        assert self._process.stdout is not None
        self._process.stdout.close()


class Command:
    """A command that a `CommandServer` has started, with the methods of `subprocess.Popen` that tests use."""

    def __init__(self, server: CommandServer, pid: int):
        """Refer to the server's child process `pid`."""
        self.pid = pid
        self.returncode: int | None = None
        self._server = server

    def poll(self) -> int | None:
        """Return the exit code, or None while the command runs."""
        if self.returncode is None:
            self.returncode = self._server.ask({"poll": self.pid})
        return self.returncode

    def wait(self, timeout: float = 300) -> int:
        """Return the exit code. A command that takes longer than `timeout` seconds is killed, and fails the test."""
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                self.kill()
                raise TimeoutError(f"process {self.pid} did not end within {timeout} s")
            time.sleep(0.01)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the command, unless it has ended."""
        if self.poll() is None:
            self.send_signal(signal.SIGKILL)


def run_new(*arguments: object, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    """Run a new Python interpreter with one CPU device, and return its exit code and output."""
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, env=child_environment(1), capture_output=True, text=True, timeout=timeout)


@functools.cache
def commands(before: tuple[str, ...] = ()) -> CommandServer:
    """Return the server of this test process with `before` in front of its command line.

    It starts at the first call and stops with the tests.
    """
    server = CommandServer(before)
    atexit.register(server.stop)
    return server
