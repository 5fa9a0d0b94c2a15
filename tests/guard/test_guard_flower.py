"""A Flower app under the guard: the site pays before it trains, and a server learns codes and nothing else."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from flwr.compat.common.recorddict_compat import fitins_to_recorddict, recorddict_to_fitres
from flwr.supercore.task_identity import TaskIdentity

from fedspa.agent.ledger.report import export
from fedspa.guard import Guard, flower_mod
from fedspa.mechanisms.gaussian.plan import GaussianEvent
from fedspa.privacy.event import shown

EVENT = GaussianEvent("poisson", 20, 200, 10, 2.0)
POLICY = """
epsilon = {epsilon}
delta = 1e-3
neighbours = "add-remove"
min_noise_multiplier = 1.0
max_local_steps = 10
max_rounds = 4
max_compression = 1.0
clippings = ["l2"]
"""


@pytest.fixture(autouse=True)
def _identity() -> None:
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 7, 1


def asked(kind: str = "train", name: str = "message-1", content: RecordDict | None = None, **more: Any) -> Message:
    message = Message(content or RecordDict({"arrays": ArrayRecord([np.zeros(2)])}), 100, kind, **more)
    message.metadata.__dict__["_message_id"] = name
    return message


def at(**node: Any) -> Context:
    return Context(run_id=7, node_id=100, node_config=node, state=RecordDict(), run_config={})


class Site:
    """An app of today's kind that counts how often it trained."""

    def __init__(self, *, fails: bool = False, says: dict[str, Any] | None = None, **given: Any) -> None:
        self.trained = self.evaluated = 0
        self.app = ClientApp(mods=[flower_mod(**({"event": EVENT} | given))])

        @self.app.train()
        def train(message: Message, context: Context) -> Message:
            self.trained += 1
            if fails:
                raise ValueError("record 17 is Ada's")
            metrics = MetricRecord({"num-examples": 200, "loss": 0.25})
            content = RecordDict({"arrays": ArrayRecord([np.ones(2)]), "metrics": metrics, **(says or {})})
            return Message(content, reply_to=message)

        @self.app.evaluate()
        def evaluate(message: Message, context: Context) -> Message:
            self.evaluated += 1
            return Message(RecordDict({"metrics": MetricRecord({"accuracy": 0.9})}), reply_to=message)

        @self.app.query()
        def query(message: Message, context: Context) -> Message:
            return Message(RecordDict({"about": ConfigRecord({"device": "cpu"})}), reply_to=message)


def refusal(reply: Message) -> str:
    assert reply.has_error()
    assert not reply.has_content()
    return str(reply.error.reason).partition("(")[2].partition(")")[0]


def test_the_site_pays_before_its_app_trains(path: Path, guarded: Callable[..., Guard]) -> None:
    site = Site(rounds=3, noise="secure", guard=lambda context: guarded())
    reply = site.app(asked(), at())
    assert site.trained == 1
    (entry,) = export(path)["entries"]
    assert (entry["agent"], entry["run"], entry["message"]) == ("north", "flower:7", "message-1")
    assert entry["event"]["noise"] == "secure"
    assert entry["announced"] == 3
    assert dict(reply.content.metric_records["metrics"]) == {"num-examples": 200}  # a loss is a release too
    assert len(reply.content.array_records["arrays"]) == 1


def test_metrics_that_the_event_covers_are_sent(guarded: Callable[..., Guard]) -> None:
    site = Site(metrics=["loss"], guard=lambda context: guarded())
    assert dict(site.app(asked(), at()).content.metric_records["metrics"]) == {"num-examples": 200, "loss": 0.25}


def test_a_count_or_a_status_is_one_whole_number(guarded: Callable[..., Guard]) -> None:
    """Other shapes could hold the records."""
    says = {
        "fitres.status": ConfigRecord({"code": 0, "message": "Ada", "record": "Ada", "num_examples": 3}),
        "fitres.num_examples": MetricRecord({"num_examples": [17, 4], "num-examples": 0.25}),
        "config": ConfigRecord({"num-examples": "Ada", "num_examples": True, "loss": 0.5}),
    }
    site = Site(says=says, metrics=["loss", "record", "code"], guard=lambda context: guarded())
    sent = site.app(asked(), at()).content
    assert dict(sent.config_records["fitres.status"]) == {"code": 0, "message": ""}
    assert dict(sent.metric_records["fitres.num_examples"]) == {}
    assert dict(sent.config_records["config"]) == {"loss": 0.5}
    for place, odd in (("fitres.status", ConfigRecord({"code": "Ada"})), ("other", ConfigRecord({"code": 0}))):
        site = Site(says={place: odd}, guard=lambda context: guarded())
        kept = dict(site.app(asked(name=place), at()).content.config_records[place])
        assert kept == ({"message": ""} if place == "fitres.status" else {})
    site = Site(says={"fitres.status": MetricRecord({"code": 0, "loss": 0.5})}, guard=lambda context: guarded())
    assert dict(site.app(asked(name="metric"), at()).content.metric_records["fitres.status"]) == {"code": 0}


def test_an_answer_that_cannot_be_looked_through_is_not_sent(guarded: Callable[..., Guard]) -> None:
    class Odd(Message):
        @property
        def content(self) -> RecordDict:
            raise ValueError("record 17 is Ada's")

    mod = flower_mod(EVENT, guard=lambda context: guarded())
    for number, answer in enumerate((Odd(RecordDict(), 100, "train"), None)):
        reply = mod(asked(name=f"message-{number}"), at(), lambda message, context, answer=answer: answer)  # type: ignore[misc]
        assert refusal(reply) == "failed"
        assert "Ada" not in str(reply.error.reason)


def test_a_spent_budget_refuses_before_training(
    path: Path, guarded: Callable[..., Guard], caplog: pytest.LogCaptureFixture
) -> None:
    """Another tool spent it."""
    with guarded().spend(EVENT, announced=5):
        pass
    spent = guarded().total().epsilon
    site = Site(guard=lambda context: guarded(spent * 1.01))
    with caplog.at_level(logging.WARNING, logger="fedspa.guard"):
        reply = site.app(asked(), at())
    assert (site.trained, refusal(reply)) == (0, "budget")
    assert "plan fewer rounds, or more noise" in str(reply.error.reason)
    assert shown(spent) in caplog.text  # for the site
    assert shown(spent) not in str(reply.error.reason)  # and not for the server
    assert len(export(path)["entries"]) == 1


def test_a_message_is_trained_for_once(path: Path, guarded: Callable[..., Guard]) -> None:
    site = Site(guard=lambda context: guarded())
    assert not site.app(asked(), at()).has_error()
    assert refusal(site.app(asked(), at())) == "refused"
    assert not site.app(asked(name="message-2"), at()).has_error()
    assert site.trained == 2
    assert len(export(path)["entries"]) == 2


def test_an_app_that_fails_has_spent_and_tells_nothing(path: Path, guarded: Callable[..., Guard]) -> None:
    site = Site(fails=True, guard=lambda context: guarded())
    reply = site.app(asked(), at())
    assert (site.trained, refusal(reply)) == (1, "failed")
    assert "Ada" not in str(reply.error.reason)
    assert len(export(path)["entries"]) == 1


def test_metrics_on_records_are_releases(path: Path, guarded: Callable[..., Guard]) -> None:
    site = Site(guard=lambda context: guarded())
    for kind in ("evaluate", "query"):
        assert refusal(site.app(asked(kind), at())) == "not-paid"
    assert site.evaluated == 0
    assert export(path)["entries"] == []


def test_what_reads_no_record_is_free(path: Path, guarded: Callable[..., Guard]) -> None:
    site = Site(free=["query"], guard=lambda context: guarded())
    assert not site.app(asked("query"), at()).has_error()
    assert refusal(site.app(asked("evaluate"), at())) == "not-paid"
    assert export(path)["entries"] == []


def test_old_work_is_not_paid_for(path: Path, guarded: Callable[..., Guard]) -> None:
    message = asked(ttl=5.0)
    message.metadata.created_at -= 10
    site = Site(guard=lambda context: guarded())
    assert (refusal(site.app(message, at())), site.trained) == ("stale", 0)
    assert export(path)["entries"] == []


def test_the_event_may_depend_on_the_message(path: Path, guarded: Callable[..., Guard]) -> None:
    def event(message: Message, context: Context) -> GaussianEvent:
        return GaussianEvent("poisson", 20, 200, int(message.content.config_records["config"]["steps"]), 2.0)  # type: ignore[arg-type]

    content = RecordDict({"config": ConfigRecord({"steps": 5})})
    site = Site(event=event, guard=lambda context: guarded())
    assert not site.app(asked(content=content), at()).has_error()
    assert export(path)["entries"][0]["event"]["steps"] == 5


def test_the_limits_are_in_the_sites_own_words(path: Path, tmp_path: Path) -> None:
    policy = tmp_path / "policy.toml"
    policy.write_text(POLICY.format(epsilon=3.0))
    node = {"agent": "north", "ledger": str(path), "policy": str(policy)}
    site = Site()
    assert not site.app(asked(), at(**node)).has_error()
    assert len(export(path)["entries"]) == 1
    lax = Site(event=GaussianEvent("poisson", 20, 200, 10, 0.5))
    assert (refusal(lax.app(asked(name="message-2"), at(**node))), lax.trained) == ("policy", 0)
    policy.write_text(POLICY.format(epsilon=0.5))
    assert refusal(site.app(asked(name="message-3"), at(**node))) == "budget"
    for key in node:  # a site that does not say is not guarded, and does not train
        less = {name: value for name, value in node.items() if name != key}
        assert refusal(site.app(asked(name=f"without {key}"), at(**less))) == "refused"
    assert site.trained == 1


def test_a_stock_numpy_client(path: Path, guarded: Callable[..., Guard]) -> None:
    from flwr.common import FitIns, ndarrays_to_parameters

    class Client(NumPyClient):
        def fit(self, parameters: Any, config: Any) -> tuple[list[Any], int, dict[str, Any]]:
            return [parameters[0] + 1], 200, {"loss": 0.25}

        def evaluate(self, parameters: Any, config: Any) -> tuple[float, int, dict[str, Any]]:
            raise AssertionError("evaluated")

    mod = flower_mod(EVENT, guard=lambda context: guarded())
    app = ClientApp(client_fn=lambda context: Client().to_client(), mods=[mod])
    content = fitins_to_recorddict(FitIns(ndarrays_to_parameters([np.zeros(2)]), {}), keep_input=True)
    reply = app(asked(content=content), at())
    answer = recorddict_to_fitres(reply.content, keep_input=True)
    assert (answer.num_examples, answer.metrics, answer.status.message) == (200, {}, "")
    for kind in ("evaluate", "get_parameters", "get_properties"):
        assert refusal(app(asked(kind), at())) == "not-paid"
    assert len(export(path)["entries"]) == 1


def test_an_evaluation_can_be_paid_for(path: Path, guarded: Callable[..., Guard]) -> None:
    count = GaussianEvent("poisson", 1, 1, 1, 20.0)
    site = Site(evaluate=count, guard=lambda context: guarded())
    reply = site.app(asked("evaluate"), at())
    assert dict(reply.content.metric_records["metrics"]) == {"accuracy": 0.9}
    assert [entry["event"]["noise_multiplier"] for entry in export(path)["entries"]] == [20.0]
