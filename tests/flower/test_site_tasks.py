"""Sites that learn something else than classes, from other things than one tensor per record: whole federations."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import fedspa
from fedspa.agent.ledger.ledger import Ledger
from fedspa.errors import ConfigError
from fedspa.examples import Examples, blank
from fedspa.flower import trainer
from fedspa.flower.settings import read_config
from fedspa.flower.site import read_site
from fedspa.flower.trainer import SiteExamples
from fedspa.learning.tasks import Classification

from .local_grid import DEPLOYMENT, POLICY, LocalGrid

SITES = 3
STORIES = """
import numpy as np
import torch
from torch import nn
from fedspa.data.adapters import from_arrays


def drawn(node):
    return np.random.default_rng(int(node["agent"][-1]))


def numbers(node):
    x = drawn(node).normal(size=(60, 4))
    return x, x @ [1.0, -1.0, 0.5, 0.0]


def numbers_with_a_bad_one(node):
    x, y = numbers(node)
    y[7] = np.nan
    return x, y


def labels(node):
    x = drawn(node).normal(size=(60, 4))
    return x, np.stack([x[:, 0] > 0, x[:, 1] > 0], axis=1).astype(int)


def labels_with_a_bad_one(node):
    x, y = labels(node)
    y[7, 1] = 2
    return x, y


def visits(node):
    x, y = numbers(node)
    return x, y, [f"patient {i // 6}" for i in range(60)]


def visits_of_labels(node):
    x = drawn(node).normal(size=(60, 4))
    return x, (x[:, 0] > 0).astype(int), np.arange(60) // 6


def texts(node):
    tokens = drawn(node).integers(0, 20, (60, 6))
    return {"input_ids": tokens, "attention_mask": np.ones((60, 6), dtype=bool), "labels": tokens[:, 0] % 3}


def texts_with_a_bad_one(node):
    made = texts(node)
    made["input_ids"][7, 2] = 20  # a word that the model does not know
    return made


def server(story, **more):
    def load():
        found = story({"agent": "site-9"})
        if isinstance(found, dict):
            y = found.pop("labels")
            return from_arrays(found, y, found, y, name="held-out")
        return from_arrays(found[0], found[1], found[0], found[1], name="held-out")
    return load


held_numbers, held_labels, held_texts, held_visits = map(server, (numbers, labels, texts, visits_of_labels))


class Text(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.out = nn.Embedding(20, 4), nn.Linear(4, 3)

    def forward(self, input_ids, attention_mask):
        return self.out((self.words(input_ids) * attention_mask.unsqueeze(-1)).mean(dim=1))


def own_loss(module, example):
    x, y = example
    return (module(x).squeeze(1) - y).abs().mean()


def line():
    return nn.Linear(4, 1)
"""


@pytest.fixture
def federation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., LocalGrid]:
    """Sites whose node-configs have the given keys beside the usual ones, and a server with the given run config."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "stories", raising=False)
    (tmp_path / "stories.py").write_text(STORIES)

    def make(run: dict[str, Any], policy: str = "", **node: Any) -> LocalGrid:
        nodes = {}
        for i in range(SITES):
            home = tmp_path / f"site-{i}"
            home.mkdir(exist_ok=True)
            (home / "policy.toml").write_text(POLICY.format(epsilon=8.0) + policy)
            Ledger.open(home / "ledger.sqlite").close()
            names = {"policy": str(home / "policy.toml"), "ledger": str(home / "ledger.sqlite")}
            own = {key: value.format(home=home) if isinstance(value, str) else value for key, value in node.items()}
            nodes[100 + i] = {"agent": f"site-{i}", **names, **own}
        usual = {
            "federation.agents": SITES,
            "federation.per_round": SITES,
            "federation.rounds": 2,
            "algorithm.batch": 5,
            "flower.records": 10,
            "run.out": str(tmp_path / "run"),
        }
        return LocalGrid(nodes, DEPLOYMENT | usual | run)

    return make


def events(grid: LocalGrid) -> list[Any]:
    found = []
    for node in grid.nodes.values():
        with Ledger.open(Path(str(node["ledger"])), create=False) as ledger:
            found += ledger.spent(str(node["agent"])).elements()
    return found


@pytest.mark.parametrize(
    ("story", "score", "run", "node"),
    [
        ("numbers", "rmse", {"task.name": "regression", "data.name": "stories:held_numbers"}, {"task": "regression"}),
        (
            "numbers_with_a_bad_one",
            "rmse",
            {"task.name": "regression", "task.options.loss": "huber", "data.name": "stories:held_numbers"},
            {"task": "regression"},
        ),
        (
            "labels_with_a_bad_one",
            "auc",
            {"task.name": "multi-label", "data.name": "stories:held_labels"},
            {"task": "multi-label"},
        ),
        (
            "texts_with_a_bad_one",
            "accuracy",
            {"model.name": "stories:Text", "data.name": "stories:held_texts"},
            {"classes": 3, "model": "stories:Text"},
        ),
        (
            "numbers",
            "loss",
            {"task.name": "stories:own_loss", "model.name": "stories:line", "data.name": "stories:held_numbers"},
            {"task": "stories:own_loss", "model": "stories:line"},
        ),
    ],
    ids=["regression", "a bad number", "a bad label", "a bad word", "a loss of one's own"],
)
def test_what_sites_learn(federation, train, story, score, run, node) -> None:
    """A record that is bad costs itself alone: every site answers every round."""
    grid = federation(run, data=f"stories:{story}", **node)
    summary = train(grid)
    assert summary["dropped"] == {}
    assert score in (summary["score"], *summary["scores"])
    assert summary["epsilon"] is not None
    assert len(events(grid)) == 2 * SITES


def test_a_site_that_learns_something_else_refuses_and_pays_nothing(federation, train) -> None:
    grid = federation(
        {"task.name": "regression", "data.name": "stories:held_numbers"}, data="stories:labels", task="multi-label"
    )
    with pytest.raises(Exception, match="terms"):
        train(grid)
    assert events(grid) == []


SCHEMA = """
[data.table.columns.age]
kind = "number"
range = [0, 120]

[data.table.columns.smoker]
kind = "flag"

[data.table.columns.pressure]
kind = "number"
range = [60, 220]
target = true
"""


def test_tables_by_schema_with_lines_that_are_none(federation, train, tmp_path: Path) -> None:
    lines = [f"{20 + i},{'yes' if i % 3 else 'no'},{100 + i}" for i in range(60)]
    for i in range(SITES):
        (tmp_path / f"site-{i}").mkdir()
        spoilt = [*lines[:7], 'x",\0,,', *lines[8:]] if i == 1 else lines
        (tmp_path / f"site-{i}" / "visits.csv").write_text("age,smoker,pressure\n" + "\n".join(spoilt) + "\n")
        (tmp_path / f"site-{i}" / "schema.toml").write_text(SCHEMA)
    made = "    x = np.random.default_rng(0).uniform(-1, 1, (20, 2))\n    return x, x[:, 0], x, x[:, 0]\n"
    server = "import numpy as np\ndef held():\n" + made
    (tmp_path / "held.py").write_text(server)
    run = {"task.name": "regression", "data.name": "held:held", "algorithm.compression": 0.4}
    grid = federation(run, data="{home}/visits.csv", schema="{home}/schema.toml", task="regression")
    summary = train(grid)
    assert summary["dropped"] == {}
    assert read_site(grid.nodes[101], {}).own_records().bad == (7,)
    assert len(events(grid)) == 2 * SITES


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("task", "regresion", "task is 'regresion'; it must be one of classification"),
        ("task", 3, "task is 3; it must be a valid string"),
        ("person", 3, "person is 3; it must be a valid string"),
        ("person-records", 0, "person-records is 0; it must be greater than or equal to 1"),
        ("classes", 2, "classes is 2; the task 'regression' has none"),
    ],
)
def test_what_a_node_config_may_not_say(federation, key, value, said) -> None:
    node = federation({}, data="stories:numbers", **{"task": "regression", key: value}).nodes[100]
    with pytest.raises(ConfigError, match=said):
        read_site(node, {})


# Sites whose model has a frozen body: the simulator's bits, features once per process, no word about a record.

FROZEN = {"model.name": "frozen_nets:chain", "algorithm.compression": 0.2}


PERSONS = {"data.name": "small_records:visits", "data.person": "patient", "data.person_records": 3}


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer, "_TRAINERS", {})


@pytest.mark.parametrize(
    "overrides",
    [{}, PERSONS | {"model.name": "frozen_nets:wide", "algorithm.batch": 10}],
    ids=["records", "persons"],
)
def test_same_bits_as_the_simulator(simulation, train, tmp_path: Path, overrides: dict[str, Any]) -> None:
    simulation.run_config |= FROZEN | {"federation.rounds": 2} | overrides
    summary = train(simulation)
    assert "the frozen body" in summary["engine_reason"]
    config, _ = read_config(simulation.run_config | {"run.out": str(tmp_path / "twin")})
    twin = fedspa.run(config)
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("run", "twin"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert (tmp_path / "run/metrics.jsonl").read_text() == (tmp_path / "twin/metrics.jsonl").read_text()
    same = twin.summary.keys() - {"seconds"}
    assert {key: summary[key] for key in same} == {key: twin.summary[key] for key in same}


def test_whether_there_is_a_split_does_not_depend_on_the_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """A split rounds otherwise than the whole: were it made for few records only, one more would change all others."""
    monkeypatch.setattr("fedspa.learning.features.MEMORY", 100)
    monkeypatch.setattr("shutil.disk_usage", lambda folder: pytest.fail("a site asked how much room there is"))
    record = blank((1, 8, 8))
    found = trainer.trainer_for("frozen_nets:chain", record, Classification(10), None, "auto", 1, False)
    x, y = torch.randn(50, 1, 8, 8, generator=torch.Generator().manual_seed(0)), torch.arange(50) % 10
    assert found.examples(SiteExamples(Examples(x, y), None, record, None), strict=False).x.shape == (50, 144)


def test_a_deployed_site_draws_what_the_server_drew(deployment, train) -> None:
    for node in deployment.nodes.values():
        node |= {"model": "frozen_nets:drawn"}
    changed = FROZEN | {"model.name": "frozen_nets:drawn", "run.seed": 3, "federation.rounds": 1}
    summary = train(deployment, **{key.replace(".", "__"): value for key, value in changed.items()})
    assert summary["dropped"] == {}


def test_a_site_with_another_body_refuses_before_it_pays(deployment, train) -> None:
    first, *others = deployment.nodes.values()
    first |= {"model": "frozen_nets:drawn"}  # where the server loads a chain
    for node in others:
        node |= {"model": "frozen_nets:chain"}
    changed = FROZEN | {"run.seed": 3, "flower.quorum": 1, "federation.rounds": 1}
    summary = train(deployment, **{key.replace(".", "__"): value for key, value in changed.items()})
    assert set(summary["dropped"]) == {"refused-terms"}
    with Ledger.open(Path(first["ledger"]), create=False) as ledger:
        assert ledger.spent(first["agent"]) == {}


def test_persons_are_protected_where_a_site_says_whose_its_records_are(federation, train) -> None:
    run = {"data.name": "stories:held_visits", "data.person": "patient"}
    grid = federation(
        run, policy='unit = "person"\n', data="stories:visits_of_labels", classes=2, **{"person-records": 4}
    )
    summary = train(grid)
    assert summary["dropped"] == {}
    assert summary["unit"] == "person"
    assert {event.unit for event in events(grid)} == {"person"}
