"""Registries of named implementations, and the user files (extensions) that add entries to them.

Every extension point of difftx is a `Registry`: architectures, suites, optimizers, schedules, readers and synthetic
tasks. `Registry.register` adds an entry.
"""

import contextlib
import dataclasses
import hashlib
import importlib
import importlib.util
import sys
import traceback
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from difftx.errors import UserError, did_you_mean


@dataclasses.dataclass(frozen=True)
class Extension:
    """A user's file that registered at least one entry."""

    path: str
    sha256: str


_running: list[Path] = []  # Files that `import_file` is running, innermost last.
_extensions: dict[Path, Extension] = {}


class Registry[T](Mapping[str, T]):
    """A mapping from names to implementations of one kind.

    Args:
        kind: Kind of the entries, such as "architecture", for error messages.
        builtin: Name → "module:attribute". Entries are imported at first use, so that commands start fast.
    """

    def __init__(self, kind: str, builtin: Mapping[str, str]):
        self.kind = kind
        self._entries: dict[str, Any] = dict(builtin)

    def register[U](self, name: str) -> Callable[[U], U]:
        """Return a decorator that adds an entry with the given name.

        Raises:
            UserError: The name is taken.
        """

        def add(entry: U) -> U:
            if name in self._entries:
                raise UserError(f"{self.kind} {name!r} exists already; register yours under another name")
            self._entries[name] = entry
            if _running:
                path = _running[-1]
                _extensions[path] = Extension(str(path), hashlib.sha256(path.read_bytes()).hexdigest())
            return entry

        return add

    def __getitem__(self, name: str) -> T:
        if name not in self._entries:
            raise UserError(f"{self.kind} {name!r}: there is none of this name.{did_you_mean(name, self._entries)}")
        entry = self._entries[name]
        if isinstance(entry, str):
            module, _, attribute = entry.partition(":")
            entry = self._entries[name] = getattr(importlib.import_module(module), attribute)
        return entry

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def import_file(path: Path, flag: str) -> types.ModuleType:
    """Run a user's Python file and return it as a module.

    Args:
        path: Path of the file.
        flag: Flag that named the file, such as "--config", for error messages.

    Raises:
        UserError: The name does not end in .py, or the file raised an exception. The message has the line number.
    """
    spec = importlib.util.spec_from_file_location(f"difftx_user_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise UserError(f"{flag}={path}: not a Python file; its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # Dataclasses and pickle look up modules by name.
    _running.append(path.resolve())
    try:
        with one_line_errors(module):
            spec.loader.exec_module(module)
    finally:
        _running.pop()
    return module


@contextlib.contextmanager
def one_line_errors(module: types.ModuleType) -> Iterator[None]:
    """Convert any exception from a user's file to a one-line `UserError` with file name and line number."""
    try:
        yield
    except Exception as error:  # A user's file may raise any exception.
        path = Path(str(module.__file__))
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if Path(frame.filename).resolve() == path.resolve()]
        at = f"{module.__file__}:{lines[-1]}" if lines else str(module.__file__)
        if isinstance(error, SyntaxError) and error.filename and error.lineno:  # The file did not run: no frame.
            at = f"{error.filename}:{error.lineno}"
        text = str(error.args[0] if error.args else error).splitlines()
        kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
        raise UserError(f"{at}: {kind}{text[0] if text else ''}") from error


def load_extensions(paths: Sequence[str]) -> None:
    """Run the files named by `--extension`, except those that are already loaded.

    Raises:
        UserError: A file does not exist, fails or registers nothing.
    """
    for text in paths:
        path = Path(text)
        if not path.is_file():
            raise UserError(f"--extension={text}: no such file")
        if path.resolve() in _extensions:
            continue
        import_file(path, "--extension")
        if path.resolve() not in _extensions:
            raise UserError(
                f"--extension={text}: the file registers nothing; decorate an entry with REGISTRY.register(name)"
            )


def loaded_extensions() -> list[Extension]:
    """Return all files, including recipes, that registered entries in this process, sorted by path."""
    return sorted(_extensions.values(), key=lambda extension: extension.path)


def require_extensions(recorded: Sequence[Mapping[str, str]], what: str) -> None:
    """Check that all extensions recorded by a run are loaded with the same content.

    Raises:
        UserError: An extension is missing, or its content has changed.
    """
    loaded = {extension.sha256 for extension in _extensions.values()}
    names = {Path(extension.path).name: extension for extension in _extensions.values()}
    for extension in recorded:
        if extension["sha256"] in loaded:
            continue
        name = Path(extension["path"]).name
        if name in names:
            raise UserError(
                f"{what} was made with another content of {name} (SHA-256 {extension['sha256'][:12]}…, now "
                f"{names[name].sha256[:12]}…); restore that file"
            )
        raise UserError(f"{what} needs the extension {extension['path']}; name it with --extension={extension['path']}")
