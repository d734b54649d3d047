"""Suite `harness`. Tests that need lm-eval are marked `long`, and are skipped if the extra is not installed."""

import gzip
import json
import math
import sys

import jax
import numpy as np
import pytest
from conftest import suite_config
from flax import nnx
from helpers.evals_params import params_from
from helpers.evals_results import chance_of

from difftx.config.build import override
from difftx.errors import UserError
from difftx.evals import run as evals
from difftx.evals.harness.data import splits
from difftx.evals.harness.suite import averages
from difftx.inference.generate import Completion
from difftx.training.run import Run
from difftx.training.state import graph

WINDOW = 256
WORDS = ["why", "the", "red", "stone", "falls", "on", "naïve", "rivers", "so", "slowly", "42"]
LOCAL = {"arc_challenge": "test", "arc_easy": "test", "boolq": "val", "hellaswag": "val", "openbookqa": "test",
         "piqa": "val", "winogrande": "val"}  # fmt: skip
NO_NORM = {"boolq", "winogrande"}  # Tasks that measure only acc.


@pytest.fixture
def lm_eval():
    return pytest.importorskip("lm_eval", reason="the extra `eval` is not installed")


def words(rng, low, high):
    return " ".join(rng.choice(WORDS, rng.integers(low, high)))


def raw_docs(task, rng, count):
    """Yield questions with the fields of the data sets on the Hugging Face Hub."""
    for i in range(count):
        gold, text = int(rng.integers(0, 2 if task in ("piqa", "winogrande", "boolq") else 4)), words(rng, 3, 14)
        endings = [f"{words(rng, 1, 5)} {j}" for j in range(4)]
        if task.startswith("arc") or task == "openbookqa":
            choices = {"text": endings, "label": list("ABCD")}
            name = "question_stem" if task == "openbookqa" else "question"
            yield {name: f"{text} {i}?", "choices": choices, "answerKey": "ABCD"[gold]}
        elif task == "boolq":
            yield {"passage": words(rng, 20, 60 if i else 90), "question": f"is {text} {i}", "label": gold}
        elif task == "hellaswag":
            yield {"activity_label": f"Work {i}", "ctx_a": f"{text} [step] now.", "ctx_b": "he", "label": str(gold),
                   "endings": [f"{e} [title] end." for e in endings]}  # fmt: skip
        elif task == "piqa":
            yield {"goal": f"{text} {i}", "sol1": endings[0], "sol2": endings[1], "label": gold}
        else:
            yield {"sentence": f"{text} because _ was {words(rng, 2, 6)} {i}.", "option1": "Ann", "option2": "big Bob",
                   "answer": str(gold + 1)}  # fmt: skip


def local_record(task, doc):
    """Return a question of `raw_docs` with the fields of difftx's files."""
    if task.startswith("arc"):
        gold = doc["choices"]["label"].index(doc["answerKey"])
        return {"query": f"Question: {doc['question']}\nAnswer:", "choices": doc["choices"]["text"], "gold": gold}
    if task == "openbookqa":
        gold = doc["choices"]["label"].index(doc["answerKey"])
        return {"query": doc["question_stem"], "choices": doc["choices"]["text"], "gold": gold}
    if task == "boolq":
        query = f"Passage: {doc['passage']}\nQuestion: {doc['question']}?"
        return {"query": query, "choices": ["no", "yes"], "gold": doc["label"]}
    if task == "hellaswag":

        def clean(text):
            return text.strip().replace(" [title]", ". ").replace(" [step]", " ").replace("  ", " ")

        query = f"{doc['activity_label']}: {doc['ctx_a']} {doc['ctx_b'].capitalize()}"
        return {"query": clean(query), "choices": list(map(clean, doc["endings"])), "gold": int(doc["label"])}
    if task == "piqa":
        query = f"Question: {doc['goal']}\nAnswer:"
        return {"query": query, "choices": [doc["sol1"], doc["sol2"]], "gold": doc["label"]}
    before, after = doc["sentence"].split("_")
    options = [before + doc["option1"], before + doc["option2"]]
    return {"context_options": options, "continuation": after.strip(), "gold": int(doc["answer"]) - 1}


def write(path, records):
    data = "".join(json.dumps(record) + "\n" for record in records).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    (folder / "text.txt").write_text("".join(f"{i} squared is {i * i}.\n" for i in range(8000)))
    for number, (task, split) in enumerate(LOCAL.items()):
        rng = np.random.default_rng(number)
        write(folder / f"{task}_{split}.jsonl.gz", [local_record(task, doc) for doc in raw_docs(task, rng, 11)])
        write(folder / f"{task}_train.jsonl", [local_record(task, doc) for doc in raw_docs(task, rng, 5)])
    return folder


def config_of(folder, **changes):
    changes = {name if "." in name else f"eval.harness.{name}": value for name, value in changes.items()}
    return suite_config(folder, WINDOW, **{"eval.harness.data_path": folder} | changes)


def random_params(run):
    rng = np.random.default_rng(0)

    def draw(name, shape):  # Weights so large that attention is far from uniform.
        return ("scale" in name) + (0.02 if "embedding" in name else 0.3) * rng.normal(size=shape)

    return params_from(run, draw)


def uniform_params(run):
    """Return parameters with which all bytes are equally likely and other tokens impossible.

    The embedding is constant, and no block adds anything to it.
    """
    assert not run.config.model.tie_embeddings

    def draw(name, shape):
        if "unembedding" in name:
            return np.where(np.arange(shape[0])[:, None] < 256, 0.0, -1000.0) * np.ones(shape)
        return np.full(shape, float("embedding" in name or "scale" in name))

    return params_from(run, draw)


def evaluated(config, workdir, params=random_params):
    run = Run.open(config, workdir)
    return evals.evaluate(run, params(run), 3, ["harness"])["harness"]


# Valid rows.
ROWS = {
    "piqa": {"query": "Question: a\nAnswer:", "choices": ["b", "c"], "gold": 0},
    "boolq": {"query": "a\nQuestion: b?", "choices": ["no", "yes"], "gold": 0},
    "hellaswag": {"query": "a: b", "choices": ["c", "d", "e", "f"], "gold": 0},
    "openbookqa": {"query": "a", "choices": ["c", "d", "e", "f"], "gold": 0},
    "winogrande": {"context_options": ["a b", "a c"], "continuation": "left.", "gold": 0},
}


def test_without_lm_eval_a_line_says_what_to_install(folder, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    run = Run.open(config_of(folder), tmp_path)
    for check in (lambda: evals.check_run(run, ["harness"]), lambda: evals.evaluate(run, None, 3, ["harness"])):
        with pytest.raises(UserError, match=r"lm_eval is not installed: \S+ -m pip install -e '\S+\[eval\]'"):
            check()


@pytest.mark.parametrize(
    ("task", "records", "message"),
    [
        ("piqa", None, r"data_path=.* has no piqa_val.jsonl, plain or compressed. Did you mean 'piqa_vall.jsonl'"),
        ("piqa", [{"query": "a", "choices": ["b", "c"], "gold": 2}], "gold=2 must be an index of choices, 0 … 1"),
        ("piqa", [{"query": "a", "choices": ["b", "c"], "gold": True}], "line 1: gold=True must be an index"),
        ("piqa", [{"query": "a", "choices": [], "gold": 0}], r"line 1: choices=\[\] must be a list of texts"),
        ("piqa", [{"query": "a", "choices": ["b", ""], "gold": 0}], "line 1: choices=.* must be a list of texts"),
        ("piqa", [{"query": "", "choices": ["b"], "gold": 0}], "line 1: query='' must be text, and not empty"),
        ("piqa", [{"quary": "a", "choices": ["b"], "gold": 0}], "line 1 has no field 'query'. Did you mean 'quary'"),
        ("winogrande", [{"query": "a", "choices": ["b"], "gold": 0}], "line 1 has no field 'context_options'"),
        ("piqa", [ROWS["piqa"], {"query": "a", "choices": ["b", "c"], "gold": 0}],
         r"piqa_val.jsonl: line 2: query='a' does not have the task's form, 'Question: …\\nAnswer:'; write the"),
        ("piqa", [ROWS["piqa"] | {"choices": ["b", "c", "d"]}], "line 1: choices has 3 texts, not 2"),
        ("piqa", [ROWS["piqa"] | {"query": "Question: a {b}?"}], r"query='Question: a {b}\?' does not have the task's"),
        ("boolq", [ROWS["boolq"] | {"choices": ["yes", "no"]}], r"line 1: choices must be \['no', 'yes'\]"),
        ("boolq", [ROWS["boolq"] | {"query": "is it so?"}], "query='is it so.' does not have the task's form"),
        ("hellaswag", [ROWS["hellaswag"] | {"query": "no activity"}], "does not have the task's form, 'activity: con"),
        ("hellaswag", [ROWS["hellaswag"] | {"choices": ["a", "b", "c [step] d", "e"]}], "'c .step. d' has a mark in"),
        ("hellaswag", [ROWS["hellaswag"] | {"choices": ["a", "b", "c"]}], "choices has 3 texts, not 4"),
        ("openbookqa", [ROWS["piqa"] | {"choices": ["b"] * 4}], "does not have the task's form, 'the question alone'"),
        ("arc_easy", [ROWS["openbookqa"]], "query='a' does not have the task's form"),
        ("arc_challenge", [ROWS["piqa"] | {"choices": ["b"] * 6}], "choices has 6 texts, not 2 or 3 or 4 or 5"),
        ("winogrande", [ROWS["winogrande"] | {"continuation": " left."}], "=' left.' does not have the task's form"),
        ("winogrande", [ROWS["winogrande"] | {"context_options": ["a"]}], "context_options has 1 texts, not 2"),
        ("piqa", [], "the file has no questions"),
    ],
)  # fmt: skip
def test_mistakes_in_files_name_file_and_line(tmp_path, task, records, message):
    write(tmp_path / f"{task}_{'vall' if records is None else 'val'}.jsonl", records or [])
    list_field = "context_options" if task == "winogrande" else "choices"
    with pytest.raises(UserError, match=message):
        splits(task=task, data_path=str(tmp_path), num_fewshot=0, list_field=list_field, test="val")


def test_few_shot_examples_require_a_file_with_enough_rows(folder, tmp_path):
    write(tmp_path / "piqa_val.jsonl", [ROWS["piqa"]])
    with pytest.raises(UserError, match=r"has no piqa_train.jsonl, plain or compressed. Did you mean 'piqa_val.jsonl'"):
        splits(task="piqa", data_path=str(tmp_path), num_fewshot=1, list_field="choices", test="val")
    with pytest.raises(UserError, match="piqa_train has 5 examples, but num_fewshot=5 needs 6"):
        splits(task="piqa", data_path=str(folder), num_fewshot=5, list_field="choices", test="val")


# The following tests run lm-eval.


def requests_of(task, num_fewshot):
    """Return a task's requests for each question, and its metrics of random answers to them."""
    task.set_config(key="num_fewshot", value=num_fewshot)
    task.set_fewshot_seed(seed=7)
    task.build_all_requests(limit=None, rank=0, world_size=1)
    by_doc = {}
    for instance in task.instances:
        by_doc.setdefault(instance.doc_id, []).append(instance)
    rng = np.random.default_rng(0)
    docs = {i: doc for i, doc in task.doc_iterator(rank=0, limit=None, world_size=1)}
    return [
        ([i.args for i in asked], task.process_results(docs[n], [(float(-rng.random()), False) for _ in asked]))
        for n, asked in by_doc.items()
    ]


@pytest.mark.long
@pytest.mark.parametrize("task", LOCAL)
def test_local_tasks_equal_those_of_lm_eval(lm_eval, folder, task):
    import datasets
    from lm_eval.tasks import TaskManager
    from lm_eval.tasks._yaml_loader import load_yaml

    from difftx.evals.harness.suite import LOCAL_TASKS

    names = {"boolq": "super_glue/boolq/default", "winogrande": "winogrande/default"}
    names |= {"arc_challenge": "arc/arc_challenge", "arc_easy": "arc/arc_easy"}
    own = load_yaml(f"{lm_eval.__path__[0]}/tasks/{names.get(task, f'{task}/{task}')}.yaml", resolve_func=True)
    rng = np.random.default_rng(list(LOCAL).index(task))
    test, train = (datasets.Dataset.from_list(list(raw_docs(task, rng, count))) for count in (11, 5))
    own["custom_dataset"] = lambda **_: {"train": train, "validation": test, "test": test}
    theirs = TaskManager(include_defaults=False).load([own])["tasks"][task]
    metadata = {"data_path": str(folder), "num_fewshot": 2}
    manager = TaskManager(include_path=str(LOCAL_TASKS), include_defaults=False, metadata=metadata)
    ours = manager.load([task])["tasks"][task]
    for shots in (0, 2):
        expected = requests_of(theirs, shots)
        assert requests_of(ours, shots) == expected
        assert len(expected) == 11
    assert ours.VERSION == theirs.VERSION
    assert ours.higher_is_better() == theirs.higher_is_better()


class BruteForce:
    """Scorer of one continuation at a time, from the logits of a single row, as training computes them."""

    def __init__(self, run, params):
        devices, axes = np.array(jax.devices()[:1]).reshape((1,) * 4), run.mesh.axis_types
        self.mesh = jax.sharding.Mesh(devices, run.mesh.axis_names, axis_types=axes)
        with jax.set_mesh(self.mesh):
            self.params = jax.device_put(jax.device_get(params), jax.NamedSharding(self.mesh, jax.P()))
            graphdef = graph(run.config)
        self.logits = jax.jit(lambda params, row: nnx.merge(graphdef, params)(row)[0])
        self.known = {}

    def __call__(self, context, continuation):
        key = tokens, count = tuple([*context, *continuation][-WINDOW - 1 :]), len(continuation)  # Left-truncated.
        if key not in self.known:
            row = np.zeros((1, WINDOW), np.int32)
            row[0, : len(tokens) - 1] = tokens[:-1]
            with jax.set_mesh(self.mesh):
                logits_TV = np.asarray(self.logits(self.params, row))[0].astype(np.float64)
            logits_NV = logits_TV[len(tokens) - 1 - count : len(tokens) - 1]
            log_p_NV = logits_NV - np.log(np.sum(np.exp(logits_NV), axis=1, keepdims=True))
            self.known[key] = float(log_p_NV[np.arange(count), tokens[-count:]].sum())
        return self.known[key]


def questions(folder, task):
    """Yield each question's pairs of prompt and continuation, and the index of the correct one."""
    lines = gzip.decompress((folder / f"{task}_{LOCAL[task]}.jsonl.gz").read_bytes()).splitlines()
    for record in map(json.loads, lines):
        if task == "winogrande":
            yield [(c, f" {record['continuation']}") for c in record["context_options"]], record["gold"]
        else:
            query = record["query"]
            if task == "boolq":
                query = f"{query.removeprefix('Passage: ')}\nAnswer:"
            yield [(query, f" {choice}") for choice in record["choices"]], record["gold"]


@pytest.mark.long
def test_scores_equal_those_of_an_unbatched_pass(lm_eval, folder, tmp_path, monkeypatch):
    config = config_of(folder, truncate="true")
    run = Run.open(config, tmp_path)
    params = random_params(run)
    from difftx.evals.harness import model as harness_model

    asked, score = {}, harness_model.score_all

    def noting(evaluation, pairs, *, what):
        scores = score(evaluation, pairs, what=what)
        asked.update(zip(pairs, scores, strict=True))
        return scores

    monkeypatch.setattr(harness_model, "score_all", noting)
    result = evals.evaluate(run, params, 3, ["harness"])["harness"]
    slow = BruteForce(run, params)
    for pair, (loglikelihood, _) in asked.items():
        assert loglikelihood == pytest.approx(slow(*pair), abs=1e-4)
    texts = [(a.encode(), b.encode()) for task in LOCAL for pairs, _ in questions(folder, task) for a, b in pairs]
    # Requests that are too long keep their end. It has WINDOW + 1 tokens, because the last token is only a target.
    assert set(asked) == {(tuple((a + b)[-WINDOW - 1 : -len(b)]), tuple(b)) for a, b in texts}
    means = {"acc": [], "acc_norm": []}
    for task in LOCAL:
        right = {"acc": [], "acc_norm": []}
        for pairs, gold in questions(folder, task):
            scores = [slow(a.encode(), b.encode()) for a, b in pairs]
            lengths = [len(continuation) - 1 for _, continuation in pairs]
            right["acc"].append(np.argmax(scores) == gold)
            right["acc_norm"].append(np.argmax(np.divide(scores, lengths)) == gold)
        for metric in ["acc"] if task in NO_NORM else ["acc", "acc_norm"]:
            assert result.numbers[f"{task}_{metric}"] == np.mean(right[metric]), (task, metric)
            stderr = np.std(right[metric], ddof=1) / math.sqrt(11)
            assert result.numbers[f"{task}_{metric}_stderr"] == pytest.approx(stderr)
        means["acc"].append(np.mean(right["acc"]))
        means["acc_norm"].append(np.mean(right["acc" if task in NO_NORM else "acc_norm"]))
    assert result.numbers["average_acc"] == pytest.approx(np.mean(means["acc"]))
    assert result.numbers["average_acc_norm"] == pytest.approx(np.mean(means["acc_norm"]))
    paper = [result.numbers[f"{task}_{'acc_norm' if task == 'hellaswag' else 'acc'}"] for task in LOCAL]
    assert result.numbers["average_paper"] == pytest.approx(np.mean(paper))
    assert result.details["truncated_requests"] == sum(len(a + b) > WINDOW + 1 for a, b in texts) > 5
    assert result.details["questions"] == dict.fromkeys(LOCAL, 11)
    assert not list((tmp_path / "evals" / "harness").glob("3.*.items.jsonl"))


def test_the_papers_average_is_that_of_openllamas_published_metrics():
    """The README of OpenLLaMA has these accuracies of OpenLLaMA-3B-v2, whose average in the paper's Table 1 is 57.5."""
    published = {
        "arc_challenge": {"acc": 0.34, "acc_norm": 0.36},
        "arc_easy": {"acc": 0.68, "acc_norm": 0.63},
        "boolq": {"acc": 0.66},
        "hellaswag": {"acc": 0.52, "acc_norm": 0.70},
        "openbookqa": {"acc": 0.26, "acc_norm": 0.38},
        "piqa": {"acc": 0.77, "acc_norm": 0.78},
        "winogrande": {"acc": 0.63},
    }
    numbers = averages(published | {"lambada": {"acc": 0.0}})
    assert numbers["average_paper"] == pytest.approx(0.575, abs=0.005)
    assert numbers["average_paper"] - averages(published)["average_acc"] > 0.02
    assert averages(published)["average_acc_norm"] - numbers["average_paper"] > 0.01
    del published["piqa"]
    assert "average_paper" not in averages(published)


OWN_TASKS = """
def texts(**_):
    import datasets
    texts = ["A first text, naïve and brief.", "Longer. " * 100, "x" * 256, "y" * 257]
    return {"test": datasets.Dataset.from_list([{"text": text} for text in texts])}

def sums(**_):
    import datasets
    return {"test": datasets.Dataset.from_list([{"a": a, "b": 2 * a} for a in range(7)])}

def balanced(**_):
    import datasets
    choices = ["aaaa", "bbbb", "cccc", "dddd"]
    return {"test": datasets.Dataset.from_list([{"q": f"Q {i}", "choices": choices, "gold": i % 4} for i in range(20)])}
"""
OWN_YAML = {
    "texts": {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "text",
              "metric_list": [{"metric": name} for name in ("bits_per_byte", "byte_perplexity", "word_perplexity")]},
    "sums": {"output_type": "generate_until", "doc_to_text": "{{a}} + {{b}} =", "doc_to_target": "{{a + b}}",
             "generation_kwargs": {"until": ["\n"], "max_gen_toks": 12, "do_sample": False},
             "metric_list": [{"metric": "exact_match"}]},
    "balanced": {"output_type": "multiple_choice", "doc_to_text": "q", "doc_to_choice": "choices",
                 "doc_to_target": "gold",
                 "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}]},
}  # fmt: skip


@pytest.fixture(scope="module")
def own_tasks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("own")
    (folder / "data.py").write_text(OWN_TASKS)
    for name, fields in OWN_YAML.items():
        values = "".join(f"{key}: {json.dumps(value)}\n" for key, value in fields.items())
        (folder / f"{name}.yaml").write_text(
            f"task: {name}\ntest_split: test\ncustom_dataset: !function data.{name}\n{values}"
        )
    return folder


@pytest.mark.long
def test_a_uniform_byte_model_has_8_bits_per_byte_and_chance_accuracy(lm_eval, folder, own_tasks, tmp_path):
    changes = {"tasks": "texts,balanced", "include_path": own_tasks, "model.tie_embeddings": "false"}
    result = evaluated(config_of(folder, **changes), tmp_path, uniform_params)
    assert f"{result.numbers['texts_bits_per_byte']:.4f}" == "8.0000"
    assert result.numbers["texts_bits_per_byte"] == pytest.approx(8, abs=1e-6)
    assert result.numbers["texts_byte_perplexity"] == pytest.approx(256, rel=1e-6)
    assert result.numbers["balanced_acc"] == result.numbers["balanced_acc_norm"] == 0.25
    assert result.numbers["average_acc"] == 0.25
    assert chance_of(result) == dict.fromkeys(
        ["balanced_acc", "balanced_acc_norm", "average_acc", "average_acc_norm"], 0.25
    )


@pytest.mark.long
def test_rolling_windows_score_each_token_once_in_its_window(lm_eval, folder, own_tasks, tmp_path):
    config = config_of(folder, tasks="texts", include_path=own_tasks)
    run = Run.open(config, tmp_path)
    params = random_params(run)
    bits = evals.evaluate(run, params, 3, ["harness"])["harness"].numbers["texts_bits_per_byte"]
    slow, nats, length = BruteForce(run, params), 0, 0
    for text in ["A first text, naïve and brief.", "Longer. " * 100, "x" * 256, "y" * 257]:
        tokens = list(text.encode())
        length += len(tokens)
        for start in range(0, len(tokens), WINDOW):
            part = tokens[start : start + WINDOW]
            # The last window is filled with earlier tokens as context.
            before = [256, *tokens][max(0, start + len(part) - WINDOW) : start + 1]
            nats += slow(before, part)
    assert bits == pytest.approx(-nats / math.log(2) / length, abs=1e-5)


@pytest.mark.long
def test_texts_are_generated(lm_eval, folder, own_tasks, tmp_path, monkeypatch):
    """An oracle replaces `generate`. The likelihoods are those of the model."""
    asked = []

    def oracle(lm, batch, sampling, *, stop, batch_rows):
        assert stop == ("\n", "<|endoftext|>")
        assert sampling.temperature == 0
        asked.extend(bytes(request.prompt).decode() for request in batch)
        sums = (sum(map(int, text.removesuffix(" =").split("+"))) for text in asked[-len(batch) :])
        return [Completion(tokens=[], text=str(total), ended_by="limit") for total in sums]

    monkeypatch.setattr("difftx.evals.evaluation.generate", oracle)
    result = evaluated(config_of(folder, tasks="sums,piqa", include_path=own_tasks, limit=5), tmp_path)
    assert result.numbers["sums_exact_match"] == 1
    assert sorted(asked) == [f"{a} + {2 * a} =" for a in range(5)]
    assert result.numbers["average_acc"] == result.numbers["piqa_acc"]


@pytest.mark.long
def test_mistakes_are_one_line(lm_eval, folder, own_tasks, tmp_path):
    run = Run.open(config_of(folder), tmp_path)
    for changes, message in [
        ({}, r"a request takes \d+ tokens, and the model's context data.sequence_length=256; remove .*, or truncate"),
        ({"tasks": "piqa", "data_path": "no/such"}, "eval.harness.data_path=no/such: no such folder"),
        ({"tasks": "sums", "include_path": "no/such"}, "eval.harness.include_path=no/such: no such folder"),
        ({"tasks": "hellaswagg"}, "lm-eval has no task 'hellaswagg'. Did you mean 'hellaswag'"),
    ]:
        with pytest.raises(UserError, match=message):
            evaluated(
                override(run.config, {f"eval.harness.{name}": str(value) for name, value in changes.items()}), tmp_path
            )
