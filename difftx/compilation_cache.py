"""JAX's persistent compilation cache: a folder with programs that earlier processes have compiled."""

import hashlib
import os
import platform
import sys
from pathlib import Path

from difftx.errors import UserError


def enable(where: str = "auto") -> None:
    """Enable the cache of compiled programs for this process and the processes that it starts.

    Call this function before JAX compiles its first program. It does not import JAX. JAX's environment variables, such
    as JAX_COMPILATION_CACHE_DIR and JAX_ENABLE_COMPILATION_CACHE, take precedence over "auto".

    Args:
        where: Path of the cache folder, "off" for no cache, or "auto" for a subfolder of the user's cache folder. The
            subfolder depends on the CPU's features, because JAX's cache keys ignore them and several machines may share
            a home folder.

    Raises:
        UserError: `where` is a path, and no file can be created in that folder.
    """
    settings: dict[str, bool | float | str] = {"jax_enable_compilation_cache": False}
    if where != "off":
        user_folder = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "difftx"
        features = _cpu_features(Path("/proc/cpuinfo"))
        folder = user_folder / f"compiled-{features}" if where == "auto" else Path(where)
        if not _is_writable(folder):
            if where == "auto":
                return  # For example in a container without a home folder. Programs are then compiled at each start.
            raise UserError(f"train.compilation_cache={where}: no folder to write to; name another one, or use off")
        settings = {"jax_compilation_cache_dir": str(folder), "jax_persistent_cache_min_compile_time_secs": 0.0}
    for name, value in settings.items():
        variable = name.upper()
        if where == "auto" and variable in os.environ:
            continue
        os.environ[variable] = str(value)
        if "jax" in sys.modules:  # JAX has already read its environment variables.
            sys.modules["jax"].config.update(name, value)


def _cpu_features(cpuinfo: Path) -> str:
    """Return a hash of the machine type and the CPU's list of features."""
    features = platform.machine() + platform.processor()
    if cpuinfo.exists():
        lines = cpuinfo.read_text().splitlines()
        features += next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return hashlib.sha256(features.encode()).hexdigest()[:12]


def _is_writable(folder: Path) -> bool:
    """Create the folder if it is missing. Return whether files can be created in it."""
    if str(folder).startswith("~"):  # The user has no home folder.
        return False
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK | os.X_OK)
