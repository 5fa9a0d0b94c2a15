"""Trials that agents score: rounds of the same run under the same event, none of which escapes the ledger."""

from __future__ import annotations

import json
import random
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from interruptions import crash, refuse_a_difference
from small_runs import ALGORITHMS
from test_trials import CANDIDATES, EPSILON, entries, recomputed, searching

import fedspa
from fedspa.errors import ConfigError
from fedspa.runs.halving import Halving, Turn

ROUNDS = 4 + 1 + 2 + 1  # two rungs, each with a round in which agents score


def asking(out: Path, **sections: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """A small run of 10 rounds, 8 of them for trials. The server holds nothing out, so that agents score."""
    wanted = {
        "federation": {"rounds": 10},
        "data": {"holdout": 0.0},
        "tuning": {"candidates": CANDIDATES, "rounds": ROUNDS},
    }
    merged = {name: {**wanted.get(name, {}), **sections.get(name, {})} for name in {*wanted, *sections}}
    return searching(out, **merged)


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text("utf-8").splitlines()]


def test_a_round_of_scores_is_a_round_like_any_other(tmp_path: Path) -> None:
    result = fedspa.run(asking(tmp_path / "run"))
    summary, tuning = result.summary, result.summary["tuning"]
    assert (tuning["scored_by"], tuning["rounds"]) == ("agents", ROUNDS)
    assert tuning["scoring"]["rounds"] == [4, 7]
    assert sorted(t for trial in tuning["trials"] for t in trial["rounds"]) == [0, 1, 2, 3, 5, 6]
    lines = metrics(tmp_path / "run")
    assert [t for t, line in enumerate(lines) if line["trials"] is not None] == [4, 7]
    assert list(lines[4]["trials"]) == ["0", "1", "2", "3"]
    assert len(lines[7]["trials"]) == 2
    best = max(lines[7]["trials"], key=lines[7]["trials"].get)
    assert tuning["choice"] == int(best)
    # In the ledger each is a participation in the one event of the run.
    found = Counter(entry["message"] for entry in entries(result.folder))
    assert found == {f"round-{t}": 3 for t in range(10)}
    assert len({str(entry["event"]) for entry in entries(result.folder)}) == 1
    assert all(entry["digest"] for entry in entries(result.folder))
    plain = fedspa.run(asking(tmp_path / "plain", tuning={"candidates": None, "rounds": None})).summary
    for key in ("epsilon", "noise_multiplier", "participations_max", "accountant"):
        assert summary[key] == plain[key]
    assert recomputed(result.folder) == pytest.approx(summary["epsilon"])
    assert recomputed(result.folder) <= EPSILON


def test_agents_choose_what_they_score_highest(tmp_path: Path) -> None:
    """With hardly any noise: the counts are those of the agents' own records, and the best of them goes on."""
    privacy = {"noise_multiplier": 0.4, "epsilon": None, "clip_value": 1.0}
    still = {"algorithm.server": "average", "algorithm.server_lr": 1e-6}
    better = {"algorithm.server": "average", "algorithm.server_lr": 2.0}
    tuning = {"candidates": [still, better], "rounds": 3}
    result = fedspa.run(asking(tmp_path / "run", privacy=privacy, tuning=tuning))
    stated = metrics(tmp_path / "run")[2]["trials"]
    assert stated["1"] > stated["0"] + 0.1
    assert result.summary["tuning"]["choice"] == 1
    # What agents say of the model is near to what the server's test records say of it.
    assert stated["1"] == pytest.approx(metrics(tmp_path / "run")[1]["accuracy"], abs=0.1)


@pytest.mark.parametrize(
    ("sections", "word"),
    [
        ({"tuning": {"scored_by": "server"}}, "tuning.scored_by is 'server' and data.holdout is 0"),
        ({"tuning": {"candidates": None, "rounds": None, "scored_by": "agents"}}, "tuning.scored_by is for"),
        ({"tuning": {"rounds": 7}}, "at least 8 rounds"),
        (
            {**ALGORITHMS["cpsgd"], "privacy": {**ALGORITHMS["cpsgd"]["privacy"], "epsilon": None}},
            "agents cannot score under algorithm 'cpsgd'",
        ),
        (
            {
                "algorithm": {"mask": "shared", "local_steps": 1, "batch": 240},
                "privacy": {"adversary": "secure-aggregation"},
            },
            "privacy.adversary 'secure-aggregation'",
        ),
        ({"privacy": {"clip_rule": "quantile"}}, "clip_rule 'quantile'"),
    ],
)
def test_what_cannot_be_scored_so_is_refused_before_anything_is_written(
    tmp_path: Path, sections: dict[str, Any], word: str
) -> None:
    with pytest.raises(ConfigError, match=word) as refused:
        fedspa.run(asking(tmp_path / "run", **sections))
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1))
def test_killed_anywhere_it_ends_as_if_never_killed(tmp_path: Path, seed: int) -> None:
    """By kill -9: no trial and no score is lost, made twice or missing in the ledger."""
    refuse_a_difference(lambda folder: asking(folder), tmp_path, random.Random(100 + seed))


@pytest.mark.parametrize("t", [4, 7])
def test_scores_that_were_seen_stay_paid_and_drawn_anew_are_paid_again(
    tmp_path: Path, t: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = asking(tmp_path / "run", privacy={"noise": "secure"})
    crash(config, t, monkeypatch)
    assert {entry["message"] for entry in entries(tmp_path / "run")} == {f"round-{r}" for r in range(t + 1)}
    result = fedspa.run(config, resume=tmp_path / "run")
    messages = Counter(entry["message"] for entry in entries(tmp_path / "run"))
    assert messages[f"round-{t}"] == 3
    assert messages[f"round-{t}-attempt-2"] >= 1
    assert recomputed(tmp_path / "run") <= EPSILON
    assert result.summary["epsilon"] <= EPSILON
    assert result.summary["tuning"]["scoring"]["rounds"] == [4, 7]


@given(st.integers(1, 9), st.integers(0, 20), st.integers(1, 2), st.randoms(use_true_random=False))
def test_each_rung_is_followed_by_its_scores(candidates: int, spare: int, scoring: int, chance: random.Random) -> None:
    least = Halving(candidates, 1, scoring=scoring).rounds
    halving = Halving.within(candidates, max(1, least + spare), scoring=scoring)
    assert halving.rounds <= max(1, least + spare)
    scores: list[Any] = []
    turns: list[Turn] = []
    for _ in range(halving.rounds):
        turns.append(halving.turn(scores, "loss"))
        last = turns[-1]
        scores.append({c: chance.choice([None, chance.random()]) for c in last.left} if last.scoring else 0.5)
    assert sum(turn.scoring for turn in turns) == scoring * len({turn.left for turn in turns})
    for turn in turns:
        assert turn.trial in turn.left
    for before, after in pairwise(turns):
        if len(after.left) < len(before.left):
            assert before.scoring
            assert len(after.left) == -(-len(before.left) // 2)
            stated = scores[turns.index(after) - 1]
            if scoring == 1 and all(stated[c] is not None for c in before.left):
                assert sorted(after.left) == sorted(sorted(before.left, key=lambda c: -stated[c])[: len(after.left)])
    if candidates > 1:
        assert halving.turn(scores, "loss").left == (halving.turn(scores, "loss").trial,)
