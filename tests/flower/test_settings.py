"""A Flower run's config: what it carries, and what it refuses by name because nobody would heed it."""

from __future__ import annotations

import pytest

pytest.importorskip("flwr", reason="needs the extra: pip install 'fedspa[flower]'")

import json
import types
from typing import Any, Literal, Union, get_args, get_origin

from flwr.common.config import flatten_dict, parse_config_args

from fedspa.errors import ConfigError
from fedspa.flower.server_app import deployed
from fedspa.flower.settings import AS_TEXT, read_config
from fedspa.runs.config import Config

from .local_grid import DEPLOYMENT, SIMULATION

BY_LAYER = SIMULATION | {"algorithm.compression": "", "algorithm.mask": "fixed"}


def test_a_list_travels_as_text():
    """As in the app's pyproject.toml and on the command line, through Flower's own functions."""
    declared = flatten_dict({"algorithm": {"layer_shares": "[0, 1, 0.1, 1]"}})
    given = parse_config_args(['algorithm.layer_shares="[0, 1, 0.1, 1]"'])
    assert declared == given
    assert read_config(BY_LAYER | given)[0].algorithm.layer_shares == [0, 1, 0.1, 1]
    with pytest.raises(ValueError, match="layer_shares needs to be of type"):
        flatten_dict({"algorithm": {"layer_shares": [0, 1, 0.1, 1]}})  # why: Flower takes no list


@pytest.mark.parametrize("text", ["0.1", "[0, 1", "many", 0.5])
def test_a_text_that_is_no_list_is_named(text):
    with pytest.raises(ConfigError, match=r"algorithm.layer_shares is .* text of a list"):
        read_config(BY_LAYER | {"algorithm.layer_shares": text})


def test_a_table_travels_with_its_columns_as_text():
    columns = {
        "age": {"kind": "number", "range": [0, 110]},
        "score": {"kind": "number", "range": [0, 9], "target": True},
    }
    table = SIMULATION | {"data.name": "visits.csv", "data.holdout": 0.2}
    config, _ = read_config(table | flatten_dict({"data": {"columns": json.dumps(columns)}}))
    assert config.task.name == "regression"
    assert list(config.data.columns or ()) == ["age", "score"]
    for text in ("[1]", "{", "age", 3):
        with pytest.raises(ConfigError, match=r"data.columns is .* text of a JSON object"):
            read_config(table | {"data.columns": text})


def test_every_other_key_has_a_value_that_flower_takes():
    for section, of in Config.model_fields.items():
        for key, field in of.annotation.model_fields.items():
            taken = _plain(field.annotation) or key == "options"  # which comes key by key: algorithm.options.bits
            assert (f"{section}.{key}" in AS_TEXT) != taken, f"{section}.{key}"


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
    config, settings = read_config(DEPLOYMENT | {key: value})
    with pytest.raises(ConfigError, match=f"^{key} is"):
        deployed(config, settings.records)
