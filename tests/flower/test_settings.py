"""A Flower run's config: what it carries, and what it refuses by name because nobody would heed it."""

from __future__ import annotations

import hashlib
import json
import types
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import pytest
from config_keys import fields
from flwr.common.config import flatten_dict, parse_config_args

import fedspa
from fedspa.agent.ledger.ledger import Ledger
from fedspa.errors import ConfigError
from fedspa.flower import terms
from fedspa.flower.settings import AS_TEXT, check_deployable, read_config
from fedspa.mechanisms.gaussian.plan import GaussianEvent
from fedspa.privacy import accounting
from fedspa.privacy.filter import least_epsilon
from fedspa.randomness.mask import active_coordinates
from fedspa.runs import checkpoint

from .local_grid import DEPLOYMENT, SIMULATION
from .test_terms import BINOMIAL_PLAN, PLAN

BY_LAYER = SIMULATION | {"algorithm.compression": "", "algorithm.mask": "fixed"}


def test_a_list_travels_as_text():
    """As in the app's pyproject.toml and on the command line, through Flower's own functions."""
    declared = flatten_dict({"algorithm": {"compression": "[0, 1, 0.1, 1]"}})
    given = parse_config_args(['algorithm.compression="[0, 1, 0.1, 1]"'])
    assert declared == given
    assert read_config(BY_LAYER | given)[0].algorithm.compression == [0, 1, 0.1, 1]
    with pytest.raises(ValueError, match="compression needs to be of type"):
        flatten_dict({"algorithm": {"compression": [0, 1, 0.1, 1]}})  # why: Flower takes no list


def test_a_table_travels_with_its_columns_as_text():
    columns = {
        "age": {"kind": "number", "range": [0, 110]},
        "score": {"kind": "number", "range": [0, 9], "target": True},
    }
    table = SIMULATION | {"data.name": "visits.csv", "data.holdout": 0.2}
    config, _ = read_config(table | flatten_dict({"data": {"table": {"columns": json.dumps(columns)}}}))
    assert config.task.name == "regression"
    assert list(config.data.table.columns) == ["age", "score"]
    assert read_config(SIMULATION | {"data.table.columns": "", "data.table.agent": ""})[0].data.table is None
    for text in ("[1]", "{", "age"):
        with pytest.raises(ConfigError, match=r"data.table.columns is .* text of a JSON object"):
            read_config(table | {"data.table.columns": text})


def test_every_other_key_has_a_value_that_flower_takes():
    for key, field in fields():
        # options come key by key, as algorithm.options.bits; so does a table
        taken = _plain(field.annotation) or key.endswith(".options") or key in ("data.table", "algorithm.compression")
        assert (key in AS_TEXT) != taken or key == "algorithm.compression", key


def _plain(kind: Any) -> bool:
    if get_origin(kind) in (Union, types.UnionType):
        return all(_plain(part) for part in get_args(kind))
    if hasattr(kind, "__metadata__"):
        return _plain(kind.__origin__)
    return get_origin(kind) is Literal or kind in (bool, int, float, str, type(None))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("run.device", "cuda"),
        ("run.tf32", True),
        ("run.checkpoint_every", 2),
        ("run.workers", 2),
    ],
)
def test_what_no_run_on_flower_heeds_is_refused(key, value):
    with pytest.raises(ConfigError, match=f"^{key} is"):
        read_config(SIMULATION | {key: value})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("privacy.noise", "seeded"),
        ("data.partition", "dirichlet"),
        ("run.engine", "generic"),
        ("run.ledger", "mine.sqlite"),
        ("run.policy", "mine.toml"),
    ],
)
def test_what_makes_the_agents_of_a_simulation_is_refused_in_a_deployment(key, value):
    config, _ = read_config(DEPLOYMENT | {key: value})
    with pytest.raises(ConfigError, match=f"^{key} is"):
        check_deployable(config)


# Two fedspas that understand each other may talk, whatever the versions of their packages; others pay nothing.


def test_the_page_prints_todays_editions() -> None:
    page = (Path(__file__).parents[2] / "docs/deployment.md").read_text("utf-8")
    assert f"\n    terms {terms.VERSION}, {checkpoint.written_editions()}\n" in page


def answered_by_another(grid, patch) -> None:
    """Have nodes answer as if another fedspa were installed there."""

    def elsewhere(node, message, answer):
        with pytest.MonkeyPatch.context() as patched:
            patch(patched)
            return [answer()]

    grid.fault = elsewhere


def spent(grid) -> int:
    found = 0
    for node in grid.nodes.values():
        with Ledger.open(node["ledger"], create=False) as ledger:
            found += sum(ledger.spent(node["agent"]).values())
    return found


def test_another_version_of_the_package_takes_part(deployment, train):
    def patch(patched):
        patched.setattr(fedspa, "__version__", "9.9.9")
        patched.setattr(checkpoint, "__version__", "9.9.9")

    answered_by_another(deployment, patch)
    summary = train(deployment, federation__rounds=1)
    assert summary["dropped"] == {}
    assert spent(deployment) == 4


@pytest.mark.parametrize(
    "patch",
    [
        lambda patched: patched.setattr(terms, "VERSION", terms.VERSION + 1),
        lambda patched: patched.setattr(checkpoint, "EDITIONS", {**checkpoint.EDITIONS, "payload": 2}),
        lambda patched: patched.setattr(
            checkpoint, "EDITIONS", {**checkpoint.EDITIONS, "pricing": checkpoint.PRICING + 1}
        ),
    ],
    ids=["terms", "payload", "pricing"],
)
def test_another_edition_is_refused_before_anything_is_paid(deployment, train, patch):
    answered_by_another(deployment, patch)
    with pytest.raises(fedspa.FedspaError, match=r"4 of 4 agents refuse this run \(terms\)"):
        train(deployment)
    assert spent(deployment) == 0


def test_other_prices_are_another_edition():
    """Whoever changes what an event costs raises PRICING, and then these numbers."""
    gaussian, binomial = {PLAN.event: 3}, {BINOMIAL_PLAN.event: 2}
    prices = [
        accounting.epsilon(gaussian, 1e-3, neighbours="add-remove"),
        accounting.epsilon(binomial, 1e-9, neighbours="replace-one"),
        least_epsilon(gaussian, 1e-3, "add-remove"),
        accounting.epsilon(
            {GaussianEvent("poisson", 1, 1, 1, 0.2): 1}, 1e-4, neighbours="add-remove"
        ),  # its noise ends
    ]
    assert (checkpoint.PRICING, [f"{price:.5g}" for price in prices]) == (2, ["1.6753", "0.00708", "2.2341", "30.375"])


def test_other_coordinates_are_another_edition():
    """Whoever changes what a seed means raises MASK, and then this digest."""
    chosen = active_coordinates(bytes(range(16)), 10_000, 100)
    digest = hashlib.sha256(chosen.astype("<i8").tobytes()).hexdigest()[:16]
    assert (checkpoint.MASK, digest) == (1, "26a3335ba39341f8")
