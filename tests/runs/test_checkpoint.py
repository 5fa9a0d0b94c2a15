"""Checkpoint files: what is saved comes back to the bit, what is damaged or foreign is refused in one line."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from small_runs import outcome, small

import fedspa
from fedspa import durable
from fedspa.errors import FedspaError
from fedspa.runs import checkpoint
from fedspa.runs.checkpoint import Checkpoint, CheckpointError, load, load_latest, save
from fedspa.runs.config import load as load_config
from fedspa.runs.loop import check_same_run
from fedspa.runs.rundir import Journal, RoundMetrics
from fedspa.server.optimizers import ServerState

floats = st.floats(width=32, allow_nan=False, allow_infinity=False)


def example(done: int = 1, size: int = 5, moments: str = "uv", **changes: Any) -> Checkpoint:
    chance = torch.Generator().manual_seed(done)
    state = ServerState(
        torch.randn(size, generator=chance), done, {name: torch.rand(size, generator=chance) for name in moments}
    )
    return replace(Checkpoint(state, "run-1", load_config(), 1.5, {"engine": "generic"}), **changes)


def same(one: Checkpoint, other: Checkpoint) -> bool:
    tensors = [c.state.tensors for c in (one, other)]
    return (
        tensors[0].keys() == tensors[1].keys()
        and all(torch.equal(tensors[0][name], tensors[1][name]) for name in tensors[0])
        and all(getattr(one, f) == getattr(other, f) for f in ("run", "config", "seconds"))
        and (one.state.round, dict(one.facts), dict(one.extra))
        == (other.state.round, dict(other.facts), dict(other.extra))
    )


@given(
    theta=st.lists(floats, min_size=1, max_size=8),
    moments=st.sets(st.sampled_from(["u", "v", "average", "a new one"])),
    rounds=st.integers(0, 10**9 - 1),
    seconds=st.floats(0, 1e9),
    extra=st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=5) | st.none(), max_size=3),
)
def test_what_is_saved_comes_back_to_the_bit(
    tmp_path_factory: pytest.TempPathFactory,
    theta: list[float],
    moments: set[str],
    rounds: int,
    seconds: float,
    extra: dict[str, Any],
) -> None:
    state = ServerState(torch.tensor(theta), rounds, {name: torch.tensor(theta) * 0.5 for name in moments})
    written = Checkpoint(state, "r", load_config(), seconds, {"d": len(theta)}, extra)
    folder = tmp_path_factory.mktemp("law")
    assert same(load(save(folder, written)), written)
    read = load_latest(folder)
    assert read is not None
    assert same(read, written)
    check_same_run(folder, read, load_config(), {"d": len(theta)})


def test_a_damaged_newest_falls_back_and_says_so(tmp_path: Path) -> None:
    for done in (1, 2, 3):
        newest = save(tmp_path, example(done))
    newest.write_bytes(newest.read_bytes()[:-1])
    latest = load_latest(tmp_path)
    assert latest.state.round == 2
    assert len(latest.damaged) == 1
    assert "round-000003" in latest.damaged[0]
    save(tmp_path, example(2))  # what lies beyond is from a future that was given up
    assert sorted(path.name[6:12] for path in tmp_path.iterdir()) == ["000002"]


def test_every_single_bit_matters(tmp_path: Path) -> None:
    """Flip each bit of a file in turn: refused, or (padding and spelling of the header) the same checkpoint."""
    written = example(size=2, moments="")
    content = save(tmp_path, written).read_bytes()
    flipped = tmp_path / "flipped.safetensors"
    refused = 0
    for bit in range(0, 8 * len(content), 37):
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        flipped.write_bytes(damaged)
        try:
            assert same(load(flipped), written)
        except CheckpointError:
            refused += 1
    assert refused > 0.99 * len(range(0, 8 * len(content), 37))


@given(st.binary(max_size=300))
def test_any_bytes_are_refused_in_one_line(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.mktemp("fuzz") / "round-000001.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        load(path)
    assert "\n" not in str(caught.value)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
FIELDS = ("format", "round", "run", "config", "seconds", "facts", "extra", "other")


@given(changes=st.dictionaries(st.sampled_from(FIELDS), json_values, max_size=3), dropped=st.sampled_from(FIELDS))
def test_a_hostile_header_under_a_right_digest(
    tmp_path_factory: pytest.TempPathFactory, changes: dict[str, Any], dropped: str
) -> None:
    """The digest has no key, so whoever forges a file can make it fit: values are checked all the same."""
    folder = tmp_path_factory.mktemp("forged")
    header = _header(save(folder, example()))
    header.update(changes)
    if dropped not in changes:
        header.pop(dropped, None)
    path = _forge(folder, json.dumps(header), {"theta": torch.ones(3)})
    with suppress(CheckpointError):
        forged = load(path)
        assert forged.state.round >= 0
        assert forged.seconds >= 0


@pytest.mark.parametrize(
    ("tensors", "word"),
    [
        ({}, "tensors"),
        ({"u": torch.ones(3)}, "tensors"),
        ({"theta": torch.ones(3), "other": torch.ones(4)}, "other"),
        ({"theta": torch.ones(3), "u": torch.ones(4)}, "u is"),
        ({"theta": torch.ones(3, 1)}, "shape"),
        ({"theta": torch.ones(0)}, "shape"),
        ({"theta": torch.ones(3, dtype=torch.float64)}, "float64"),
        ({"theta": torch.tensor([1.0, torch.nan])}, "NaN"),
        ({"theta": torch.ones(2), "v": torch.tensor([1.0, torch.inf])}, "∞"),
    ],
    ids=str,
)
def test_hostile_tensors(tmp_path: Path, tensors: dict[str, torch.Tensor], word: str) -> None:
    header = _header(save(tmp_path, example()))
    with pytest.raises(CheckpointError, match=word):
        load(_forge(tmp_path, json.dumps(header), tensors))


def test_no_pickle_is_ever_read(tmp_path: Path) -> None:
    path = tmp_path / "round-000001.safetensors"
    torch.save({"theta": torch.ones(3)}, path)
    with pytest.raises(CheckpointError):
        load(path)


def test_another_config_is_refused_and_the_keys_are_named(tmp_path: Path) -> None:
    save(tmp_path, example())
    other = load_config(None, ["algorithm.local_lr=0.25", "privacy.delta=1e-4", "federation.cap=3"])
    saved = load_latest(tmp_path)
    assert saved is not None
    with pytest.raises(CheckpointError) as caught:
        check_same_run(tmp_path, saved, other, {})
    for words in (
        "algorithm.local_lr was 1.0 and is 0.25",
        "privacy.delta was 0.001 and is 0.0001",
        "cap was unset and is 3",
    ):
        assert words in str(caught.value)
    with pytest.raises(CheckpointError, match="the engine was 'generic' and is 'native'"):
        check_same_run(tmp_path, saved, load_config(), {"engine": "native"})


def test_a_state_that_is_not_finite_replaces_nothing(tmp_path: Path) -> None:
    save(tmp_path, example(1))
    with pytest.raises(CheckpointError, match="NaN"):
        save(tmp_path, example(2, state=ServerState(torch.tensor([torch.nan]), 2)))
    assert [path.name for path in tmp_path.iterdir()] == ["round-000001.safetensors"]


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk fills up in the middle of a write, at the fsync, or at the rename."""
    before = save(tmp_path, example(1)).read_bytes()

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    for owner, name in ((durable, "force"), (os, "replace"), (os, "fsync")):
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, full)
            with pytest.raises(OSError, match="No space"):
                save(tmp_path, example(2))
        assert [path.name for path in tmp_path.iterdir()] == ["round-000001.safetensors"]
        assert (tmp_path / "round-000001.safetensors").read_bytes() == before


def _header(path: Path) -> dict[str, Any]:
    content = path.read_bytes()
    outer = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    header: dict[str, Any] = json.loads(outer["__metadata__"]["fedspa"])
    return header


def _forge(folder: Path, header: str, tensors: dict[str, torch.Tensor]) -> Path:
    path = folder / "forged.safetensors"
    save_file(tensors, path, {"fedspa": header, "digest": checkpoint._digest(header, tensors)})
    return path


# The lines of metrics: one file that grows, a checkpoint that does not, and lines that no checkpoint counts on.


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
    with pytest.raises(FedspaError, match=r"does not hold the 3 rounds|is damaged"):
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
