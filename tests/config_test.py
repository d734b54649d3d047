"""All recipes, overrides on the command line, and the errors of invalid configs."""

import dataclasses
import json
import re

import pytest
from conftest import ROOT

from difftx.config import EvalConfig, fields
from difftx.config.build import config_from_dict, override
from difftx.config.recipes import default_config, load_config
from difftx.configs import ablations, review, small, toy
from difftx.errors import UserError
from difftx.model.abstract import count_parameters
from difftx.model.architectures import heads_of
from difftx.model.matching import match, matching_warning
from difftx.training.fit import fit

SOURCES = '[{"name": "a", "path": "x", "weight": 1}, {"name": "b", "path": "y", "weight": 3}]'
QUICKSTART = str(ROOT / "configs" / "quickstart.py")


@pytest.mark.parametrize(
    "spec",
    [
        "base.py",
        "quickstart.py:diff",
        "quickstart.py:transformer",
        "quickstart.py:diff_fixed_lambda",
        "diff_3b.py:diff",
        "diff_3b.py:transformer",
        "long_context.py:transformer",
        "math.py:diff-stage1",
        "math.py:transformer-stage2",
        *(f"scaling.py:{a}-{s}" for a in ("diff", "transformer") for s in ("830m", "1.4b", "2.8b", "6.8b", "13.1b")),
        *(f"ablations.py:{arm}" for arm in ablations.ARMS),
        *(f"review.py:{arm}-{data}" for arm in review.ARMS for data in ("text", "retrieval")),
        *(f"toy.py:{task}-{arm}" for task, rates in toy.LEARNING_RATES.items() for arm in rates),
        *(f"small.py:books-{size}-{arm}" for size in small.SIZES for arm in toy.ARMS),
        *(f"small.py:recall-10m-{arm}" for arm in toy.ARMS),
        *(f"by_size.py:{architecture}-{size}" for architecture in ("diff", "gated") for size in ("0.1m", "1.3b")),
        "fineweb.py:diff",
        "fineweb.py:transformer",
    ],
)
def test_every_config_is_valid_and_survives_json(spec):
    config = fit(load_config(str(ROOT / "configs" / spec), {}))
    assert config_from_dict(json.loads(config.to_json())) == config
    model = config.model
    assert model.num_heads * heads_of(model).groups * heads_of(model).d_head == model.d_model


@pytest.mark.parametrize(
    ("spec", "arms"),
    [
        *((f"toy.py:{task}", rates) for task, rates in toy.LEARNING_RATES.items()),
        *((f"small.py:books-{size}", toy.ARMS) for size in small.SIZES),
    ],
)
def test_arms_have_equal_parameters_and_tokens(spec, arms):
    configs = [load_config(f"{ROOT / 'configs' / spec}-{arm}", {}) for arm in arms]
    assert all(matching_warning(config) is None for config in configs)
    counts = [count_parameters(config.model).total for config in configs]
    assert max(counts) < 1.01 * min(counts)
    assert len({(c.train.steps, c.train.global_batch_tokens, c.data, c.train.seed) for c in configs}) == 1


@pytest.mark.parametrize(
    ("architecture", "kv_heads", "expected"),
    [
        ("diff", 4, (8, 2, 1024)),
        ("diff", 1, (8, 1, 1004)),  # One head cannot be halved. Its key and value are twice as wide.
        ("signed_mask", 4, (8, 2, 1024)),
        ("diff_v2", 4, (16, 4, 848)),
        ("zero_branch", 4, (16, 4, 812)),
    ],
)
def test_a_matched_model_has_as_many_keys_and_values_as_the_transformer(architecture, kv_heads, expected):
    """A head of `diff` replaces two of the Transformer, among queries as among keys and values."""
    c = default_config()
    c.model.update({"d_model": 512, "mlp_dim": 1024, "num_kv_heads": kv_heads, "vocab_size": 256})
    match(c, architecture, heads=16)
    assert (c.model.num_heads, c.model.num_kv_heads, c.model.mlp_dim) == expected
    assert warning_about(c) is None


def warning_about(c, **changes):
    with c.unlocked():
        c.model.update_from_flattened_dict(changes)
    return matching_warning(config_from_dict(c.to_dict()))


def test_heads_that_share_keys_are_matched_if_the_transformers_do_so_too():
    c = default_config()
    c.model.vocab_size = 256
    match(c, "diff", heads=16)
    assert warning_about(c, num_kv_heads=4) is None  # The Transformer has 8.
    assert "8 sub-heads of width 256, not 16 of 128" in warning_about(c, architecture="transformer", head_norm="none")


@pytest.mark.parametrize(
    ("recipe", "flags", "warning"),
    [
        ("transformer", ["model.d_model=256"], None),
        ("diff", ["model.d_model=256", "model.mlp_dim=680"], None),  # All models of a comparison may share this change.
        ("diff", ["model.architecture=transformer"], "2 sub-heads of width 64, not 4 of 32; model.head_norm"),
        # The gate has 128² weights in each of the four layers. The MLP has 3 * 128 weights per unit of its width.
        ("transformer", ["model.architecture=gated"], "not 819,328, as with --config.model.mlp_dim=296"),
        ("transformer", ["model.architecture=gated", "model.mlp_dim=296"], None),  # The fix of the warning above.
        ("gda", ["model.d_model=256"], "as with --config.model.mlp_dim=384"),
        ("gda", ["model.d_model=256", "model.mlp_dim=384"], None),
        ("gda", ["model.gda.signal_heads=1", "model.d_model=192"], "6 sub-heads of width 32, not 4 of 48"),
        ("diff", ["model.d_model=100", "model.num_heads=5"], "it has none: model.head_dim=25 must be even"),
    ],
)
def test_a_model_is_compared_with_its_transformer(recipe, flags, warning):
    found = matching_warning(load_config(f"quickstart:{recipe}", dict(flag.split("=") for flag in flags)))
    assert found is None if warning is None else warning in found


@pytest.mark.parametrize("size", ["0.1m", "10m", "99m", "830m", "13b"])
def test_a_recipe_by_size_has_the_parameters_and_heads_that_it_promises(size):
    asked = float(size[:-1]) * {"m": 1e6, "b": 1e9}[size[-1]]
    recipe = ROOT / "configs" / "by_size.py"
    configs = {name: load_config(f"{recipe}:{name}-{size}", {}) for name in ("diff", "transformer", "diff_v2", "gated")}
    for config in configs.values():
        assert count_parameters(config.model).total == pytest.approx(asked, rel=0.06)
        assert config.train.steps * config.train.global_batch_tokens == pytest.approx(20 * asked, rel=0.01)
    diff = configs["diff"].model
    assert heads_of(diff).d_head >= 64 or diff.d_model < 1024
    assert diff.num_heads >= 8 or heads_of(diff).d_head == 32
    assert diff.num_heads % 2 == 0 or diff.d_model < 1024  # Two devices can share the heads.


def test_a_recipe_by_size_follows_the_power_laws():
    """The expected values are computed by hand for C = 6 · 340e6 · 6.8e9 = 1.387e19.

    The laws give a batch of 5.33e5 tokens and a learning rate of 1.262e-3.
    """
    config = load_config(f"{ROOT / 'configs' / 'by_size.py'}:diff-340m", {})
    assert config.train.global_batch_tokens == 2**19
    assert config.optimizer.learning_rate == 1.3e-3
    assert config.warmup_steps == pytest.approx(config.train.steps / 10, abs=1)
    longer = load_config(f"{ROOT / 'configs' / 'by_size.py'}:diff-340m", {"train.steps": "100"})
    assert longer.warmup_steps == 10


def test_an_odd_number_of_heads_has_no_differential_counterpart():
    c = default_config()
    c.model.update({"d_model": 576, "vocab_size": 256})
    with pytest.raises(UserError, match=r"'diff': one head replaces 2 .* its 9 heads; use a multiple of 2$"):
        match(c, "diff", heads=9)


@pytest.mark.parametrize(
    ("argument", "fix"),
    [
        ("gda-5m", "do not divide the 10 heads of the Transformer; use a multiple of 4$"),
        *((f"diff-{size}", r"write millions or billions of parameters, such as 0\.8m") for size in ("", "340M", "0m")),
    ],
)
def test_a_recipe_by_size_explains_what_a_size_is(argument, fix):
    with pytest.raises(UserError, match=fix):
        load_config(f"{ROOT / 'configs' / 'by_size.py'}:{argument}", {})


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("model.num_heads", "3", ["model.num_heads=3", "d_model=128", "use 2"]),
        ("model.remat", "ful", ["model.remat", "'ful'", "Did you mean 'full'"]),
        ("optimizer.final_learning_rate", "1", ["optimizer.final_learning_rate=1.0", "learning_rate=0.004, the peak"]),
        ("train.global_batch_tokens", "1000", ["train.global_batch_tokens=1000", "use 1024"]),
        ("optimizer.warmup_steps", "100000", ["optimizer.warmup_steps=100000", "train.steps"]),
        ("model", "1", ["model is a group", "d_model"]),
        ("data.path.x", "1", ["data.path is a value"]),
        ("data.sources", "books", ["data.sources=books", "JSON", '"name": …, "path": …, "weight": …']),
        ("data.sources", SOURCES.replace("weight", "wieght"), ["data.sources[0].wieght", "Did you mean 'weight'"]),
        ("data.synthetic.pairs", "5000", ["data.synthetic.vocab_size=8192", "5000 different keys", "at least 10002"]),
    ],
)
def test_a_wrong_override_names_field_value_and_fix(field, value, expected):
    with pytest.raises(UserError) as error:
        fit(load_config(QUICKSTART, {field: value}))
    message = str(error.value)
    assert "\n" not in message
    for part in expected:
        assert part in message


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("c.optimizer.lerning_rate = 1.0", "optimizer.lerning_rate=1.0: no such field. Did you mean 'learning_rate'?"),
        ("c.model.num_layers = 'four'", "user.py:5: TypeError"),
        ("c.eval.suites = (1,)", "eval.suites[0]=1: expected text"),
    ],
)
def test_a_wrong_config_file_names_field_or_line(tmp_path, line, expected):
    path = tmp_path / "user.py"
    path.write_text(
        f"from difftx.configs import base\n\ndef get_config():\n    c = base.get_config()\n    {line}\n    return c\n"
    )
    with pytest.raises(UserError) as error:
        load_config(str(path), {})
    assert expected in str(error.value)


def test_a_file_without_get_config_is_no_recipe(tmp_path):
    path = tmp_path / "nanogpt.py"
    path.write_text("batch_size = 12\n")
    with pytest.raises(UserError, match=r"nanogpt\.py: the file has no function get_config; configs/quickstart\.py"):
        load_config(str(path), {})


@pytest.mark.parametrize(
    ("recipe", "text", "steps"),
    [
        (None, None, 200),
        (None, "0.25", 100),
        (0.1, None, 40),
        (7, None, 7),  # The field holds a share before, which must not make 7 a float.
        (0, "none", ": expected an integer or a number"),
        (0, "1.0", "=1.0: write a number of steps, or a share of train.steps"),
    ],
)
def test_a_warm_up_is_a_number_of_steps_or_a_share(tmp_path, recipe, text, steps):
    change = "" if recipe is None else f"    c.optimizer.warmup_steps = {recipe}\n"
    path = tmp_path / "recipe.py"
    path.write_text(
        "from difftx.configs import quickstart\n\n"
        f"def get_config():\n    c = quickstart.get_config()\n{change}    return c\n"
    )
    changes = {"train.steps": "400"} | ({} if text is None else {"optimizer.warmup_steps": text})
    if isinstance(steps, str):
        with pytest.raises(UserError, match=re.escape(f"optimizer.warmup_steps{steps}") if text != "none" else steps):
            load_config(str(path), changes)
        return
    config = load_config(str(path), changes)
    assert config.warmup_steps == steps
    assert config_from_dict(json.loads(config.to_json())) == config


def test_missing_fields_take_the_defaults_of_the_schema():
    config = load_config(QUICKSTART, {"mesh.tensor": "2"})
    raw = json.loads(config.to_json())
    del raw["mesh"]["context_method"], raw["eval"]["needle"]["seed"], raw["guards"]
    assert config_from_dict(raw) == config
    raw["mesh"]["tensro"] = 2
    with pytest.raises(UserError, match=r"mesh.tensro=2: no such field. Did you mean 'tensor'"):
        config_from_dict(raw)
    for broken, reason in (([], "expected"), ({"model": 3}, "model")):
        with pytest.raises(UserError, match=reason):
            config_from_dict(broken)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bleu:
    """An added group."""

    samples: int = 3
    """Number of samples."""


def test_an_added_group_is_read_written_and_overridden(monkeypatch):
    monkeypatch.setattr(fields, "_added", {})
    with pytest.raises(UserError, match=r"eval\.bleu\.samples: no such field|eval\.bleu: no such field"):
        load_config(QUICKSTART, {"eval.bleu.samples": "5"})
    fields.add_group(EvalConfig, "bleu", Bleu)
    config = load_config(QUICKSTART, {"eval.bleu.samples": "5"})
    assert config.eval.bleu.samples == 5
    raw = json.loads(config.to_json())
    assert raw["eval"]["bleu"] == {"samples": 5}
    assert config_from_dict(raw) == config
    del raw["eval"]["bleu"]
    assert config_from_dict(raw).eval.bleu.samples == 3
    assert hash(config) != hash(config_from_dict(raw))
    with pytest.raises(UserError, match="already"):
        fields.add_group(EvalConfig, "needle", Bleu)


def test_an_added_group_is_a_frozen_dataclass_with_defaults(monkeypatch):
    monkeypatch.setattr(fields, "_added", {})
    changeable = dataclasses.make_dataclass("Changeable", [("samples", int, 3)])
    without_default = dataclasses.make_dataclass("WithoutDefault", [("samples", int)], frozen=True)
    for group, message in [
        (changeable, r"^Changeable is not a frozen dataclass; decorate it with @dataclass\(frozen=True\)$"),
        (dict, "^dict is not a frozen dataclass"),
        (without_default, "^WithoutDefault.samples has no default; give every field a default$"),
    ]:
        with pytest.raises(UserError, match=message):
            fields.add_group(EvalConfig, "bleu", group)


def test_values_are_read_by_the_type_of_their_field():
    changes = {"optimizer.clip_norm": "none", "eval.suites": "loss,sample", "model.tie_embeddings": "false"}
    changes |= {"optimizer.learning_rate": "1", "model.num_kv_heads": "2", "train.steps": "1_000"}
    config = load_config(QUICKSTART, changes)
    assert config.optimizer.clip_norm is None
    assert config.eval.suites == ("loss", "sample")
    assert config.model.tie_embeddings is False
    assert isinstance(config.optimizer.learning_rate, float)
    assert heads_of(config.model).kv_heads == 2
    assert config.train.steps == 1000
    assert override(config, {"eval.loss_tokens": "7"}).eval == dataclasses.replace(config.eval, loss_tokens=7)


def test_a_list_of_groups_on_the_command_line():
    config = load_config(
        QUICKSTART,
        {
            "data.path": "none",
            "data.sources": SOURCES,
            "data.sources.1.weight": "0.5",
            "data.stages": '[{"from_tokens": 100, "weights": [1, 0]}]',
            "data.stages.0.weights": "0.25,1",
        },
    )
    assert [(s.name, s.path, s.weight) for s in config.data.sources] == [("a", "x", 1.0), ("b", "y", 0.5)]
    assert config.data.stages[0].weights == (0.25, 1.0)
    assert config_from_dict(json.loads(config.to_json())) == config
    hash(config)
    with pytest.raises(
        UserError, match=r"data\.sources\.2\.weight: data\.sources is a list of 2; write data\.sources\.0"
    ):
        override(config, {"data.sources.2.weight": "1"})
    with pytest.raises(UserError, match=r"data\.sources\.1\.wight: no such field\. Did you mean 'weight'"):
        override(config, {"data.sources.1.wight": "1"})
    for changes, message in [
        ({"data.sources.1.name": "a"}, "2 sources are named 'a'"),
        ({"data.sources.1.weight": "-1"}, r"data\.sources=\(1\.0, -1\.0\): weights must not be negative"),
        ({"data.stages.0.weights": "0,0"}, r"data\.stages\[0\]\.weights=\(0\.0, 0\.0\)"),
        ({"data.stages.0.from_tokens": "0"}, r"data\.stages\[0\]\.from_tokens=0 must be more than 0"),
    ]:
        with pytest.raises(UserError, match=message):
            override(config, changes)


PAPERS = ("scaling.py:diff-830m", "diff_3b.py:diff", "long_context.py:diff", "math.py:diff-stage1", "ablations.py:diff")
OURS = ("quickstart.py:diff", "toy.py:books-diff", "small.py:books-10m-diff")


@pytest.mark.parametrize(("specs", "zero"), [(PAPERS, False), (OURS, True)])
def test_the_papers_configs_initialise_as_the_official_code(specs, zero):
    """The paper's configs do not have the initialisation that is better at 0.1M parameters."""
    models = [load_config(str(ROOT / "configs" / spec), {}).model for spec in specs]
    assert {(m.init, m.zero_init_output) for m in models} == {("fan_in", zero)}


BUCKET_FIELDS = ("data.path", "data.tokenizer", "data.sources.1.path", "train.teacher")
BUCKET_FIELDS += ("checkpoint.init_from", "checkpoint.branch_from", "eval.needle.haystack", "eval.test.path")
LOCAL_FIELDS = ("data.cache_path", "eval.bigrams_path", "eval.harness.data_path", "eval.harness.include_path")


def test_paths_are_checked_when_a_config_is_built(monkeypatch):
    """Paths of suites that do not run are checked too."""
    plain = load_config(QUICKSTART, {})
    mixed = override(plain, {"data.path": "none", "data.sources": SOURCES})
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)  # Reading a config needs no library of a store.
    for field in BUCKET_FIELDS:
        config = mixed if field.startswith("data.sources") else plain
        assert override(config, {field: "s3://bucket/a"}) != config
        for value, message in (
            ("hdfs://bucket/a", "hdfs are not supported; use gs://, s3:// or a local path"),
            ("gs:///a", "no bucket is named"),
        ):
            with pytest.raises(UserError, match=rf"{value}: .*{message}"):
                override(config, {field: value})
    for field in LOCAL_FIELDS:
        with pytest.raises(UserError, match=f"{field}=gs://bucket/a: this path must be on this machine"):
            override(plain, {field: "gs://bucket/a"})
