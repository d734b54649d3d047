"""`difftx convert` from and to a Hugging Face Hub of this machine."""

import functools
import json

import jax
import numpy as np
import pytest
from helpers.inference_models import language_model
from helpers.interop_folders import FIXTURES, IMPORT, import_, parameters, run_of

from difftx.errors import RunError
from difftx.storage import hub

pytest.importorskip("huggingface_hub", reason="needs the extra hub")
GROUPED = {path.name: path.read_bytes() for path in (FIXTURES / "diff_grouped").iterdir() if path.suffix != ".npz"}
OTHERS = {"README.md": b"# Card", "onnx/model.safetensors": b"o" * 99, "consolidated.safetensors": b"c" * 99}
OTHERS |= {"pytorch_model.bin": b"p" * 99, "modeling.py": b"print('never executed')"}


@pytest.fixture
def convert(run_with_hub):
    return functools.partial(run_with_hub, "difftx", "convert")


@pytest.fixture(scope="module")
def trained(config, mesh_of, tmp_path_factory):
    lm = language_model(config, mesh_of(), "diff", model__compute_dtype="float32")
    return run_of(lm, tmp_path_factory.mktemp("trained") / "run")


def files_of(hub_server, name):
    repository = hub_server.repositories["models", name]
    return repository["commits"][repository["branches"]["main"]]


def error_of(result):
    [line] = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    return line


def test_a_model_is_imported_by_name_at_a_commit(hub_server, convert, tmp_path, mesh_of):
    commit = hub_server.add("models", "org/model", GROUPED | OTHERS, branch="v1")
    hub_server.add("models", "org/model", {"config.json": b"{}"})  # The default branch has another model.
    out = tmp_path / "run"
    result = convert("--from=hf", "--to=difftx", "--input=org/model@v1", f"--out={out}", *IMPORT)
    assert result.returncode == 0, result.stderr
    assert f"made from org/model at commit {commit}" in result.stdout
    assert json.loads((out / "source.json").read_text()) == {
        "repository": "org/model",
        "revision": "v1",
        "commit": commit,
    }
    assert {name for name, _, _ in hub_server.ranges} == set(GROUPED)
    local = import_(FIXTURES / "diff_grouped", tmp_path / "local")
    jax.tree.map(np.testing.assert_array_equal, parameters(out, mesh_of())[1], parameters(local, mesh_of())[1])
    assert not (local / "source.json").exists()
    # The cache of the library has the files.
    hub_server.reset()
    again = convert("--from=hf", "--to=difftx", f"--input=org/model@{commit}", f"--out={tmp_path}/again", *IMPORT)
    assert again.returncode == 0, again.stderr
    assert not hub_server.ranges


@pytest.mark.long
def test_an_export_is_pushed_to_a_private_repository(hub_server, convert, trained, tmp_path):
    for out in ("first", "second"):
        flags = ["--from=difftx", "--to=hf", f"--input={trained}", f"--out={tmp_path}/{out}", "--push=me/model"]
        result = convert(*flags, *(["--shard_mib=1000"] if out == "first" else []))
        assert result.returncode == 0, result.stderr
        commit = hub_server.repositories["models", "me/model"]["branches"]["main"]
        assert result.stdout.splitlines()[-1] == f"pushed to {hub_server.endpoint}/me/model/tree/{commit}"
        pushed = dict(files_of(hub_server, "me/model"))
        assert pushed.pop(".gitattributes") == b"*"
        assert pushed == {path.name: path.read_bytes() for path in (tmp_path / out).iterdir()}
        hub_server.add(
            "models", "me/model", files_of(hub_server, "me/model") | {"old.safetensors": b"old"}, private=True
        )
    assert hub_server.repositories["models", "me/model"]["private"]
    back = convert("--from=hf", "--to=difftx", f"--input=me/model@{commit}", f"--out={tmp_path}/back", *IMPORT)
    assert back.returncode == 0, back.stderr


def test_nothing_is_pushed_if_the_folder_differs_from_the_run(hub_server, convert, trained, tmp_path, monkeypatch):
    """A wrong value in the written file is found, although its size and names are right."""
    from difftx.commands.convert import main
    from difftx.interop import runs

    monkeypatch.setattr(hub, "push", lambda *_: pytest.fail("pushed"))
    write = runs.write_folder

    def wrong(folder, tensors, shard_bytes):
        files = write(folder, tensors, shard_bytes)
        content = bytearray((folder / files[-1]).read_bytes())
        content[-1] ^= 1
        (folder / files[-1]).write_bytes(content)
        return files

    monkeypatch.setattr(runs, "write_folder", wrong)
    with pytest.raises(RunError, match="differs from the checkpoint; nothing was pushed"):
        main(["--from=difftx", "--to=hf", f"--input={trained}", f"--out={tmp_path}/out", "--push=me/other"])
    assert not (tmp_path / "out").exists()


def broken(content):
    """Change a byte in the middle."""
    return content[: len(content) // 2] + bytes([content[len(content) // 2] ^ 1]) + content[len(content) // 2 + 1 :]


SHARD = "model-00002-of-00005.safetensors"
# Flags, faults of the repository org/bad, and the part of the line that names field, value and fix.
IMPORTS = {
    "unknown": ("org/none", {}, "--input=org/none is no folder here: the hub shows no org/none to this account"),
    "revision": ("org/bad@v9", {}, "--input=org/bad@v9 is no folder here: org/bad has no revision 'v9'; name"),
    "checksum": ("org/bad", {SHARD: broken}, f"{SHARD} does not have the hub's checksum; delete /"),
    "no network": ("org/bad", {"HF_ENDPOINT": "http://127.0.0.1:9"}, "the hub cannot be used (["),
}


@pytest.mark.long
@pytest.mark.parametrize("case", IMPORTS)
def test_a_model_that_cannot_be_imported_ends_in_one_line(hub_server, convert, tmp_path, case):
    name, faults, message = IMPORTS[case]
    changes = {key: faults[key] for key in faults if key.startswith("HF_")}
    hub_server.repositories.pop(("models", "org/bad"), None)
    hub_server.add("models", "org/bad", GROUPED)
    hub_server.faults = {key: faults[key] for key in faults.keys() - changes.keys()}
    result = convert("--from=hf", "--to=difftx", f"--input={name}", f"--out={tmp_path}/run", *IMPORT, **changes)
    assert result.returncode in (1, 2), result.stderr
    assert message in error_of(result)
    assert not (tmp_path / "run").exists()
    assert not {name for name, _, _ in hub_server.ranges} - set(GROUPED)


PUSHES = {
    "format": ("me/bad", {"--to": "diffllama"}, {}, "--push=me/bad requires --to=hf and a local --out"),
    "forbidden": ("me/bad", {}, {"create": 403}, "this account may not do that with me/bad (HTTP 403); log in with"),
    "public": ("me/public", {}, {}, "--push=me/public: me/public is public; to publish the folder: hf upload me/pu"),
    "commit": ("me/bad", {}, {"commit/": 500}, "(HTTP 500); the folder is complete, so upload only: hf upload me/bad"),
    "content": ("me/bad", {}, {"on_commit": broken}, "model.safetensors is not on the hub as it is in the folder; the"),
}


@pytest.mark.long
@pytest.mark.parametrize("case", PUSHES)
def test_a_push_that_fails_ends_in_one_line(hub_server, convert, trained, tmp_path, case):
    name, flags, faults, message = PUSHES[case]
    hub_server.repositories.pop(("models", "me/bad"), None)
    hub_server.add("models", "me/public", {"README.md": b"# Card"})
    if change := faults.get("on_commit"):
        hub_server.on_commit = lambda files: files | {"model.safetensors": change(files["model.safetensors"])}
    hub_server.faults = {key: fault for key, fault in faults.items() if key != "on_commit"}
    flags = {"--from": "difftx", "--to": "hf", "--input": trained, "--out": tmp_path / "out"} | flags
    result = convert(*(f"{flag}={value}" for flag, value in flags.items()), f"--push={name}")
    assert result.returncode in (1, 2), result.stderr
    assert message in error_of(result)
    assert (tmp_path / "out").exists() == (case != "format")
