"""Folders of models for the tests of `difftx convert`, and conversions of them by the command."""

import base64
import json
import shutil

import jax
import numpy as np
import pytest
from conftest import ROOT

from difftx.commands.convert import main
from difftx.errors import UserError
from difftx.interop.safetensors import read_folder, write_folder
from difftx.training.checkpoint.checkpointer import Checkpoints
from difftx.training.checkpoint.manifest import array_name
from difftx.training.checkpoint.restoring import restore_params
from difftx.training.checkpoint.weights import Streamed, save_params
from difftx.training.run import read_config, write_run_files

FIXTURES = ROOT / "tests" / "interop" / "fixtures"  # fixtures/make.py makes them with transformers.
# Flags with which a user would import them on one device.
IMPORT = [
    f"--config={ROOT / 'configs' / 'quickstart.py'}:diff",
    "--config.data.tokenizer=bytes",
    "--config.model.compute_dtype=float32",
]


def import_(source, out, *flags, format_="hf"):
    """Import a model, and return the new run's directory."""
    assert main([f"--from={format_}", "--to=difftx", f"--input={source}", f"--out={out}", *IMPORT, *flags]) == 0
    return out


def export(workdir, out, *flags, format_="hf"):
    """Export a run, and return the new folder."""
    assert main(["--from=difftx", f"--to={format_}", f"--input={workdir}", f"--out={out}", *flags]) == 0
    return out


def refused(source, out, message, *flags, convert=import_):
    """Convert a source, and require a one-line error with the message and no new files next to `out`."""
    before = sorted(out.parent.rglob("*"))
    with pytest.raises(UserError, match=message) as error:
        convert(source, out, *flags)
    assert "\n" not in str(error.value)
    assert sorted(out.parent.rglob("*")) == before


def parameters(workdir, mesh):
    """Return the run's config, and the parameters of its newest checkpoint on a mesh."""
    checkpointer = Checkpoints(workdir)
    step = checkpointer.newest()
    config = read_config(workdir)
    return config, restore_params(checkpointer.read(step), config, mesh)


def run_of(lm, workdir):
    """Write a run with the parameters of `lm` and the files that readers need, and return its directory."""
    workdir.mkdir(exist_ok=True)
    write_run_files(workdir, lm.config)
    values = {array_name(path): np.asarray(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(lm.params)}
    arrays = {name: Streamed(v.shape, len(v), v.__getitem__) for name, v in values.items()}
    save_params(workdir, arrays, lm.config, {"tokenizer": lm.tokenizer.fingerprint})
    return workdir


def tensors_of(folder):
    """Return the tensors of a folder as float32 arrays by name."""
    return {name: tensor.read() for name, tensor in read_folder(folder).items()}


def rewrite(folder, out, **changes):
    """Copy a folder, with its tensors in one file. Tensors in `changes` are replaced, or left out if they are None."""
    out.mkdir()
    shutil.copy(folder / "config.json", out)
    tensors = tensors_of(folder) | changes
    kept = {name: value for name, value in tensors.items() if value is not None}
    write_folder(out, {n: Streamed(v.shape, len(v), v.__getitem__) for n, v in kept.items()}, 2**30)
    return out


def edit_config(folder, out, **changes):
    """Copy a folder with changes in its config.json. A value that JSON does not have removes the field."""
    shutil.copytree(folder, out)
    path = out / "config.json"
    fields = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in fields.items() if type(value) is not object}))
    return out


WORDS = [b"th", b"the", b" the", b"an", b"and", b" t", b" th", b"\xc3\xa9", b"12"]  # é is two bytes.


def words_file(path):
    """Write a vocabulary of bytes and a few words for `data.tokenizer`, and return its path."""
    tokens = [bytes([value]) for value in range(256)] + WORDS
    path.write_text("".join(f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens)))
    return path
