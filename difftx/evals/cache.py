"""Suite `cache`: other suites with a compressed key/value cache, as a function of its size (docs/suites.md)."""

import jax

from difftx.config import Config
from difftx.config.model import CacheConfig
from difftx.errors import UserError
from difftx.evals import SUITES
from difftx.evals.evaluation import Evaluation
from difftx.evals.inner import evaluate_inner, require_quantizable
from difftx.evals.result import Number, Result
from difftx.evals.suite import Suite
from difftx.inference.decode import cache_bytes_per_token
from difftx.training.run import Run

WHOLE = "whole"


def evaluate(evaluation: Evaluation) -> Result:
    """Run `eval.cache.suites` with keys and values in few bits, and with a cache of only some tokens."""
    run = evaluation.run
    configs = compressed(run.config)
    size = {name: bytes_per_token(evaluation, config) for name, config in configs.items()}
    ascending = sorted(size, key=size.__getitem__)
    kinds = {
        kind: {name: size[name] for name in ascending if name == WHOLE or name.endswith(ending)}
        for kind, ending in (("fewer bits", "_bits"), ("fewer tokens", "_tokens"))
    }
    texts = {"title": "by the size of the cache", "x_label": "bytes of the cache per token of a full row"}
    suites, recent_share = run.config.eval.cache.suites, run.config.eval.cache.recent_share
    of_suites, charts = evaluate_inner(evaluation, suites, configs, kinds, prefix="cache", **texts)
    numbers = {f"bytes_per_token_{name}": Number(value, "bytes per token", "lower") for name, value in size.items()}
    return Result(numbers=numbers | of_suites, details={"recent_share": recent_share}, charts=charts)


def compressed(config: Config) -> dict[str, Config]:
    """Return the config of each cache to measure, with names such as "whole", "8_bits" or "128_tokens"."""
    settings, chunk = config.eval.cache, config.eval.cache.chunk_tokens
    caches = {WHOLE: CacheConfig()}
    caches |= {f"{bits}_bits": CacheConfig(bits=bits, chunk_tokens=chunk) for bits in settings.bits}
    for share in settings.shares:
        tokens = round(share * config.data.sequence_length)
        cache = CacheConfig(tokens=tokens, recent_share=settings.recent_share, chunk_tokens=chunk)
        caches[f"{tokens}_tokens"] = cache
    return {name: config.but(model={"cache": cache}) for name, cache in caches.items()}


def bytes_per_token(evaluation: Evaluation, config: Config) -> float:
    """Return the bytes of the keys and values of a full row, divided by the row's number of tokens."""
    tokens, length = config.model.cache.tokens, config.data.sequence_length
    with jax.set_mesh(evaluation.run.mesh):
        return cache_bytes_per_token(config, evaluation.params) * min(1, (tokens or length) / length)


def check(run: Run) -> None:
    """Raise `UserError` if the suite cannot evaluate the run's settings or rows."""
    compressed(run.config)
    for name in run.config.eval.cache.suites:
        SUITES[name].check(run)
    if run.config.data.document_mask:
        raise UserError(
            "data.document_mask=True: a compressed cache does not keep the documents of a row apart; it requires a run "
            "with data.document_mask=False"
        )


SUITE = Suite(
    evaluate=evaluate,
    inner=lambda config: require_quantizable("eval.cache.suites", config.eval.cache.suites),
    check=check,
    quantizable=False,
    title="Compressed key/value cache",
    explanation="Other suites with keys and values in few bits, or with only a part of the tokens in the cache.",
)
