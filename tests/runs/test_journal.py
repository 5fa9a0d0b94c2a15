"""The lines of metrics: two files that grow, a checkpoint that does not, and what happens to either when it rots."""

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
from fedspa.running import Stopped, simulate
from fedspa.runs.journal import Journal, Mark
from fedspa.runs.metrics import RoundMetrics


def line(t: int) -> RoundMetrics:
    return RoundMetrics(t, 0.1 + 0.2, 1 / 3, 3, 900, None, False, None)


def written(folder: Path, count: int) -> tuple[Journal, list[Mark]]:
    """A journal of so many lines, and where it stood after each."""
    (folder / "checkpoint").mkdir(parents=True, exist_ok=True)
    journal = Journal(folder, folder / "checkpoint")
    marks = [journal.mark]
    for t in range(count):
        journal.add(asdict(line(t)))
        marks.append(journal.mark)
    return journal, marks


@given(count=st.integers(0, 6), back=st.integers(0, 6), torn=st.binary(max_size=9))
def test_it_comes_back_to_any_mark(
    tmp_path_factory: pytest.TempPathFactory, count: int, back: int, torn: bytes
) -> None:
    folder = tmp_path_factory.mktemp("journal")
    _, marks = written(folder, count)
    mark = marks[min(back, count)]
    if count:
        for file in (folder / "metrics.jsonl", folder / "checkpoint" / "metrics.jsonl"):
            file.write_bytes(file.read_bytes() + torn)
    again = Journal(folder, folder / "checkpoint")
    assert again.rewind(mark) == [line(t) for t in range(mark.lines)]
    assert again.mark == mark
    again.add(asdict(line(mark.lines)))
    assert again.mark == written(folder / "other", mark.lines + 1)[1][-1]


@pytest.mark.parametrize("which", ["metrics.jsonl", "checkpoint/metrics.jsonl"])
@pytest.mark.parametrize("gone", [False, True])
def test_either_file_brings_the_other_back(
    tmp_path: Path, which: str, gone: bool, caplog: pytest.LogCaptureFixture
) -> None:
    _, marks = written(tmp_path, 3)
    before = (tmp_path / which).read_bytes()
    if gone:
        (tmp_path / which).unlink()
    else:
        (tmp_path / which).write_bytes(before.replace(b"900", b"901", 1))
    assert len(Journal(tmp_path, tmp_path / "checkpoint").rewind(marks[-1])) == 3
    assert (tmp_path / which).read_bytes() == before
    assert "was damaged and is written anew from its copy" in caplog.text


def test_both_damaged_is_one_line_and_touches_nothing(tmp_path: Path) -> None:
    seen: list[object] = []
    with pytest.raises(Stopped):
        simulate(small(tmp_path / "run"), on_round=seen.append, stop=lambda: len(seen) == 1)
    files = [tmp_path / "run" / "metrics.jsonl", tmp_path / "run" / "checkpoint" / "metrics.jsonl"]
    for file in files:
        file.write_bytes(b"{}\n{}\n")
    with pytest.raises(FedspaError, match=r"2 rounds are damaged in .* and in .*; restore one of them") as caught:
        simulate(resume=tmp_path / "run")
    assert "\n" not in str(caught.value)
    assert all(file.read_bytes() == b"{}\n{}\n" for file in files)


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
    lines = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    assert (tmp_path / "run" / "checkpoint" / "metrics.jsonl").read_bytes() == lines
    assert outcome(tmp_path / "run")["summary"]["rounds"] == 60
