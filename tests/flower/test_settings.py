"""A Flower run's config: what it carries, and what it refuses by name because nobody would heed it."""

from __future__ import annotations

import pytest

pytest.importorskip("flwr", reason="needs the extra: pip install 'fedspa[flower]'")

import json
import types
from typing import Any, Literal, Union, get_args, get_origin

from config_keys import fields
from flwr.common.config import flatten_dict, parse_config_args

from fedspa.errors import ConfigError
from fedspa.flower.settings import AS_TEXT, check_deployable, read_config

from .local_grid import DEPLOYMENT, SIMULATION

BY_LAYER = SIMULATION | {"algorithm.compression": "", "algorithm.mask": "fixed"}


def test_a_list_travels_as_text():
    """As in the app's pyproject.toml and on the command line, through Flower's own functions."""
    declared = flatten_dict({"algorithm": {"compression": "[0, 1, 0.1, 1]"}})
    given = parse_config_args(['algorithm.compression="[0, 1, 0.1, 1]"'])
    assert declared == given
    assert read_config(BY_LAYER | given)[0].algorithm.compression == [0, 1, 0.1, 1]
    with pytest.raises(ValueError, match="compression needs to be of type"):
        flatten_dict({"algorithm": {"compression": [0, 1, 0.1, 1]}})  # why: Flower takes no list


@pytest.mark.parametrize("text", ["0.1", "[0, 1", "many"])
def test_a_text_that_is_no_list_is_named(text):
    with pytest.raises(ConfigError, match=r"algorithm.compression is .* text of a list"):
        read_config(BY_LAYER | {"algorithm.compression": text})


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
