"""Trials within a run: no round of theirs escapes the ledger, whatever happens, and search and training together cost
what was asked."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from interruptions import crash, refuse_a_difference
from small_runs import ALGORITHMS, small
from torch import Tensor

import fedspa
from fedspa.agent.ledger.ledger import Ledger
from fedspa.agent.ledger.report import export
from fedspa.errors import ConfigError
from fedspa.privacy.accounting import epsilon as priced
from fedspa.runs.halving import SEARCHED, Halving, Turn
from fedspa.runs.rundir import Stopped, ledger_of
from fedspa.server.coordinator import Diverged
from fedspa.server.optimizers import ServerOptimizer, ServerState

CANDIDATES = [
    {"algorithm.server": "average", "algorithm.local_lr": 1.0},
    {"algorithm.server": "average", "algorithm.local_lr": 3.0, "algorithm.ema": 0.5},
    {"algorithm.server": "momentum", "algorithm.server_lr": 0.3, "privacy.clip_value": 0.1},
    {"algorithm.compression": 0.4},
]
EPSILON = 3.0


def searching(out: Path, **sections: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """A small run of 9 rounds, 6 of them for trials."""
    wanted = {
        "federation": {"rounds": 9},
        "data": {"holdout": 0.2},
        "privacy": {"noise_multiplier": None, "epsilon": EPSILON},
        "tuning": {"candidates": CANDIDATES, "rounds": 6},
    }
    merged = {name: {**wanted.get(name, {}), **sections.get(name, {})} for name in {*wanted, *sections}}
    return small(out, **merged)


def recomputed(folder: Path, agents: int = 6) -> float:
    """ε of the agent that spent most, from the ledger alone."""
    with Ledger.open(ledger_of(folder, fedspa.load(folder / "config.toml")), create=False) as ledger:
        return max(ledger.epsilon(f"agent-{number}", 1e-3, "add-remove") for number in range(agents))


def entries(folder: Path) -> list[dict[str, Any]]:
    return export(folder / "ledger.sqlite")["entries"]


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


def check_guarantee(result: fedspa.RunResult, plain: dict[str, dict[str, Any]]) -> None:
    """Each round, of trials and of scores too, is a participation in the one event of the run, and an ordinary run of
    as many rounds has the very same guarantee."""
    found = Counter(entry["message"] for entry in entries(result.folder))
    assert found == {f"round-{t}": 3 for t in range(result.summary["rounds"])}
    assert len({str(entry["event"]) for entry in entries(result.folder)}) == 1
    assert all(entry["digest"] for entry in entries(result.folder))
    other = fedspa.run(plain).summary
    for key in ("epsilon", "noise_multiplier", "participations_max", "accountant"):
        assert result.summary[key] == other[key]
    assert recomputed(result.folder) == pytest.approx(result.summary["epsilon"])
    assert recomputed(result.folder) <= EPSILON


def test_every_round_of_every_trial_is_in_the_ledger_and_the_total_is_what_was_asked(tmp_path: Path) -> None:
    result = fedspa.run(searching(tmp_path / "run"))
    tuning, summary = result.summary["tuning"], result.summary
    tried = sorted(t for trial in tuning["trials"] for t in trial["rounds"])
    assert tried == list(range(6))
    assert summary["participations_max"] == 5  # 27 turns of 6 agents
    check_guarantee(result, searching(tmp_path / "plain", tuning={"candidates": None, "rounds": None}))


def test_a_round_of_scores_is_a_round_like_any_other(tmp_path: Path) -> None:
    result = fedspa.run(asking(tmp_path / "run"))
    tuning = result.summary["tuning"]
    assert (tuning["scored_by"], tuning["rounds"]) == ("agents", ROUNDS)
    assert tuning["scoring"]["rounds"] == [4, 7]
    assert sorted(t for trial in tuning["trials"] for t in trial["rounds"]) == [0, 1, 2, 3, 5, 6]
    lines = metrics(tmp_path / "run")
    assert [t for t, line in enumerate(lines) if line["trials"] is not None] == [4, 7]
    assert list(lines[4]["trials"]) == ["0", "1", "2", "3"]
    assert len(lines[7]["trials"]) == 2
    best = max(lines[7]["trials"], key=lines[7]["trials"].get)
    assert tuning["choice"] == int(best)
    check_guarantee(result, asking(tmp_path / "plain", tuning={"candidates": None, "rounds": None}))


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


@pytest.mark.slow
@pytest.mark.parametrize(("make", "seed"), [(searching, 0), (asking, 100)])
def test_killed_anywhere_in_the_search_it_ends_as_if_never_killed(
    tmp_path: Path, make: Callable[[Path], dict[str, Any]], seed: int
) -> None:
    """By kill -9: no trial and no score is lost, made twice or missing in the ledger."""
    refuse_a_difference(make, tmp_path, random.Random(seed))


@pytest.mark.parametrize(("make", "t"), [(searching, 3), (searching, 6), (asking, 4)])
def test_a_trial_that_crashes_stays_paid_and_drawn_anew_is_paid_again(
    tmp_path: Path, make: Callable[..., dict[str, Any]], t: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With noise that must not repeat: the round's updates or scores were seen, so both attempts count, and still fit
    in ε."""
    config = make(tmp_path / "run", privacy={"noise_multiplier": None, "epsilon": EPSILON, "noise": "secure"})
    crash(config, t, monkeypatch)
    assert {entry["message"] for entry in entries(tmp_path / "run")} == {f"round-{r}" for r in range(t + 1)}
    result = fedspa.run(config, resume=tmp_path / "run")
    messages = Counter(entry["message"] for entry in entries(tmp_path / "run"))
    assert messages[f"round-{t}"] == 3
    assert messages[f"round-{t}-attempt-2"] >= 1
    by_agent = Counter(entry["agent"] for entry in entries(tmp_path / "run"))
    assert max(by_agent.values()) <= 5
    assert recomputed(tmp_path / "run") <= EPSILON
    assert result.summary["epsilon"] <= EPSILON


def test_another_grid_is_another_run_and_is_not_resumed(tmp_path: Path) -> None:
    """Whose turn a round is follows from the candidates: with others, scores of some would choose among them."""
    stops = iter([False, True])
    with pytest.raises(Stopped):
        fedspa.run(searching(tmp_path / "run"), stop=lambda: next(stops))
    before = len(entries(tmp_path / "run"))
    for tuning in ({"candidates": [*CANDIDATES[1:], CANDIDATES[0]]}, {"candidates": CANDIDATES[:2]}, {"rounds": 8}):
        other = searching(tmp_path / "run", tuning=tuning)
        with pytest.raises(fedspa.FedspaError, match=r"belongs to another run: tuning\.(candidates|rounds) was"):
            fedspa.run(other, resume=tmp_path / "run")
    assert len(entries(tmp_path / "run")) == before


def test_a_trial_that_diverges_does_not_end_the_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    apply = ServerOptimizer.apply

    def wild(self: ServerOptimizer, state: ServerState, mean: Tensor) -> ServerState:
        return apply(self, state, mean * math.inf if self.server_lr == 7.0 else mean)

    monkeypatch.setattr(ServerOptimizer, "apply", wild)
    tuning: dict[str, Any] = {"candidates": [{"algorithm.server_lr": 7.0}, CANDIDATES[0]], "rounds": 2}
    result = fedspa.run(searching(tmp_path / "run", tuning=tuning))
    assert result.summary["tuning"]["choice"] == 1
    assert len(entries(tmp_path / "run")) == 27  # its round is paid for like any other
    with pytest.raises(Diverged):  # a final training that diverges ends, as any run
        fedspa.run(searching(tmp_path / "alone", tuning={"candidates": tuning["candidates"][:1], "rounds": None}))


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tuning": {"candidates": [{"algorithm.batch": 5}]}}, "algorithm.batch cannot be tried"),
    ({"tuning": {"candidates": [{"privacy.epsilon": 9.0}]}}, "privacy.epsilon cannot be tried"),
    ({"tuning": {"candidates": [{"algorithm.ema": 2.0}]}}, "algorithm.ema is 2.0"),
    ({"tuning": {"rounds": 5}}, "at least 6 rounds"),
    ({"tuning": {"rounds": 12}}, "leave none to train"),
    ({"tuning": {"candidates": None}}, "there are none"),
    ({"data": {"holdout": 0.0}, "tuning": {"scored_by": "server"}}, "data.holdout is 0"),
    ({"algorithm": {"schedule": "sqrt"}}, "algorithm.schedule is 'sqrt'"),
    (
        {"algorithm": {"name": "fedavg", "compression": 1.0}, "privacy": {"noise_multiplier": None}},
        "spends no budget",
    ),
]
BY_AGENTS: list[tuple[dict[str, Any], str]] = [
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
]


@pytest.mark.parametrize(
    ("make", "sections", "word"),
    [*((searching, *each) for each in REFUSED), *((asking, *each) for each in BY_AGENTS)],
)
def test_what_is_refused_is_refused_before_anything_is_written(
    tmp_path: Path, make: Callable[..., dict[str, Any]], sections: dict[str, Any], word: str
) -> None:
    with pytest.raises(ConfigError, match=word.replace("(", r"\(")) as refused:
        fedspa.run(make(tmp_path / "run", **sections))
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "run").exists()


def test_what_may_be_tried_leaves_every_event_as_it_is(tmp_path: Path) -> None:
    """The list is held to the plans themselves: a key that moved the event would be refused as a candidate."""
    values: dict[str, Any] = {"algorithm.server": "momentum", "algorithm.mask": "shared", "algorithm.compression": 0.5}
    for key in SEARCHED:
        tuning = {"candidates": [{key: values.get(key, 0.25)}], "rounds": None}
        fedspa.run(searching(tmp_path / key, federation={"rounds": 1}, tuning=tuning))


@given(
    st.integers(1, 9),
    st.integers(0, 40),
    st.lists(st.one_of(st.floats(0, 1), st.just(math.nan)), min_size=40, max_size=40),
)
def test_halving_gives_each_rung_its_rounds_and_ends_with_one(candidates: int, spare: int, scores: list[float]) -> None:
    halving = Halving.within(candidates, max(1, Halving(candidates, 1).rounds + spare))
    order = [halving.turn(scores[:t], "accuracy").trial for t in range(min(40, halving.rounds + 1))]
    assert halving.rounds <= max(1, Halving(candidates, 1).rounds + spare)
    first = order[: min(candidates * halving.each, halving.rounds, 40)]
    assert first == [number for number in range(candidates) for _ in range(halving.each)][: len(first)]
    if halving.rounds < 40:
        winner = order[halving.rounds]
        assert all(halving.turn(scores[: halving.rounds + more], "accuracy").trial == winner for more in range(3))


def test_halving_drops_the_worse_half_and_what_has_no_score() -> None:
    halving = Halving(4, 1)
    assert halving.rounds == 6
    assert halving.turn([0.1, 0.9, math.nan, 0.5], "accuracy").trial == 1
    assert halving.turn([0.1, 0.9, math.nan, 0.5, 0.6], "accuracy").trial == 3
    assert halving.turn([0.1, 0.9, math.nan, 0.5, 0.6, 0.7], "accuracy").trial == 3
    assert halving.turn([0.1, 0.9, math.nan, 0.5, 0.6, 0.6], "accuracy").trial == 1  # a tie is the earlier one's
    assert halving.turn([0.1, 0.9, math.nan, 0.5, 0.6, 0.7], "loss").trial == 0  # 0 and 3 were left


def test_what_a_proxy_run_saw_a_slow_starter_gain_counts_for_it() -> None:
    scores = [0.5, 0.4]
    assert Halving(2, 1).turn(scores, "accuracy").trial == 0
    assert Halving(2, 1, ((0.1,), (0.3,))).turn(scores, "accuracy").trial == 1


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


def test_a_second_search_on_the_same_records_adds_up_in_their_ledger(tmp_path: Path) -> None:
    """And no cache or folder makes it free: the whole cost is above what either run states for itself."""
    shared = {"ledger": str(tmp_path / "ledger.sqlite")}
    first, second = (fedspa.run(searching(tmp_path / name, run=shared)).summary for name in ("first", "second"))
    assert first["epsilon_total"] == pytest.approx(first["epsilon"])
    assert second["epsilon"] == first["epsilon"]
    both = Counter(entry["agent"] for entry in export(tmp_path / "ledger.sqlite")["entries"])
    assert max(both.values()) == 2 * first["participations_max"]
    # Twice the participations, chosen after releases: never less than as many that were fixed beforehand, by PLD.
    with Ledger.open(tmp_path / "ledger.sqlite", create=False) as ledger:
        busiest = max(both, key=lambda agent: both[agent])
        events = ledger.spent(busiest)
    assert second["epsilon_total"] > priced(events, first["delta"], neighbours="add-remove") > 1.2 * first["epsilon"]


def test_each_line_of_the_metrics_has_the_clip_of_its_trial(tmp_path: Path) -> None:
    candidates = [{"privacy.clip_value": 0.25}, {"privacy.clip_value": 4.0}]
    result = fedspa.run(searching(tmp_path / "run", tuning={"candidates": candidates, "rounds": 4}))
    clips = [metrics.clip_value for metrics in result.metrics]
    assert set(clips) == {0.25, 4.0}
    assert len(set(clips[4:])) == 1
