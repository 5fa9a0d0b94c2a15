"""A node-config before anybody joins with it: an operator's mistakes, each of which is one line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedspa.agent.ledger.ledger import Ledger
from fedspa.engine import Unsupported
from fedspa.engine.choose import decide
from fedspa.engine.per_example import PerExampleEngine
from fedspa.errors import ConfigError, DataError, LedgerError
from fedspa.examples import taken
from fedspa.flower import check, site, site_records, trainer
from fedspa.flower.site import read_site
from fedspa.learning.tasks.named import resolve

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


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"person_records": 3}, "unknown key person_records; allowed: agent, classes"),
        ({"classes": 2}, r"classes is 2; the target of the schema .* is 3 classes"),
        ({"features": "aligned"}, r"features is 'aligned'; they are of images, and .* is a table"),
        ({"model": "no_such_module:build"}, "cannot import 'no_such_module'"),
        ({"device": "cuda:99"}, "node-config: device is 'cuda:99', which cannot compute on this machine; cpu can"),
        ({"max_records": 0}, "max_records is 0; it must be greater than or equal to 1"),
    ],
)
def test_a_wrong_key_is_named(node, more, message):
    with pytest.raises(ConfigError, match=message):
        told({**node, **more})


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


def test_max_records_that_are_too_few(node):
    with pytest.raises(DataError, match="max_records is 19, and this site holds 20 persons; raise max_records"):
        told({**node, "max_records": 19})
    assert "max_records: 20 places" in told({**node, "max_records": 20})


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
    assert "max_records: not named: under Poisson sampling, records are never taken together" in lines
    assert "device: cpu" in lines
    assert "engine: generic (not native: " in lines
    assert "faster: for traced: set max_records in the node-config" in lines
    lines = told({**smooth, "max_records": 1000})
    assert "max_records: 1000 places for records, a public number" in lines
    assert "engine: traced (not native: " in lines
    assert "set max_records" not in lines


@pytest.mark.parametrize("more", [{}, {"max_records": 40}])
def test_a_device_on_which_nothing_keeps_records_apart_is_refused_with_the_reason(smooth, monkeypatch, more):
    """As a GPU's generic engine declares it. The last of all engines takes every model: it must not slip through."""
    monkeypatch.setattr(trainer, "_TRAINERS", {})
    monkeypatch.setattr(PerExampleEngine, "separates_records", False)
    monkeypatch.setattr("fedspa.engine.traced.trace_engine", lambda *_, **__: Unsupported("it cannot"))
    monkeypatch.setattr("fedspa.runs.setup.decide", lambda request: decide(replace(request, device="cuda")))
    with pytest.raises(ConfigError, match=r"'generic' does not keep records apart on cpu:0; .*not traced: .*"):
        told({**smooth, **more, "device": "cpu:0"})


# What one record at a site holds never shows in what another adds, to the bit, nor in whether the site answers.


def load(monkeypatch: pytest.MonkeyPatch, made: Any, classes: int | None = None, **how: bool) -> site_records.Records:
    monkeypatch.setattr(site_records, "_call", lambda *_: made)
    return site_records.load({"data": "a:b"}, classes, **how)


def test_a_bad_image_leaves_the_others_their_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Images are often turned from channels last, and where one is bad all are copied."""
    images, y = np.random.default_rng(0).normal(size=(6, 8, 8, 3)).astype(np.float32), np.arange(6) % 4
    spoilt = images.copy()
    spoilt[5, 0, 0, 0] = np.nan
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 8, 3), nn.Flatten(), nn.Linear(128, 4))
    theta = nn.utils.parameters_to_vector(module.parameters()).detach()
    rows: list[Tensor] = []
    for some in (images, spoilt):
        own = load(monkeypatch, (some.transpose(0, 3, 1, 2), y), 4)
        x, labels = (taken(tree, torch.tensor([0, 3])) for tree in (own.x, own.y))
        rows.append(torch.cat(list(PerExampleEngine(module).rows(theta, x, labels, None))))
    assert rows[0].isfinite().all()
    assert torch.equal(*rows)


IDS: list[list[Any]] = [["ann", "bob", *[None] * 4], ["ann", "bob", *[float("nan")] * 4], ["ann", "bob", *[""] * 4]]


@pytest.mark.parametrize("ids", IDS)
@pytest.mark.parametrize("dtype", [np.int64, np.bool_, np.float32])
def test_a_record_without_an_id_is_in_no_persons_example(monkeypatch: pytest.MonkeyPatch, ids, dtype) -> None:
    """Its person may be among the others. No filling would keep it out of a release for every model: some take any
    whole number, and no truth value is a bad one."""
    made = np.arange(18).reshape(6, 3).astype(dtype), np.zeros(6), ids
    monkeypatch.setattr(site_records, "_call", lambda *_: made)
    site._own_records.cache_clear()
    node = (("agent", f"{ids} {dtype}"), ("data", "a:b"), ("model", "a:b"), ("task", "regression"))
    persons = site._grouped(node, None, 8)
    assert isinstance(persons.x, dict)
    assert persons.x["count"].tolist() == [1, 1]
    assert persons.x["records"].tolist() == made[0][:2, None].tolist()


def test_where_no_record_has_an_id_nobody_is_protected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site_records, "_call", lambda *_: (np.zeros((2, 3)), np.zeros(2), [None, None]))
    with pytest.raises(DataError, match="no record says whose it is"):
        site._grouped((("agent", "nobody"), ("data", "a:b"), ("task", "regression")), None, 8)


def test_a_long_id_costs_the_others_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As an array of texts these would be 80 GB."""
    own = load(monkeypatch, (np.zeros((1000, 3)), np.zeros(1000), [*["ann"] * 999, "b" * 20_000_000]))
    assert own.persons.tolist() == [0] * 999 + [1]


class Anything(nn.Module):
    """Takes whatever it is given."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.last = nn.Linear(3, width)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(x.float().nan_to_num())
        return found


TARGETS: dict[str, tuple[int | None, int, Any, Any]] = {
    "classification": (3, 3, np.array([0, 1, 2]), 7),
    "binary": (None, 1, np.array([0, 1, 1]), 7),
    "multi-label": (None, 2, np.array([[0, 1], [1, 1], [1, 0]]), 7),
    "regression": (None, 1, np.array([0.5, 1, 2]), np.nan),
}


@pytest.mark.parametrize("task", TARGETS)
@pytest.mark.parametrize("dtype", [np.int64, np.bool_, np.float32])
def test_a_bad_record_counts_as_zero_even_where_the_model_takes_anything(monkeypatch, task, dtype) -> None:
    classes, width, y, strange = TARGETS[task]
    y = y.copy()
    y[1] = strange
    own = load(monkeypatch, (np.arange(9).reshape(3, 3).astype(dtype), y), classes, integers=True)
    learned = resolve(task, own.y, classes, None)
    own = site_records.settled(own, learned, "data")
    assert own.bad == (1,)
    module = Anything(width)
    theta = nn.utils.parameters_to_vector(module.parameters()).detach()
    (rows,) = PerExampleEngine(module, learned).rows(theta, own.x, own.y, None)
    assert rows.isfinite().all(dim=1).tolist() == [True, False, True]


LISTS: list[tuple[Any, Any]] = [
    ([0, 1, 1], [0, 1, None]),
    ([0, 1, 1], [0, 1, 0.5]),
    ([0, 1, 1], [0, 1, 2**70]),
    ([True, False, True], [True, False, 2]),
    ([[0, 1], [1, 1], [1, 0]], [[0, 1], [1, 1], [None, 0]]),
]


@pytest.mark.parametrize(("targets", "odd"), LISTS)
def test_one_target_in_a_list_does_not_decide_the_type_of_the_others(monkeypatch, targets, odd) -> None:
    kept = [load(monkeypatch, (np.zeros((3, 2)), some), integers=True).y for some in (targets, odd)]
    assert all(isinstance(y, Tensor) and y.dtype == torch.float32 for y in kept)
    assert taken(kept[0], slice(2)).tolist() == taken(kept[1], slice(2)).tolist()


@pytest.mark.parametrize("bad", [(), (7,), (0, 999), tuple(range(500, 520))])
def test_a_bad_target_takes_hardly_longer_to_read(monkeypatch: pytest.MonkeyPatch, bad: tuple[int, ...]) -> None:
    """Reading comes before any payment, and a server may time it as often as it likes: one label that is neither 0 nor
    1 used to have a thousand records read one by one."""
    y = np.zeros((1000, 2), dtype=np.float32)
    y[::3, 1], y[list(bad), 0] = 1, 0.5
    own = load(monkeypatch, (np.ones((1000, 3), dtype=np.float32), y))
    task, calls = resolve("multi-label", own.y, None, None), 0

    def counted(some: Any, what: str) -> Any:
        nonlocal calls
        calls += 1
        return type(task).targets(task, some, what)

    monkeypatch.setattr(task, "targets", counted)
    found = site_records.settled(own, task, "data")
    assert found.bad == bad
    assert calls <= 1 + 22 * len(bad)
    good = np.setdiff1d(np.arange(1000), bad)
    assert isinstance(found.y, Tensor)
    assert np.array_equal(found.y[good], y[good])
    assert bool(found.y[list(bad)].isnan().all())
