"""A server that dies and goes on: nothing is trained twice, no spend is lost or counted twice."""

from __future__ import annotations

import json
import shutil
from collections import Counter

import pytest
import torch
from flwr.app import Message

import fedspa
from fedspa.agent.ledger.ledger import Ledger
from fedspa.errors import FedspaError
from fedspa.flower.nodes import NodeRegistry, RequestLog
from fedspa.flower.settings import read_config
from fedspa.runs.rundir import RunFolder, Stopped

from .test_strategy import theta


class Killed(BaseException):
    pass


def die_in_round(grid, t: int, after: int) -> None:
    """The server dies in round t, when `after` agents have answered it."""
    answered: list[int] = []

    def fault(node: int, question: Message, answer):
        if question.metadata.group_id == str(t) and len(answered) == after:
            raise Killed
        reply = answer()
        if question.metadata.group_id == str(t):
            answered.append(node)
        return [reply]

    grid.fault = fault


def honest(node, question, answer):
    return [answer()]


def test_killed_and_resumed_ends_in_the_same_bits(simulation, train, tmp_path):
    die_in_round(simulation, 1, 2)
    with pytest.raises(Killed):
        train(simulation)
    simulation.fault = honest
    resumed = train(simulation, flower__resume=True)
    whole = train(simulation, flower__resume=False, run__out=str(tmp_path / "whole"))
    assert torch.equal(theta(tmp_path / "run"), theta(tmp_path / "whole"))
    assert (tmp_path / "run/metrics.jsonl").read_bytes() == (tmp_path / "whole/metrics.jsonl").read_bytes()
    assert resumed["epsilon"] == whole["epsilon"]
    assert resumed["rounds"] == 3


def test_a_simulation_that_draws_other_noise_for_a_round_counts_it_twice(simulation, train, tmp_path):
    """Its nodes keep nothing: two had sent an update, and send another one. Nobody sends more than is priced."""
    simulation.run_config |= {"privacy.noise": "secure", "federation.per_round": 4}
    die_in_round(simulation, 1, 2)
    killed, answers = simulation.fault, Counter[int]()

    def counted(node: int, question: Message, answer):
        replies = killed(node, question, answer)
        answers[node] += 1
        return replies

    simulation.fault = counted
    with pytest.raises(Killed):
        train(simulation)
    assert sorted(answers.values()) == [1, 1, 2, 2]
    killed = honest
    resumed = train(simulation, flower__resume=True)
    assert resumed["participations_max"] == max(answers.values()) == 3
    asked = RequestLog(tmp_path / "run/asked.jsonl")
    assert [asked.count(number) for number in range(4)] == [3] * 4
    assert resumed["rounds_empty"] == 1  # no turn was left


def test_rounds_that_are_done_again_from_an_older_checkpoint_are_counted_twice(simulation, train, tmp_path):
    """The newest checkpoint is damaged: rounds that were over are repeated, with other noise."""
    simulation.run_config |= {"privacy.noise": "secure", "federation.rounds": 4, "federation.per_round": 4}
    answers, stopped = Counter[int](), [True]

    def counted(node: int, question: Message, answer):
        if stopped[0] and question.metadata.group_id == "2":
            raise Killed
        answers[node] += 1
        return [answer()]

    simulation.fault = counted
    with pytest.raises(Killed):
        train(simulation)
    assert set(answers.values()) == {2}
    for path in sorted((tmp_path / "run/checkpoint").glob("round-*"))[-1:]:
        path.write_bytes(b"")
    stopped[0] = False
    resumed = train(simulation, flower__resume=True, federation__rounds=4)
    asked = RequestLog(tmp_path / "run/asked.jsonl")
    assert all(times <= asked.count(node - 100) for node, times in answers.items())
    assert resumed["participations_max"] >= max(answers.values()) > 2


def test_agents_pay_once_for_the_round_that_was_asked_twice(deployment, train, tmp_path):
    die_in_round(deployment, 1, 2)
    with pytest.raises(Killed):
        train(deployment)
    deployment.fault = honest
    summary = train(deployment, flower__resume=True)
    assert summary["dropped"] == {}
    assert summary["participations_max"] == 3
    for i in range(4):
        with Ledger.open(tmp_path / f"site-{i}/ledger.sqlite", create=False) as ledger:
            assert sum(ledger.spent(f"site-{i}").values()) == 3


def test_a_run_of_the_simulator_does_not_go_on_here(simulation, train):
    """Its rounds are counted in its ledger, of which the server on Flower knows nothing: ε would leave them out."""
    config, _ = read_config(simulation.run_config)
    with pytest.raises(Stopped):
        fedspa.run(config, stop=lambda: True)
    with pytest.raises(FedspaError, match="fedspa run --resume") as caught:
        train(simulation, flower__resume=True)
    assert "\n" not in str(caught.value)
    assert not simulation.sent


def test_a_run_that_is_over_needs_nobody_to_say_so(simulation, train, monkeypatch):
    """Killed before its summary was written, when all sites have left."""

    def killed(folder, summary):
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(RunFolder, "finish", killed)
        with pytest.raises(Killed):
            train(simulation)
    simulation.online.clear()
    asked = len(simulation.sent)
    assert train(simulation, flower__resume=True)["rounds"] == 3
    assert len(simulation.sent) == asked


@pytest.mark.parametrize("damage", ["gone", "old"])
def test_a_server_that_lost_its_count_does_not_state_a_smaller_one(deployment, train, tmp_path, damage):
    die_in_round(deployment, 2, 1)
    with pytest.raises(Killed):
        train(deployment)
    deployment.fault = honest
    file = tmp_path / "run/asked.jsonl"
    if damage == "gone":
        file.unlink()
    else:
        file.write_text(file.read_text().splitlines(keepends=True)[0])
    with pytest.raises(FedspaError, match="the checkpoint in 2"):
        train(deployment, flower__resume=True)


@pytest.mark.parametrize("line", [b"garbage", b"[]", b'{"round": 0}', b'{"round": "0", "agents": []}', b"\xff\x00"])
def test_a_damaged_count_is_one_line(tmp_path, line):
    file = tmp_path / "asked.jsonl"
    file.write_bytes(b'{"round": 0, "agents": [1]}\n' + line + b"\n")
    with pytest.raises(FedspaError, match="line 2: not a line that this server wrote") as caught:
        RequestLog(file)
    assert "\n" not in str(caught.value)


def test_new_nodes_get_no_old_numbers():
    roster = NodeRegistry(3)
    assert roster.meet([30, 10]) == 2
    assert roster.reachable(range(3)) == {10: 0, 30: 1}
    assert roster.meet([30, 20, 40]) == 2  # 20 takes the last free number, 40 none
    assert roster.reachable(range(3)) == {30: 1, 20: 2}
    roster.refused[2] = "budget"
    again = NodeRegistry(3)
    again.restore(json.loads(json.dumps(roster.to_json())))
    again.meet([2**63, 10, 20])
    assert again.reachable(range(3)) == {10: 0}


def test_asked_counts_each_attempt_at_a_round(tmp_path):
    asked = RequestLog(tmp_path / "asked.jsonl")
    assert asked.last(0) is None
    asked.add(0, [1, 2, 3])
    assert asked.add(0, [1, 3], 2) == [1, 3]
    again = RequestLog(tmp_path / "asked.jsonl")
    assert again.last(0) == (2, [1, 3])
    assert again.last(1) is None
    assert [again.count(number) for number in range(4)] == [0, 2, 1, 2]
    assert again.was(0, 3, 2)
    assert not again.was(0, 2, 2)
    assert again.add(0, [3, 1], 2) == []
    again.add(1, [2])
    assert again.last(0) == (2, [3, 1])


def test_a_run_that_asked_and_lost_its_checkpoints_does_not_start_over(deployment, train, tmp_path):
    """Under a new name its agents would pay for the same rounds again, and the server would count them once."""
    die_in_round(deployment, 0, 0)
    with pytest.raises(Killed):
        train(deployment)
    deployment.fault = honest
    [asked] = tmp_path.rglob("asked.jsonl")
    shutil.rmtree(asked.parent / "checkpoint")
    with pytest.raises(FedspaError, match="holds no checkpoint"):
        train(deployment, flower__resume=True)


def test_updates_of_before_the_crash_must_be_in_the_ledger_too(simulation, train, tmp_path):
    """Two rounds were written elsewhere, the third into run.ledger: a total of that file would leave them out."""
    for node in simulation.nodes.values():
        node["ledger"] = str(tmp_path / "other.sqlite")
    die_in_round(simulation, 2, 0)
    with pytest.raises(Killed):
        train(simulation, run__ledger=str(tmp_path / "shared.sqlite"), federation__per_round=4)
    simulation.fault = honest
    for node in simulation.nodes.values():
        del node["ledger"]
    summary = train(simulation, flower__resume=True)
    assert summary["epsilon_total"] is None
    assert any("holds 1 entries of this run by agent-0, which sent 3" in warning for warning in summary["warnings"])


def test_who_answered_before_the_crash_and_left_is_still_counted(deployment, train, tmp_path):
    die_in_round(deployment, 0, 2)
    with pytest.raises(Killed):
        train(deployment)
    deployment.fault = honest
    deployment.online.remove(100)
    summary = train(deployment, flower__resume=True)
    asked = RequestLog(tmp_path / "run/asked.jsonl")
    assert [asked.count(number) for number in range(4)] == [1, 3, 3, 3]
    assert summary["agents"] == 4
