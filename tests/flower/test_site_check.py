"""A node-config before anybody joins with it: an operator's mistakes, each of which is one line."""

from __future__ import annotations

import pytest

pytest.importorskip("flwr", reason="needs the extra: pip install 'fedspa[flower]'")

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedspa.agent.ledger.ledger import Ledger
from fedspa.agent.ledger.report import accept_loss
from fedspa.agent.ledger.storage import anchor_path
from fedspa.engine import Unsupported
from fedspa.engine.choose import decide
from fedspa.engine.per_example import PerExampleEngine
from fedspa.errors import ConfigError, DataError, LedgerError
from fedspa.flower import check, trainer
from fedspa.flower.site import read_site

from .local_grid import POLICY
from .test_terms import PLAN

ROWS = "who,age,grade\n" + "".join(f"p{n // 2},{20 + n},{'abc'[n % 3]}\n" for n in range(40))
SCHEMA = """
[data]
{person}
[data.table.columns]
{who}
age = {{kind = "number", range = [0, 110]}}
grade = {{kind = "category", categories = ["a", "b", "c"], target = true}}
"""


@pytest.fixture
def node(tmp_path: Path) -> dict[str, Any]:
    """A site with a table of twenty persons, which its schema names."""
    (tmp_path / "rows.csv").write_text(ROWS)
    (tmp_path / "schema.toml").write_text(SCHEMA.format(person='person = "who"', who=""))
    (tmp_path / "silent.toml").write_text(SCHEMA.format(person="", who='who = {kind = "ignore"}'))
    (tmp_path / "policy.toml").write_text(POLICY.format(epsilon=8.0))
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "rows.npz", x=rng.normal(size=(40, 3)), y=rng.integers(0, 3, 40))
    Ledger.open(tmp_path / "ledger.sqlite").close()
    files = {"data": "rows.csv", "schema": "schema.toml", "policy": "policy.toml", "ledger": "ledger.sqlite"}
    return {"agent": "north", "classes": 3, **{key: str(tmp_path / file) for key, file in files.items()}}


def told(node: dict[str, Any]) -> str:
    """What an operator reads of a node-config that can be served, a line per finding."""
    return "\n".join(f"{finding.subject}: {finding.detail}" for finding in check.check_node(node))


def without(node: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in node.items() if key not in keys}


def test_a_sound_site(node):
    findings = check.check_node(node)
    assert all(finding.passed for finding in findings)
    assert "persons: 20, of each at most 2 records" in told(node)


def test_a_person_that_the_schema_does_not_know_is_refused(node, tmp_path: Path):
    """The operator asked for persons: records must not be protected in their place."""
    silent = {**node, "schema": str(tmp_path / "silent.toml")}
    assert read_site(silent, {}).unit == "record"
    with pytest.raises(ConfigError, match=r"person is 'who'; of a table the schema says it, .* has no person there"):
        read_site({**silent, "person": "who"}, {}).held(0)
    with pytest.raises(ConfigError, match=r"person is 'age'; .* has person = 'who' there"):
        read_site({**node, "person": "age"}, {}).held(0)
    assert read_site({**node, "person": "who"}, {}).unit == "person"


def test_a_function_that_names_no_persons_where_they_are_asked_for(node, tmp_path: Path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "rows_without_ids.py").write_text(
        "import numpy as np\n\ndef rows():\n    return np.zeros((4, 2)), np.zeros(4, dtype=int)\n"
    )
    asked = {**without(node, "schema"), "data": "rows_without_ids:rows", "person": "who"}
    with pytest.raises(ConfigError, match=r"person is 'who', and .* names no persons"):
        read_site(asked, {}).held(0)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"person_records": 3}, "unknown key person_records; allowed: agent, classes"),
        ({"classes": 2}, r"classes is 2; the target of the schema .* is 3 classes"),
        ({"features": "aligned"}, r"features is 'aligned'; they are of images, and .* is a table"),
        ({"model": "no_such_module:build"}, "cannot import 'no_such_module'"),
        ({"device": "cuda:99"}, "node-config: device is 'cuda:99', which cannot compute on this machine; cpu can"),
        ({"device": "meta"}, "device is 'meta', which cannot compute"),
        ({"device": 1}, "device is 1; it must be a valid string"),
        ({"room": 0}, "room is 0; it must be greater than or equal to 1"),
        ({"room": "40"}, "room is '40'; it must be a valid integer"),
        ({"room": True}, "room is True; it must be a valid integer"),
    ],
)
def test_a_wrong_key_is_named(node, more, message):
    with pytest.raises(ConfigError, match=message):
        told({**node, **more})


def test_a_schema_of_numbers_has_no_classes(node, tmp_path: Path):
    schema = tmp_path / "schema.toml"
    schema.write_text(schema.read_text().split("grade")[0] + 'grade = {kind = "number", range = [0, 1], target = true}')
    with pytest.raises(
        ConfigError, match=r'classes is 3; the target of the schema .* is what task="regression" is for'
    ):
        told(node)
    with pytest.raises(ConfigError, match=r'classes is missing; .* as task="regression"'):
        told(without(node, "classes"))


def test_a_policy_under_which_no_run_could_be_served(node, tmp_path: Path):
    (tmp_path / "policy.toml").write_text(POLICY.format(epsilon=8.0) + '\nunit = "record"\n')
    with pytest.raises(ConfigError, match=r"unit = 'record', and .* each person: every run would be refused"):
        told(node)


def test_a_ledger_of_another_unit(node):
    with Ledger.open(Path(node["ledger"]), create=False) as ledger:
        ledger.reserve("north", PLAN.event, "run", "round-0")
    with pytest.raises(LedgerError, match="spent there is for each record, and this node-config protects each person"):
        told(node)


def test_bad_rows_are_told_once_and_point_to_the_data_check(node, tmp_path: Path, capfd):
    (tmp_path / "rows.csv").write_text(ROWS.replace(",b\n", ",z\n", 1))
    lines = told(node)
    assert lines.count("1 of 40 records are bad (cells that the schema does not take: `fedspa data check`") == 1
    assert capfd.readouterr().err == ""


def test_a_room_that_is_too_small(node):
    with pytest.raises(DataError, match="room is 19, and this site holds 20 persons; raise room, which is public"):
        told({**node, "room": 19})
    assert "room: 20 places" in told({**node, "room": 20})


@pytest.fixture
def smooth(node, tmp_path: Path, monkeypatch) -> dict[str, Any]:
    """A site with records in an .npz and a model that the native engine does not know."""
    (tmp_path / "smooth_net.py").write_text(
        "from torch import nn\n\n"
        "def build(shape, classes):\n"
        "    return nn.Sequential(nn.Linear(3, 8), nn.GELU(), nn.Linear(8, classes))\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    return {**without(node, "schema"), "data": str(tmp_path / "rows.npz"), "model": "smooth_net:build"}


def test_the_operator_is_told_which_engine_trains_and_what_would_make_it_faster(smooth):
    lines = told(smooth)
    assert "room: not named: under Poisson sampling, records are never taken together" in lines
    assert "device: cpu" in lines
    assert "engine: generic (not native: " in lines
    assert "faster: for traced: name room in the node-config" in lines
    lines = told({**smooth, "room": 1000})
    assert "room: 1000 places for records, a public number" in lines
    assert "engine: traced (not native: " in lines
    assert "name room" not in lines


@pytest.mark.parametrize("more", [{}, {"room": 40}])
def test_a_device_on_which_nothing_keeps_records_apart_is_refused_with_the_reason(smooth, monkeypatch, more):
    """As a GPU's generic engine declares it. The last of all engines takes every model: it must not slip through."""
    monkeypatch.setattr(trainer, "_TRAINERS", {})
    monkeypatch.setattr(PerExampleEngine, "separates_records", False)
    monkeypatch.setattr("fedspa.engine.traced.trace_engine", lambda *_, **__: Unsupported("it cannot"))
    gpu = partial(decide, name="auto", device="cuda")

    def there(name, module, like, device, threads, exact, task, isolation):
        return gpu(module=module, like=like, threads=threads, exact=exact, task=task, isolation=isolation)

    monkeypatch.setattr(trainer, "decide", there)
    with pytest.raises(ConfigError, match=r"'generic' does not keep records apart on cpu:0; .*not stacked: .*on a GPU"):
        told({**smooth, **more, "device": "cpu:0"})


def test_a_site_trains_on_its_own_device(smooth, monkeypatch):
    """Whatever engine the choice offers there, if it keeps records apart."""
    asked = []

    def watched(*given, **more):
        asked.append((given[3], next(given[1].parameters()).device, more["isolation"]))
        return decide(*given, **more)

    monkeypatch.setattr(trainer, "_TRAINERS", {})
    monkeypatch.setattr(trainer, "decide", watched)
    assert "device: cpu:0" in told({**smooth, "room": 40, "device": "cpu:0"})
    assert asked == [(torch.device("cpu:0"), torch.device("cpu"), "fixed-slot")]


def test_an_accepted_loss_stands_beside_what_was_spent(node, tmp_path: Path):
    ledger = tmp_path / "ledger.sqlite"
    anchor_path(ledger).unlink()
    accept_loss(ledger, 0)
    (loss,) = [found for found in check.check_node(node) if "lost" in found.detail]
    assert (loss.subject, loss.passed) == ("ledger", None)
    assert "an unknown number of entries behind entry 0 may be lost" in loss.detail
    assert "no ε counts them" in loss.detail
