"""The lines of metrics: one file that grows, a checkpoint that does not, and lines that no checkpoint counts on."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_runs import outcome, small

import fedspa
from fedspa import durable
from fedspa.errors import FedspaError
from fedspa.runs.metrics import RoundMetrics
from fedspa.runs.rundir import Journal


def line(t: int) -> RoundMetrics:
    return RoundMetrics(t, 0.1 + 0.2, 1 / 3, 3, 900, None, False, None)


def written(folder: Path, count: int) -> bytes:
    """Write a journal of so many lines, and return its content."""
    folder.mkdir(exist_ok=True)
    journal = Journal(folder)
    for t in range(count):
        journal.add(asdict(line(t)))
    journal.settle()
    return (folder / "metrics.jsonl").read_bytes() if count else b""


@given(count=st.integers(0, 6), back=st.integers(0, 6), torn=st.binary(max_size=9))
def test_it_comes_back_to_any_round(
    tmp_path_factory: pytest.TempPathFactory, count: int, back: int, torn: bytes
) -> None:
    folder, rounds = tmp_path_factory.mktemp("journal"), min(back, count)
    (folder / "metrics.jsonl").write_bytes(written(folder, count) + torn)
    again = Journal(folder)
    assert again.rewind(rounds) == [line(t) for t in range(rounds)]
    again.add(asdict(line(rounds)))
    assert (folder / "metrics.jsonl").read_bytes() == written(folder / "other", rounds + 1)


@given(kept=st.integers(0, 10**4))
def test_lines_that_a_checkpoint_counts_on_must_be_whole(tmp_path_factory: pytest.TempPathFactory, kept: int) -> None:
    """Cut anywhere, a journal gives all the lines that are asked for or none, and a refusal changes nothing."""
    folder = tmp_path_factory.mktemp("journal")
    content = written(folder, 3)
    left = content[: kept % len(content)]
    (folder / "metrics.jsonl").write_bytes(left)
    with pytest.raises(FedspaError, match="does not hold the 3 rounds"):
        Journal(folder).rewind(3)
    assert (folder / "metrics.jsonl").read_bytes() == left
    assert len(Journal(folder).rewind(left.count(b"\n"))) == left.count(b"\n")


def test_a_checkpoint_does_not_grow_with_the_rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It held the metrics of all rounds: 10,000 rounds of a model of 240 bytes wrote 9 GB."""
    sizes: list[int] = []
    replace = durable.replace_tensors

    def weighed(path: Path, write: object) -> None:
        replace(path, write)  # type: ignore[arg-type]
        sizes.append(path.stat().st_size)

    monkeypatch.setattr(durable, "replace_tensors", weighed)
    fedspa.run(small(tmp_path / "run", federation={"rounds": 60, "per_round": 1}, algorithm={"local_steps": 1}))
    checkpoints = sizes[:-1]  # the last is the model
    assert len(checkpoints) == 61
    assert max(checkpoints) - min(checkpoints) < 100  # digits of the counts
    assert outcome(tmp_path / "run")["summary"]["rounds"] == 60
