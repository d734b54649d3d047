"""Batches of requests: greedy decoding compared with a plain loop, seeds, limits, stop strings, growing caches."""

import numpy as np
import pytest
from helpers.cases import marked
from helpers.inference_models import TENSOR, full_logits, language_model

from difftx.config.model import CacheConfig
from difftx.errors import UserError
from difftx.inference import cache, decode
from difftx.inference.generate import Request, generate
from difftx.inference.sampling import GREEDY, Sampling

PROMPTS = [[5, 6, 7], [100], [9] * 30]
HOT = Sampling(repetition_penalty=None, temperature=2.0, top_k=100, top_p=0.95)


def requests(prompts=PROMPTS, new_tokens=40, seed=0):
    return [Request(prompt=prompt, new_tokens=new_tokens, seed=seed + i) for i, prompt in enumerate(prompts)]


def test_greedy_equals_a_plain_loop_while_the_cache_grows(config, mesh_of, monkeypatch):
    monkeypatch.setattr(cache, "UNIT", 32)
    monkeypatch.setattr(decode, "ROOM_TOKENS", 1)
    lm = language_model(config, mesh_of())
    completions = generate(lm, requests(), GREEDY)
    assert max(len(c.tokens) for c in completions) == 40
    rows = [p + c.tokens for p, c in zip(PROMPTS, completions, strict=True)]
    tokens_BT = decode.padded(rows, lm.mesh, lm.config.model.cache)[0][:3]
    best_BT = np.argmax(full_logits(lm, mesh_of(), tokens_BT)[..., :257], axis=-1)
    for prompt, completion, best_T in zip(PROMPTS, completions, best_BT, strict=True):
        new = len(completion.tokens)
        assert completion.tokens == best_T[len(prompt) - 1 :][:new].tolist()
        assert completion.ended_by == ("limit" if new == 40 else "end of text")
        assert new == 40 or best_T[len(prompt) - 1 + new] == 256


@pytest.mark.parametrize(
    ("prompts", "fields"),
    [
        pytest.param(PROMPTS[:1], {}, marks=pytest.mark.long),
        pytest.param(PROMPTS[1:], {"model__num_kv_heads": 1}, marks=pytest.mark.long),
        pytest.param(PROMPTS[:1], {"model__num_kv_heads": 1, "model__cache__bits": 8}, marks=pytest.mark.long),
    ],
)
def test_one_row_or_key_of_a_model_with_a_pattern_of_windows(config, mesh_of, prompts, fields):
    """Axes of the cache with one entry keep their sharding when the layers are grouped by the pattern."""
    fields = {"model__window": 16, "model__window_pattern": "LG"} | fields
    lm = language_model(config, mesh_of(), **fields)
    completions = generate(lm, requests(prompts, new_tokens=20), GREEDY)
    for prompt, completion in zip(prompts, completions, strict=True):
        row_T = np.array(prompt + completion.tokens, np.int32)
        best_T = np.argmax(full_logits(lm, mesh_of(), row_T[None])[0, :, :257], axis=-1)
        if "model__cache__bits" not in fields:  # Rounded keys and values choose other tokens.
            assert completion.tokens == best_T[len(prompt) - 1 : -1].tolist()
        assert len(completion.tokens) == 20


@pytest.mark.parametrize("sizes", marked([{}, TENSOR, {"fsdp": 4}], fast=[{}]))
def test_rows_that_have_ended_are_replaced_by_waiting_requests(config, mesh_of, monkeypatch, sizes):
    monkeypatch.setattr(cache, "UNIT", 32)  # The caches of old and of new rows differ in size.
    lm = language_model(config, mesh_of(**sizes))
    limits, batches = [40, 2, 30, 5, 17, 1, 60], []
    many = [Request(prompt=[i + 1] * (3 * i + 1), new_tokens=limit, seed=i) for i, limit in enumerate(limits)]
    expected = generate(lm, many, HOT)  # All at a time.
    prefill = decode.prefill

    def counted(lm, prompts, **options):
        batches.append(len(prompts))
        return prefill(lm, prompts, **options)

    monkeypatch.setattr(decode, "prefill", counted)
    pieces = [""] * len(many)

    def on_text(index, text):
        pieces[index] += text

    assert generate(lm, many, HOT, batch_rows=3, on_text=on_text) == expected
    assert pieces == [completion.text for completion in expected]
    assert (batches[0], sum(batches), len(batches) > 2) == (3, 7, True)


@pytest.mark.long
def test_a_rows_samples_follow_its_seed_and_not_its_batch_or_mesh(config, mesh_of):
    lm = language_model(config, mesh_of())
    together = generate(lm, requests(), HOT)
    assert generate(lm, requests()[::-1], HOT)[::-1] == together
    assert [generate(lm, [request], HOT)[0] for request in requests()] == together
    assert generate(language_model(config, mesh_of(**TENSOR)), requests(), HOT) == together
    other = generate(lm, requests(seed=7), HOT)
    assert all(a.tokens != b.tokens for a, b in zip(together, other, strict=True))


@pytest.mark.long
def test_only_tokens_of_the_vocabulary_are_produced(config, mesh_of):
    lm = language_model(config, mesh_of(), model__vocab_size=1024)
    flat = Sampling(repetition_penalty=None, temperature=1e6, top_k=None, top_p=None)
    tokens = [t for c in generate(lm, requests(new_tokens=90), flat) for t in c.tokens]
    assert max(tokens) < 257
    assert len(set(tokens)) > 50


def test_rows_end_on_their_own_limits_and_stop_strings(config, mesh_of):
    lm = language_model(config, mesh_of())
    free = generate(lm, requests(), HOT)
    stop = free[0].text[5:7]
    assert free[0].text.find(stop) == 5
    limited = [
        Request(prompt=r.prompt, new_tokens=n, seed=r.seed) for r, n in zip(requests(), (40, 3, 17), strict=True)
    ]
    pieces = ["", "", ""]

    def on_text(index, text):
        pieces[index] += text

    completions = generate(lm, limited, HOT, stop=[stop, "never this"], on_text=on_text)
    assert [c.text for c in completions] == pieces
    assert completions[0].text == free[0].text[:5]
    assert completions[0].ended_by == "stop string"
    for c, whole, limit in zip(completions[1:], free[1:], (3, 17), strict=True):
        assert c.tokens == whole.tokens[: len(c.tokens)]
        assert c.ended_by == "stop string" or len(c.tokens) == limit


def test_invalid_requests_raise(config, mesh_of):
    lm = language_model(config, mesh_of())
    for prompt, new, message in [
        ([], 8, "prompt 0 is empty"),
        ([1] * 128, 1, "128 tokens, and the model's context data.sequence_length=128"),
        ([1] * 125, 4, "use 1 to 3"),
        ([1], 0, "use 1 to 127"),
    ]:
        with pytest.raises(UserError, match=message):
            generate(lm, requests([prompt], new), GREEDY)


def test_sizes_are_rounded_so_that_few_programs_are_compiled(mesh_of):
    assert [cache.capacity_for(n, CacheConfig()) for n in (0, 256, 257, 1100, 4096, 4097)] == [
        *(256, 256, 512, 1280, 4096, 5120)
    ]
    assert [decode.rows_for(n, mesh_of(fsdp=2)) for n in (1, 2, 3, 5, 16)] == [2, 2, 4, 8, 16]
    for config, expected in [(CacheConfig(), [32, 32, 64, 320, 1280]), (CacheConfig(bits=8), [32, 32, 64, 288, 1056])]:
        prompts = [[1] * n for n in (1, 32, 33, 260, 1030)]
        assert [decode.padded([prompt], mesh_of(), config)[0].shape[1] for prompt in prompts] == expected
