"""Tokenisation of units: the units left after an interruption, and the order of errors."""

import json

import pytest

from difftx.data.prepare import readers
from difftx.data.prepare.assembly import encode_unit, finished_units, unit_file, units_to_do
from difftx.data.prepare.job import Job
from difftx.data.prepare.readers import Fields, sources_of


def job_in(folder):
    job = Job(
        input=f"{folder}/*.jsonl",
        valid_input=None,
        out=folder / "out",
        tokenizer="bytes",
        end_of_text=None,
        fields=Fields("text", None),
        valid_fraction=0.1,
        shard_tokens=1000,
        skip_unreadable=False,
        workers=2,
    )
    job.units.mkdir(parents=True)
    return job


@pytest.mark.parametrize("done", [(), (0,), (0, 1, 2), (0, 2, 3), (1,), tuple(range(10))])
def test_only_units_without_a_file_are_read_again(tmp_path, monkeypatch, done):
    monkeypatch.setattr(readers, "UNIT_BYTES", 300)
    for name in ("a", "b"):
        lines = (json.dumps({"text": f"{name} {i} " * 5}) + "\n" for i in range(60))
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    job = job_in(tmp_path)
    sources = sources_of(job.input, valid=False, first_index=0)
    units = list(units_to_do(job, sources, finished_units(job, sources)))
    assert len([unit for unit in units if unit.source == 0]) > 4
    for number in done:
        encode_unit(job, units[number])
    left = [unit for i, unit in enumerate(units) if i not in done]
    assert list(units_to_do(job, sources, finished_units(job, sources))) == left
    for unit in units:
        encode_unit(job, unit)
    assert not list(units_to_do(job, sources, finished_units(job, sources)))
    for source, summaries in zip(sources, finished_units(job, sources).values(), strict=True):
        assert (summaries[-1].end, summaries[-1].last) == (source.size, True)
        assert len(summaries) == len([unit for unit in units if unit.source == source.index])
    assert unit_file(job, 1, 0, "").exists()
