"""Registries of named implementations, and the user files (extensions) that add entries to them.

Every extension point of difftx is a `Registry`: architectures, suites, optimizers, schedules, readers, trackers and
synthetic tasks. docs/extend.md shows how to add to each of them.
"""

import ast
import contextlib
import dataclasses
import hashlib
import importlib
import importlib.util
import inspect
import os
import shlex
import sys
import traceback
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from difftx.errors import UserError, did_you_mean


@dataclasses.dataclass(frozen=True)
class Extension:
    """A user's file that registered at least one entry."""

    path: str
    sha256: str  # Hash of the file, and of the modules and packages in its folder that it imports.


EXTENSIONS_SHAPE = [{"path": str, "sha256": str}]  # JSON schema of the extensions in a record.
EXTENSION_HINT = " If a file of yours adds it, name the file with --extension=FILE.py."

_running: list[Path] = []  # Files that are running now. Each one imports the next one.
_files: dict[tuple[str, str], Path] = {}  # Kind and name of an entry → the user's file that registered it.
_extensions: dict[Path, Extension] = {}
_modules: dict[Path, types.ModuleType] = {}  # User files that have run, as modules.


class Registry[T](Mapping[str, T]):
    """A mapping from names to implementations of one kind, such as "architecture".

    `builtin` maps names to entries, or to texts "module:attribute". Such an attribute is imported at its first use, so
    that commands start fast. `hint` ends the message about a name without an entry.
    """

    def __init__(self, kind: str, builtin: Mapping[str, str | T], hint: str = ""):
        self.kind, self.builtin, self.hint = kind, tuple(builtin), hint + EXTENSION_HINT
        self._entries: dict[str, Any] = dict(builtin)

    def register[U](self, name: str) -> Callable[[U], U]:
        """Return a decorator that adds an entry, or raises `UserError` if the name is taken or not an identifier."""

        def add(entry: U) -> U:
            if not name.isidentifier():  # Names are used as config fields and file names.
                raise UserError(f"{self.kind} {name!r}: a name consists of letters, digits and underscores")
            if name in self._entries:
                raise UserError(f"{self.kind} {name!r} exists already; register yours under another name")
            self._entries[name] = entry
            record(self.kind, name)
            return entry

        return add

    def extension_of(self, name: str) -> Extension | None:
        """Return the user's file that registered an entry, or None for an entry of difftx."""
        return extension_of(self.kind, name)

    def check(self, names: Iterable[str]) -> None:
        """Raise `UserError` if one of the names has no entry. No entry is imported."""
        for name in names:
            if name not in self._entries:
                raise UserError(f"{name!r}: no such {self.kind}.{did_you_mean(name, self._entries)}{self.hint}")

    def __getitem__(self, name: str) -> T:
        self.check([name])
        entry = self._entries[name]
        if isinstance(entry, str):
            module, _, attribute = entry.partition(":")
            entry = self._entries[name] = getattr(importlib.import_module(module), attribute)
        return entry

    def __contains__(self, name: object) -> bool:  # The inherited method expects a KeyError.
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def record(kind: str, name: str) -> None:
    """Note that the user's file that runs now, if any, has added an entry."""
    if _running:
        _files[kind, name] = _running[-1]


def extension_of(kind: str, name: str) -> Extension | None:
    """Return the user's file that added an entry, or None for an entry of difftx."""
    path = _files.get((kind, name))
    return None if path is None else _extensions.get(path)


def _extension(path: Path) -> Extension:
    """Return a user's file with the hash of itself, and of what it imports from its folder."""
    contents, todo = {}, {path}
    while todo:
        file = todo.pop()
        contents[file] = file.read_bytes()
        todo |= _own_imports(path.parent, contents[file]) - contents.keys()
    digest = hashlib.sha256(contents.pop(path))
    for file, content in sorted(contents.items()):
        digest.update(f"\n{file.relative_to(path.parent).as_posix()} {len(content)}\n".encode() + content)
    return Extension(str(path), digest.hexdigest())


def _own_imports(folder: Path, content: bytes) -> set[Path]:
    """Return the modules in `folder`, and all files of the packages there, that a file imports at its start or later.

    The imports are read from the text. `sys.modules` would add the modules that other extensions have loaded.
    """
    try:
        nodes = list(ast.walk(ast.parse(content)))
    except (SyntaxError, ValueError):  # Python has not imported this file. It may never do so.
        return set()
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    absolute = [node for node in nodes if isinstance(node, ast.ImportFrom) and not node.level]
    names += [f"{node.module}.{alias.name}" for node in absolute for alias in node.names]
    found: set[Path] = set()
    for parts in (name.split(".") for name in names):
        if parts[0] == "difftx":
            continue
        # A module of ext/ may have the name "ext.helper".
        first = parts[parts.index(folder.name) + 1 if folder.name in parts[:-1] else 0]
        found |= {folder / f"{first}.py", *(folder / first).rglob("*.py")}
    return {file for file in found if os.path.isfile(file)}  # `Path.is_file` raises errors.


def import_file(path: Path, flag: str) -> types.ModuleType:
    """Run a user's Python file, and return it as a module. `flag` is the flag that names the file, for messages."""
    resolved = path.resolve()
    # Do not run a file again if it has registered an entry, because the entry's name would be taken.
    if resolved in _extensions and resolved in _modules:
        return _modules[resolved]
    # Files of the same name in different folders are different modules.
    name = f"difftx_user_{path.stem}_{hashlib.sha256(str(resolved).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UserError(f"{flag}={path}: not a Python file; its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # Dataclasses and pickles look their module up by name.
    _running.append(resolved)
    folder = os.getcwd()  # A user's file may import modules of the current folder, except with `python -P`.
    if is_new := not sys.flags.safe_path and folder not in sys.path:
        sys.path.append(folder)
    try:
        with one_line_errors(module):
            spec.loader.exec_module(module)
    finally:
        _running.pop()
        if is_new and not resolved.is_relative_to(folder):  # The functions of a file in this folder may import later.
            sys.path.remove(folder)
    _modules[resolved] = module
    if resolved in _files.values():  # All modules that the file imports at its start are loaded now.
        _extensions[resolved] = _extension(resolved)
    return module


@contextlib.contextmanager
def one_line_errors(of: types.ModuleType | type) -> Iterator[None]:
    """Convert any exception to a `UserError` whose message names the line of a user's file.

    The file is that of a module or a class, or an extension that it calls. If the file returned before the exception,
    the line is that of the class.
    """
    try:
        yield
    except Exception as error:  # A user's file may raise any exception.
        file = str(inspect.getsourcefile(of))
        files = {Path(file).resolve(), *_modules}
        frames = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).resolve() in files]
        at = f"{file}:{inspect.getsourcelines(of)[1]}" if isinstance(of, type) else file
        if frames:
            at = f"{frames[-1].filename}:{frames[-1].lineno}"
        if isinstance(error, SyntaxError) and error.filename and error.lineno:  # The file has no frame.
            at = f"{error.filename}:{error.lineno}"
        text = str(error.args[0] if error.args else error).splitlines()
        kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
        raise UserError(f"{at}: {kind}{text[0] if text else ''}") from error


def load_extensions(paths: Sequence[str | os.PathLike[str]]) -> None:
    """Run the files of `--extension`. Raise `UserError` if one does not exist, fails or registers nothing."""
    if isinstance(paths, str):
        raise UserError(f"extensions={paths!r} is one path; give a list, such as [{paths!r}]")
    for path in map(Path, paths):
        if not path.is_file():
            raise UserError(f"--extension={path}: no such file")
        import_file(path, "--extension")
        if path.resolve() not in _extensions:
            raise UserError(f"--extension={path}: the file registers nothing; see docs/extend.md")


def loaded_extensions() -> list[Extension]:
    """Return the files that have registered entries in this process, including recipes, sorted by path."""
    return sorted(_extensions.values(), key=lambda extension: extension.path)


def require_extensions(recorded: Sequence[Mapping[str, str]], what: str) -> None:
    """Raise `UserError` unless the extensions that `what` has recorded are loaded, with the same contents."""
    if changes := changed_extensions(recorded, what):
        raise UserError(f"{what} was made with another content of {changes[0]}; restore that file")


def changed_extensions(recorded: Sequence[Mapping[str, str]], what: str) -> list[str]:
    """Return descriptions of the extensions whose contents differ from the contents that `what` has recorded.

    `recorded` has the "path" and "sha256" of each extension. Raise `UserError` if no extension is loaded that has the
    content or the file name. The path is printed and never executed, because another person may have written it.
    """
    changes = []
    for path, sha256 in ((extension["path"], extension["sha256"]) for extension in recorded):
        if any(loaded.sha256 == sha256 for loaded in _extensions.values()):
            continue
        loaded = next((one for file, one in _extensions.items() if file.name == Path(path).name), None)
        if loaded is None:
            raise UserError(f"{what} was made with the extension {path}; add {shlex.quote(f'--extension={path}')}")
        hashes = f"SHA-256 {sha256[:12]}… → {loaded.sha256[:12]}…"
        changes.append(f"{loaded.path}, or a module that it imports ({hashes})")
    return changes
