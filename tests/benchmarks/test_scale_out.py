"""The benchmark of workers: small rounds by threads, whose payloads must be the same from every crew."""

from __future__ import annotations

import pytest
from worker_threads import ThreadPool

import scale_out
from fedspa.runs.workers import hired


@pytest.mark.parametrize("case", scale_out.WORKERS)
def test_a_round_of_each_case(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hired, "RayPool", lambda *asked: ThreadPool())
    monkeypatch.setattr(scale_out, "SECONDS_ASLEEP", 0.001)
    prepared = scale_out.prepared
    monkeypatch.setattr(scale_out, "prepared", lambda case, agents: prepared(case, agents, steps=1))
    result = scale_out.measured(case, agents=4, repeats=1)
    assert result["workers"] == scale_out.WORKERS[case]
    assert result["seconds"].keys() == {1, result["workers"]}
    assert result["ratio"]["lowest"] == result["ratio"]["highest"] > 0
    assert all(moved > 0 for moved in result["bytes_per_round"].values())
