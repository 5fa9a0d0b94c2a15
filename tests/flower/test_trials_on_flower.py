"""A search on Flower: trials and scores are rounds, which agents judge, pay for and answer like all others."""

from __future__ import annotations

import pytest

pytest.importorskip("flwr", reason="needs the extra: pip install 'fedspa[flower]'")

from collections import Counter

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord

from fedspa.agent.ledger.ledger import Ledger
from fedspa.agent.ledger.report import export
from fedspa.errors import ConfigError, FedspaError
from fedspa.flower.terms import TermsError, from_record

from .test_resume import Killed, die_in_round, honest
from .test_strategy import SUMMED, TRIALS

CHOSEN = {key.replace(".", "__"): value for key, value in TRIALS.items()} | {"algorithm__batch": 20}
SCORED = 2  # the round in which two trials of a round each are scored


def entries(tmp_path, site: int) -> list:
    return export(tmp_path / f"site-{site}/ledger.sqlite")["entries"]


def test_agents_of_their_own_score_within_their_own_limits(deployment, train, tmp_path):
    """Their policies allow half of the coordinates and l2 clipping: they judge the run, and a score is none of both."""
    summary = train(deployment, **CHOSEN)
    assert summary["dropped"] == {}
    tuning = summary["tuning"]
    assert (tuning["scored_by"], tuning["scoring"]["rounds"]) == ("agents", [SCORED])
    assert all(len(trial["scores"]) == 1 and trial["scores"][0] is not None for trial in tuning["trials"])
    for site in range(4):
        found = Counter(entry["message"] for entry in entries(tmp_path, site))
        assert found == {f"round-{t}": 1 for t in range(5)}
        assert len({str(entry["event"]) for entry in entries(tmp_path, site)}) == 1
        with Ledger.open(tmp_path / f"site-{site}/ledger.sqlite", create=False) as ledger:
            assert ledger.epsilon(f"site-{site}", 1e-3, "add-remove") == pytest.approx(summary["epsilon"])
    for message in deployment.replies:  # an answer is a payload, of scores too
        assert list(message.content) == ["update"]
        assert list(message.content["update"]) == ["payload"]


@pytest.mark.parametrize("t", [1, SCORED])
def test_a_server_killed_in_the_search_goes_on_and_nobody_pays_twice(deployment, train, tmp_path, t):
    die_in_round(deployment, t, 2)
    with pytest.raises(Killed):
        train(deployment, **CHOSEN)
    answered = [reply.content["update"]["payload"] for reply in deployment.replies]
    deployment.fault = honest
    summary = train(deployment, flower__resume=True)
    assert summary["dropped"] == {}
    assert summary["tuning"]["scoring"]["rounds"] == [SCORED]
    for site in range(4):
        assert Counter(entry["message"] for entry in entries(tmp_path, site)) == {f"round-{r}": 1 for r in range(5)}
    again = [reply.content["update"]["payload"] for reply in deployment.replies[len(answered) :]]
    assert len(again) == 4 * (5 - t)


def test_without_scores_the_first_candidate_goes_on(deployment, train):
    """Below the quorum nothing that came in counts: then what was expected of the candidates decides."""

    def silent(node, question, answer):
        return [] if question.metadata.group_id == str(SCORED) and node != 100 else [answer()]

    deployment.fault = silent
    tuning = train(deployment, **CHOSEN, flower__quorum=2)["tuning"]
    assert tuning["choice"] == 0
    assert [trial["scores"] for trial in tuning["trials"]] == [[None], [None]]


def test_what_is_no_question_for_scores_is_refused_and_costs_nothing(deployment, train, tmp_path):
    train(deployment, **CHOSEN)
    question = next(m for m in deployment.sent if m.metadata.group_id == str(SCORED))
    record, models = question.content["terms"], question.content["theta"]["theta"].numpy()
    assert from_record(record).scored == len(models) == 2
    spent = len(entries(tmp_path, 0))
    for scored, array in (
        (2, models[:1]),
        (1, models),
        (0, models),
        (2, models.astype(np.float64)),
        (2, np.full_like(models, np.nan)),
        (2, models[:, :-1]),
    ):
        question.content["terms"] = ConfigRecord({**record, "scored": scored, "round": 4})
        question.content["theta"] = ArrayRecord({"theta": Array(array)})
        assert dict(deployment.answer(question).content["update"]) == {"refusal": "terms"}
    assert len(entries(tmp_path, 0)) == spent
    for scored in (-1, 65, 1.0, True):
        with pytest.raises(TermsError, match="scored"):
            from_record(ConfigRecord({**record, "scored": scored}))


def test_no_scores_are_asked_for_where_only_sums_are_seen(simulation, train):
    sums = {key.replace(".", "__"): value for key, value in SUMMED.items()}
    with pytest.raises(ConfigError, match="agents cannot score"):
        train(simulation, **CHOSEN | sums, algorithm__mask="shared")
    assert not simulation.sent


def test_what_a_trial_spends_stops_an_agent_whose_budget_ends(deployment, train, tmp_path):
    """The whole plan is announced with the first round: an agent without the budget for both refuses both."""
    for site in range(4):
        policy = tmp_path / f"site-{site}/policy.toml"
        policy.write_text(policy.read_text().replace("epsilon = 8.0", "epsilon = 0.5"))
    with pytest.raises(FedspaError, match=r"4 of 4 agents refuse this run \(budget\)"):
        train(deployment, **CHOSEN)
    assert not any(entries(tmp_path, site) for site in range(4))
