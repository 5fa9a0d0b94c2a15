"""Whole runs over a grid in this process: the simulator's twin, and every fault that a reply can have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Error, Message, MetricRecord, RecordDict

import fedspa
from fedspa.agent.ledger.ledger import Ledger
from fedspa.errors import LedgerError
from fedspa.flower.nodes import PollingGrid, RequestLog
from fedspa.flower.server_app import serve
from fedspa.flower.settings import read_config
from fedspa.runs.config import Config
from fedspa.wire.payload import Update, encode

from .local_grid import POLICY, SIMULATION, LocalGrid

CPSGD = {
    "federation.per_round": 4,
    "algorithm.name": "cpsgd",
    "algorithm.compression": 1.0,
    "algorithm.local_steps": 1,
    "privacy.sampling": "fixed",
    "privacy.clip": "coordinate",
    "privacy.noise_multiplier": "",
    "algorithm.options.trials": 9000,
}


def theta(folder: Path) -> torch.Tensor:
    from safetensors.torch import load_file

    return torch.cat([value.reshape(-1) for _, value in sorted(load_file(folder / "model.safetensors").items())])


def reply(question: Message, **values: Any) -> Message:
    return Message(RecordDict({"update": ConfigRecord(values)}), reply_to=question)


COLUMNS = {
    "age": {"kind": "number", "range": [0, 110], "missing": 50},
    "smoker": {"kind": "flag", "missing": "indicator"},
    "clinic": {"kind": "ignore"},
    "score": {"kind": "number", "range": [0, 200], "target": True},
}
TABLE = {
    "data.name": str(Path(__file__).parents[1] / "runs" / "clinics.csv"),
    "data.table.columns": json.dumps(COLUMNS),
    "data.table.agent": "ward",
    "data.table.split": "part",
    "federation.agents": 3,
    "algorithm.compression": 1.0,
    "algorithm.batch": 5,
}


SUMMED = {
    "algorithm.local_steps": 1,
    "algorithm.batch": 360,
    "privacy.adversary": "secure-aggregation",
    "flower.quorum": "",
}
TRIALS = {
    "federation.rounds": 5,
    "algorithm.batch": 10,
    "tuning.candidates": '[{"algorithm.local_lr": 0.5}, {"algorithm.ema": 0.5, "privacy.clip_value": 0.1}]',
}
# Every key of a config is in one of these; each is one representative of an algorithm, a task or a way to tune.
TWINS: dict[str, dict[str, Any]] = {
    "adam, one mask": {
        "algorithm.mask": "shared",
        "algorithm.server": "adam",
        "algorithm.server_options.beta2": 0.9,
        "algorithm.server_options.kappa": 0.01,
        "algorithm.coding": "f32",
        "run.engine": "generic",
        "algorithm.local_optimizer": "adam",
        "algorithm.local_options.beta1": 0.8,
        "algorithm.warmup": 1,
    },
    "coordinate clipping, shards, weights": {
        "privacy.clip": "coordinate",
        "privacy.clip_value": 0.01,
        "data.partition": "shards",
        "run.threads": 1,
        "task.options.label_smoothing": 0.1,
        "task.options.weights": str([1.0, 2.0] * 5),
    },
    "fedavg": {"algorithm.name": "fedavg", "algorithm.compression": 1.0, "data.name": "digits", "model.name": "mlp"},
    "tokens": {
        "task.name": "next-token",
        "task.options.ignore_index": -1,
        "data.name": "small_records:tokens_with_minus_one",
        "model.name": "small_records:Tagger",
        "federation.rounds": 2,
    },
    "table": TABLE | {"task.options.loss": "huber", "task.options.huber": 0.5},
    "sums": {"algorithm.mask": "shared", "privacy.noise_multiplier": "", "privacy.epsilon": 3.0} | SUMMED,
    "recovered sums": {"algorithm.mask": "shared", "privacy.recovery": True, "privacy.members": 3}
    | SUMMED
    | {"federation.per_round": 4},
    "sums of cpsgd": CPSGD
    | {"run.seed": 3, "flower.quorum": ""}
    | {"privacy.adversary": "secure-aggregation", "privacy.members": 3, "privacy.colluders": 1},
    "layers, features, uniform participation": {
        "algorithm.compression": "[0.3, 1]",
        "algorithm.mask": "fixed",
        "algorithm.server": "momentum",
        "algorithm.server_lr": 0.5,
        "algorithm.server_options.beta1": 0.5,
        "algorithm.ema": 0.5,
        "algorithm.schedule": "sqrt",
        "data.partition": "dirichlet:5",
        "data.holdout": 0.1,
        "data.agent_holdout": 0.1,
        "data.features": "orientations",
        "federation.participation": "uniform",
        "federation.cap": 2,
        "privacy.neighbours": "replace-one",
        "privacy.sampling": "fixed",
        "privacy.noise_multiplier": "",
        "privacy.epsilon": 8.0,
    },
    "trials": TRIALS | {"data.holdout": 0.2, "tuning.rounds": 3, "tuning.expected_gains": "[[0.5], [0.0]]"},
    "balanced weights, and trials judged by a metric": TRIALS
    | {"data.holdout": 0.2, "tuning.rounds": 3, "task.options.weights": "balanced", "task.metric": "average_precision"},
    "trials scored by persons": TRIALS
    | {"tuning.scored_by": "agents", "data.name": "small_records:visits"}
    | {"data.person": "patient", "data.person_records": 3},
}


@pytest.mark.parametrize("overrides", TWINS.values(), ids=TWINS)
def test_same_bits_as_the_simulator(simulation, train, tmp_path, overrides):
    simulation.run_config |= overrides
    summary = train(simulation)
    config, _ = read_config(simulation.run_config | {"run.out": str(tmp_path / "twin")})
    twin = fedspa.run(config)
    assert torch.equal(theta(tmp_path / "run"), theta(tmp_path / "twin"))
    assert (tmp_path / "run/metrics.jsonl").read_text() == (tmp_path / "twin/metrics.jsonl").read_text()
    same = twin.summary.keys() - {"seconds"}
    assert {key: summary[key] for key in same} == {key: twin.summary[key] for key in same}
    assert summary["dropped"] == {}
    if "task.options.loss" in overrides:
        assert twin.summary["engine"] == "traced"  # one of the twins takes records together


def test_no_key_of_a_config_is_dropped():
    """Each is in a twin's config above, is refused (test_settings.py), or is named here with who looks after it."""
    elsewhere = {
        "run.device", "run.tf32", "run.checkpoint_every", "run.workers",  # refused
        "run.ledger", "run.policy",  # below, and test_resume.py
        "run.out", "run.chosen",  # the simulator's own RunFolder
        "data.dir", "run.code",  # the simulator's own prepare
    }  # fmt: skip
    twins = {".".join(key.split(".")[:2]) for twin in (SIMULATION, *TWINS.values()) for key in twin}
    keys = {f"{section}.{key}" for section, of in Config.model_fields.items() for key in of.annotation.model_fields}
    assert keys - twins == elsewhere  # algorithm.options by its own keys


def test_a_ledger_that_is_removed_in_a_run_is_not_made_anew(simulation, train, tmp_path):
    """With its anchor, so that only the run knows that there was one."""
    shared = tmp_path / "shared.sqlite"

    def removed(node: int, question: Message, answer):
        if question.metadata.group_id == "1":
            for file in tmp_path.glob("shared.sqlite*"):
                file.unlink()
        return [answer()]

    simulation.fault = removed
    summary = train(simulation, run__ledger=str(shared), federation__per_round=4)
    assert not shared.exists()
    assert summary["epsilon_total"] is None
    assert any("no ε over all runs of these agents in the ledger" in warning for warning in summary["warnings"])


def test_a_deployment_pays_in_every_ledger_and_replies_are_payloads_only(deployment, train, tmp_path):
    summary = train(deployment, flower__round_timeout=17.0)
    assert summary["engine"] == "each agent's own"
    assert {(message.metadata.ttl, message.metadata.message_type) for message in deployment.sent} == {(17.0, "train")}
    replies = [message.content for message in deployment.replies]
    assert len(replies) == 12
    assert all(list(content) == ["update"] and list(content["update"]) == ["payload"] for content in replies)
    assert {content["update"]["payload"][:4] for content in replies} == {b"FSPA"}
    for i in range(4):
        with Ledger.open(tmp_path / f"site-{i}/ledger.sqlite", create=False) as ledger:
            # The public number of records, not the agent's own 360 or 361: it sets the rate for all.
            (event,) = ledger.spent(f"site-{i}")
            assert (event.records, ledger.spent(f"site-{i}")[event]) == (100, 3)
            assert ledger.epsilon(f"site-{i}", 1e-3, "add-remove") == pytest.approx(summary["epsilon"])
    train(deployment, federation__rounds=1, run__out=str(tmp_path / "second"))  # agents draw their own noise
    assert deployment.replies[0].content["update"] != deployment.replies[12].content["update"]


def garbage(question: Message) -> Message:
    return reply(question, payload=bytes(50_000_000))


def not_a_number(question: Message) -> Message:
    honest = _honest_update(question)
    values = honest.values.copy()
    values[3] = np.nan
    # `encode` writes no NaN: spoil the bytes of an f32 payload and mend its checksum.
    data = bytearray(encode(honest, "f32"))
    data[48 + 12 : 48 + 16] = values[3:4].tobytes()
    return reply(question, payload=_sealed(data))


def wrong_k(question: Message) -> Message:
    honest = _honest_update(question)
    fewer = Update(honest.round, honest.dimension, honest.mask_seed, honest.values[:-1])
    return reply(question, payload=encode(fewer, "f32"))


def other_round(question: Message) -> Message:
    honest = _honest_update(question)
    return reply(question, payload=encode(Update(7, honest.dimension, honest.mask_seed, honest.values), "f32"))


def other_mask(question: Message) -> Message:
    honest = _honest_update(question)
    return reply(question, payload=encode(Update(honest.round, honest.dimension, bytes(16), honest.values), "f32"))


def too_large(question: Message) -> Message:
    honest = _honest_update(question)
    huge = Update(honest.round, honest.dimension, honest.mask_seed, honest.values + np.float32(1e6))
    return reply(question, payload=encode(huge, "f32"))


def _honest_update(question: Message) -> Update:
    terms = question.content["terms"]
    return Update(terms["round"], terms["dimension"], terms["mask_seed"], np.zeros(terms["active"], np.float32))


def _sealed(data: bytearray) -> bytes:
    import zlib

    data[44:48] = zlib.crc32(data[48:], zlib.crc32(data[:44])).to_bytes(4, "little")
    return bytes(data)


HOSTILE = {
    "payload-magic": garbage,
    "payload-not-finite": not_a_number,
    "payload-active": wrong_k,
    "payload-round": other_round,
    "payload-seed": other_mask,
    "payload-bound": too_large,
    "error": lambda question: Message(Error(2, "ZeroDivisionError: patient 17"), reply_to=question),
    "malformed": lambda question: Message(RecordDict({"m": MetricRecord({"loss": 0.1})}), reply_to=question),
    "refused-internal": lambda question: reply(question, refusal="internal"),
}


@pytest.fixture(scope="module")
def without_102(tmp_path_factory) -> torch.Tensor:
    """θ of the same run when node 102 never answers."""
    folder = tmp_path_factory.mktemp("absent")
    grid = LocalGrid({100 + i: {"simulation": True} for i in range(4)}, SPOILT | {"run.out": str(folder / "run")})
    grid.fault = lambda node, question, answer: [] if node == 102 else [answer()]
    config, settings = read_config(grid.run_config)
    assert serve(PollingGrid(grid, settings.poll), config, settings)["dropped"] == {"silent": 2}  # it rests in between
    return theta(folder / "run")


SPOILT = SIMULATION | {"algorithm.coding": "f32", "federation.per_round": 4}


@pytest.mark.parametrize(("fault", "forge"), HOSTILE.items())
def test_a_bad_reply_is_dropped_and_counted(simulation, train, tmp_path, without_102, fault, forge):
    """θ is what the three others give: the same as if node 102 had not been there at all."""
    simulation.run_config |= SPOILT
    simulation.fault = lambda node, question, answer: [forge(question) if node == 102 else answer()]
    summary = train(simulation)
    assert summary["dropped"] == {fault: 3}
    assert torch.equal(theta(tmp_path / "run"), without_102)
    assert without_102.isfinite().all()
    lines = [json.loads(line) for line in (tmp_path / "run/replies.jsonl").read_text().splitlines()]
    assert [(line["asked"], line["taken"]) for line in lines] == [(4, 3)] * 3


def test_what_a_client_raises_stays_with_it(deployment, train, tmp_path, caplog):
    (tmp_path / "site-2/records.npz").write_bytes(b"patient 17 is no zip file")
    summary = train(deployment)
    assert summary["dropped"] == {"refused-data": 1}  # and not asked again
    told = [message.content["update"] for message in deployment.replies if "refusal" in message.content["update"]]
    assert [dict(record) for record in told] == [{"refusal": "data"}]
    assert "records.npz" in caplog.text  # the agent's own log says what it was


def test_duplicates_and_strangers(simulation, train, tmp_path):
    def twice(node: int, question: Message, answer: Any) -> list[Message]:
        honest = answer()
        if node != 101:
            return [honest]
        stranger = answer()
        stranger.metadata.__dict__["_src_node_id"] = 999
        return [honest, honest, stranger]

    simulation.fault = twice
    summary = train(simulation)
    asked = sum(message.metadata.dst_node_id == 101 for message in simulation.sent)
    assert summary["dropped"] == {"duplicate-reply": asked, "stranger": asked}
    config, _ = read_config(simulation.run_config | {"run.out": str(tmp_path / "twin")})
    fedspa.run(config)
    assert torch.equal(theta(tmp_path / "run"), theta(tmp_path / "twin"))


def test_a_replay_of_an_older_round_is_dropped(simulation, train):
    kept: list[bytes] = []

    def replay(node: int, question: Message, answer: Any) -> list[Message]:
        if node != 101:
            return [answer()]
        kept.append(answer().content["update"]["payload"])
        return [reply(question, payload=kept[0])]

    simulation.fault = replay
    summary = train(simulation, federation__per_round=4)
    assert summary["dropped"] == {"payload-round": 2}


def test_late_replies_are_fetched_and_counted(simulation, train):
    held: list[Message] = []

    def slow(node: int, question: Message, answer: Any) -> list[Message]:
        if node == 101 and question.metadata.group_id == "0":
            held.append(answer())
            simulation_late(question, held)
            return []
        return [answer()]

    def simulation_late(question: Message, replies: list[Message]) -> None:
        original = simulation.pull_messages

        def pull(ids: Any) -> Any:
            ids = list(ids)
            out = list(original(ids))
            asked_later = any(message.metadata.group_id == "1" for message in simulation.sent)
            if asked_later and question.metadata.message_id in ids and replies:
                out.append(replies.pop())
            return out

        simulation.pull_messages = pull  # type: ignore[method-assign]

    simulation.fault, simulation.notices = slow, False
    summary = train(simulation, federation__per_round=4, flower__round_timeout=0.3)
    assert summary["dropped"] == {"late": 1, "silent": 1}


def test_below_quorum_the_model_stays(simulation, train, tmp_path):
    simulation.fault = lambda node, question, answer: [answer()] if node < 102 else []
    summary = train(simulation, federation__per_round=4, flower__quorum=3)
    assert summary["dropped"] == {"below-quorum": 6, "silent": 6}
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert len({line["accuracy"] for line in lines}) == 1
    assert [line["agents"] for line in lines] == [0, 0, 0]


def test_too_few_online_and_nobody_is_asked(simulation, train):
    """A question that cannot lead to a step would spend the agents' budget for nothing."""

    def leave(node: int, question: Message, answer: Any) -> list[Message]:
        simulation.online = {100}
        return [answer()]

    simulation.fault = leave
    train(simulation, federation__per_round=4, flower__quorum=2, flower__round_timeout=0.2)
    assert {message.metadata.group_id for message in simulation.sent} == {"0"}


def asked_in(grid: LocalGrid, node: int) -> list[int]:
    return [int(message.metadata.group_id) for message in grid.sent if message.metadata.dst_node_id == node]


def test_who_falls_silent_is_asked_more_and_more_rarely(deployment, train):
    """A SuperNode whose executor was killed looks alive and never answers: each question costs the round's time."""
    deployment.fault = lambda node, question, answer: [] if node == 102 else [answer()]
    summary = train(deployment, federation__rounds=9, federation__cap=9)
    assert asked_in(deployment, 102) == [0, 2, 6]
    assert summary["dropped"] == {"silent": 3}
    assert asked_in(deployment, 101) == list(range(9))


def test_the_servers_count_has_every_question_and_no_rest(deployment, train, tmp_path):
    """A silent agent may have paid each time it was asked, and has not paid where it was left out."""

    def trains_and_is_cut_off(node: int, question: Message, answer: Any) -> list[Message]:
        honest = answer()
        return [] if node == 102 else [honest]

    deployment.fault = trains_and_is_cut_off
    train(deployment, federation__rounds=5, federation__cap=5)
    assert RequestLog(tmp_path / "run/asked.jsonl").count(2) == 2
    with Ledger.open(tmp_path / "site-2/ledger.sqlite", create=False) as ledger:
        assert sum(ledger.spent("site-2").values()) == 2


def test_who_refuses_for_budget_is_not_asked_again(deployment, train, tmp_path):
    policy = tmp_path / "site-1/policy.toml"
    policy.write_text(policy.read_text().replace("epsilon = 8.0", "epsilon = 0.1"))
    summary = train(deployment)
    asked = [message.metadata.dst_node_id for message in deployment.sent]
    assert (asked.count(100), asked.count(101)) == (3, 1)
    assert summary["dropped"] == {"refused-budget": 1}
    with Ledger.open(tmp_path / "site-1/ledger.sqlite", create=False) as ledger:
        assert not ledger.spent("site-1")


def test_cpsgd_under_each_agents_own_policy(deployment, train, tmp_path):
    for i in range(4):
        text = POLICY.format(epsilon=8.0).replace("add-remove", "replace-one").replace("l2", "coordinate")
        (tmp_path / f"site-{i}/policy.toml").write_text(text.replace("multiplier = 0.8", "multiplier = 0.001"))
    deployment.run_config |= CPSGD
    summary = train(deployment)
    assert summary["private"]
    assert summary["dropped"] == {}
    with Ledger.open(tmp_path / "site-2/ledger.sqlite", create=False) as ledger:
        ((event, times),) = ledger.spent("site-2").items()
        assert times == 3
        assert ledger.epsilon("site-2", 1e-3, "replace-one") == summary["epsilon"]
    assert '"kind":"binomial"' in event.to_json()


def test_no_agent_is_asked_beyond_the_plan(deployment, train):
    train(deployment, federation__participation="uniform", federation__cap=2, federation__rounds=5)
    asked = [message.metadata.dst_node_id for message in deployment.sent]
    assert max(asked.count(node) for node in set(asked)) == 2


def test_simulated_agents_pay_before_they_train(simulation, train, tmp_path, monkeypatch):
    def fail(*_: Any) -> None:
        raise MemoryError

    monkeypatch.setattr("fedspa.flower.site.respond", fail)
    path = tmp_path / "shared.sqlite"
    summary = train(simulation, run__ledger=str(path), federation__rounds=1, federation__per_round=4)
    assert [count for code, count in summary["dropped"].items() if code.startswith("refused-")] == [4]
    with Ledger.open(path, create=False) as ledger:
        assert [sum(ledger.spent(f"agent-{number}").values()) for number in range(4)] == [1] * 4


def test_someone_elses_update_is_dropped(simulation, train):
    first: dict[str, bytes] = {}

    def copy(node: int, question: Message, answer: Any) -> list[Message]:
        honest = answer()
        mine = honest.content["update"]["payload"]
        return [reply(question, payload=first.setdefault(question.metadata.group_id, mine))]

    simulation.fault = copy
    summary = train(simulation)
    assert summary["dropped"] == {"payload-seed": 6}  # of three agents in three rounds, one a round is honest


def test_a_ledger_that_cannot_be_opened_is_known_before_anyone_trains(simulation, train, tmp_path):
    with pytest.raises(LedgerError, match="does not exist"):
        train(simulation, run__ledger=str(tmp_path / "absent/shared.sqlite"))
    assert not simulation.sent
