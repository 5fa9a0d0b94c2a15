"""The benchmark of whole jobs: ours and plain PyTorch on a small one, and what is said of a peer that is not there."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

import peers


def small(private: bool) -> peers.Job:
    return peers.Job(private=private, agents=10, per_round=4, rounds=2, steps=3, processes=2)


@pytest.mark.slow
def test_ours_and_plain_pytorch(tmp_path: Path) -> None:
    names = ["ours", "plain"]
    private = importlib.util.find_spec("opacus") is not None  # plain PyTorch does the private job with Opacus
    peers.make_records(tmp_path, None, agents=10, tested=20)
    result = peers.measure(tmp_path, small(private), names, sys.executable, repeats=1)
    assert list(result["contenders"]) == names
    for row in result["contenders"].values():
        assert row["wall_s"] == pytest.approx(row["start_s"] + 2 * row["round_s"])
        assert 0 <= row["accuracy"] <= 1
    assert result["ratios"]["round_s"]["best"] == "plain"


def test_a_peer_that_is_not_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(peers.PEERS, "absent", ("peer_absent.py", ("torch", "no_such_package"), "Absent"))
    result = peers.measure(tmp_path, small(False), ["absent"], sys.executable, repeats=1)
    assert result == {"contenders": {}, "skipped": {"absent": "not installed: no_such_package"}, "ratios": {}}


def test_a_peer_that_fails_is_no_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "fails.py"
    script.write_text("raise SystemExit('out of luck')", "utf-8")
    monkeypatch.setitem(peers.PEERS, "failing", (str(script), (), "Failing"))
    with pytest.raises(SystemExit, match="out of luck"):
        peers.one_job("failing", tmp_path, sys.executable)


def test_what_a_peer_says_is_found_among_what_its_helpers_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "loud.py"
    script.write_text("""print('(worker) up {"round_s": [1.5], "accuracy": 0.5}(worker) {down}')""", "utf-8")
    monkeypatch.setitem(peers.PEERS, "loud", (str(script), (), "Loud"))
    said = peers.one_job("loud", tmp_path, sys.executable)
    assert (said["round_s"], said["accuracy"]) == ([1.5], 0.5)
