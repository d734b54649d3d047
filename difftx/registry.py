"""Registries of named implementations, and the user files (extensions) that add entries to them.

Each extension point of difftx is a `Registry`: architectures, suites, optimizers, schedules, readers, trackers and
synthetic tasks. docs/extend.md shows how to add entries.
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
    """A user's file that has registered at least one entry."""

    path: str
    sha256: str  # Hash of the file and of the modules and packages in its folder that it imports.


EXTENSIONS_SHAPE = [{"path": str, "sha256": str}]  # Schema (see `schema_error`) of the extensions in a record.
EXTENSION_HINT = " If a file of yours adds it, name the file with --extension=FILE.py."

_running: list[Path] = []  # User files that are running now. Each file imports the next file in the list.
_files: dict[tuple[str, str], Path] = {}  # (kind, name) of an entry → the user's file that registered it.
_extensions: dict[Path, Extension] = {}
_modules: dict[Path, types.ModuleType] = {}  # User file that has run → its module.


class Registry[T](Mapping[str, T]):
    """A mapping from names to implementations of one kind, such as "architecture".

    `builtin` maps names to entries, or to texts "module:attribute". Such an entry is imported at its first use, so that
    commands start fast. `hint` is appended to the error message about an unknown name.
    """

    def __init__(self, kind: str, builtin: Mapping[str, str | T], hint: str = ""):
        self.kind, self.builtin, self.hint = kind, tuple(builtin), hint + EXTENSION_HINT
        self._entries: dict[str, Any] = dict(builtin)

    def register[U](self, name: str) -> Callable[[U], U]:
        """Return a decorator that adds an entry. It raises `UserError` if the name is taken or not an identifier."""

        def add(entry: U) -> U:
            if not name.isidentifier():  # Names become config fields and file names.
                raise UserError(f"{self.kind} {name!r}: a name consists of letters, digits and underscores")
            if name in self._entries:
                raise UserError(f"{self.kind} {name!r} exists already; register yours under another name")
            self._entries[name] = entry
            record(self.kind, name)
            return entry

        return add

    def extension_of(self, name: str) -> Extension | None:
        """Return the user's file that registered an entry, or None if it is an entry of difftx."""
        return extension_of(self.kind, name)

    def check(self, names: Iterable[str]) -> None:
        """Raise `UserError` if a name has no entry. Do not import entries."""
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

    def __contains__(self, name: object) -> bool:  # The inherited method catches only KeyError.
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def record(kind: str, name: str) -> None:
    """Record that the user's file that is running now, if any, has added an entry."""
    if _running:
        _files[kind, name] = _running[-1]


def extension_of(kind: str, name: str) -> Extension | None:
    """Return the user's file that added an entry, or None if it is an entry of difftx."""
    path = _files.get((kind, name))
    return None if path is None else _extensions.get(path)


def _extension(path: Path) -> Extension:
    """Return the `Extension` of a user's file: its path, and a hash of it and of its imports from its folder."""
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
    """Return the files of all modules and packages in `folder` that a Python file imports, also inside functions.

    Find imports in the source code: `sys.modules` would also contain modules that other extensions have loaded.
    """
    try:
        nodes = list(ast.walk(ast.parse(content)))
    except (SyntaxError, ValueError):  # Not valid Python, so it is probably never imported.
        return set()
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    absolute = [node for node in nodes if isinstance(node, ast.ImportFrom) and not node.level]
    names += [f"{node.module}.{alias.name}" for node in absolute for alias in node.names]
    found: set[Path] = set()
    for parts in (name.split(".") for name in names):
        if parts[0] == "difftx":
            continue
        # A file in ext/ may import a module as "ext.helper".
        first = parts[parts.index(folder.name) + 1 if folder.name in parts[:-1] else 0]
        found |= {folder / f"{first}.py", *(folder / first).rglob("*.py")}
    return {file for file in found if os.path.isfile(file)}  # `Path.is_file` could raise errors.


def import_file(path: Path, flag: str) -> types.ModuleType:
    """Run a user's Python file and return its module. `flag` is the flag with the file, for messages."""
    resolved = path.resolve()
    # Do not run a file again if it has registered an entry, because the entry's name would be taken.
    if resolved in _extensions and resolved in _modules:
        return _modules[resolved]
    # Include a hash of the path in the name: files with the same name in different folders are different modules.
    name = f"difftx_user_{path.stem}_{hashlib.sha256(str(resolved).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UserError(f"{flag}={path}: not a Python file; its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # Dataclasses and pickle look up modules by name.
    _running.append(resolved)
    folder = os.getcwd()  # User files may import modules from here, except with `python -P`.
    if is_new := not sys.flags.safe_path and folder not in sys.path:
        sys.path.append(folder)
    try:
        with one_line_errors(module):
            spec.loader.exec_module(module)
    finally:
        _running.pop()
        # If the file is in this folder, keep the folder in sys.path, because the file's functions may import later.
        if is_new and not resolved.is_relative_to(folder):
            sys.path.remove(folder)
    _modules[resolved] = module
    if resolved in _files.values():  # By now, the file has loaded the modules that it imports at its start.
        _extensions[resolved] = _extension(resolved)
    return module


@contextlib.contextmanager
def one_line_errors(user_code: types.ModuleType | type) -> Iterator[None]:
    """Convert any exception in the block to a `UserError` that names the file and line in the user's code.

    `user_code` is a module or class. The error may also be in another extension that it calls. If no user code is in
    the traceback, name the line where the class is defined.
    """
    try:
        yield
    except Exception as error:  # User code may raise any exception.
        file = str(inspect.getsourcefile(user_code))
        files = {Path(file).resolve(), *_modules}
        frames = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).resolve() in files]
        at = f"{file}:{inspect.getsourcelines(user_code)[1]}" if isinstance(user_code, type) else file
        if frames:
            at = f"{frames[-1].filename}:{frames[-1].lineno}"
        if isinstance(error, SyntaxError) and error.filename and error.lineno:  # Its file is not in the traceback.
            at = f"{error.filename}:{error.lineno}"
        text = str(error.args[0] if error.args else error).splitlines()
        kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
        raise UserError(f"{at}: {kind}{text[0] if text else ''}") from error


def load_extensions(paths: Sequence[str | os.PathLike[str]]) -> None:
    """Run the files of `--extension`. Raise `UserError` if a file does not exist, fails or registers no entry."""
    if isinstance(paths, str):
        raise UserError(f"extensions={paths!r} is one path; give a list, such as [{paths!r}]")
    for path in map(Path, paths):
        if not path.is_file():
            raise UserError(f"--extension={path}: no such file")
        import_file(path, "--extension")
        if path.resolve() not in _extensions:
            raise UserError(f"--extension={path}: the file registers nothing; see docs/extend.md")


def loaded_extensions() -> list[Extension]:
    """Return the user files, including recipes, that have registered entries in this process, sorted by path."""
    return sorted(_extensions.values(), key=lambda extension: extension.path)


def require_extensions(recorded: Sequence[Mapping[str, str]], what: str) -> None:
    """Raise `UserError` unless all recorded extensions are loaded with the same contents. `what` made the record."""
    if changes := changed_extensions(recorded, what):
        raise UserError(f"{what} was made with another content of {changes[0]}; restore that file")


def changed_extensions(recorded: Sequence[Mapping[str, str]], what: str) -> list[str]:
    """Describe which extensions have changed since `what` (a run, for example) recorded them.

    `recorded` has the "path" and "sha256" of each extension. Raise `UserError` if no loaded extension has this content
    or this file name. The recorded path is only printed, never executed, because another person may have written it.
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
