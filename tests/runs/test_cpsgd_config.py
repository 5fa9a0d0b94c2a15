"""What a config of cpSGD must say, and that each refusal is one line that names its key."""

from __future__ import annotations

from typing import Any

import pytest

from fedspa.errors import ConfigError
from fedspa.runs.config import load

GOOD: dict[str, dict[str, Any]] = {
    "federation": {"agents": 6, "per_round": 6},
    "algorithm": {"name": "cpsgd", "local_steps": 1},
    "privacy": {"trials": 9000, "sampling": "fixed", "clip": "coordinate"},
}


def changed(key: str, value: Any) -> dict[str, dict[str, Any]]:
    section, name = key.split(".")
    return {**GOOD, section: {**GOOD.get(section, {}), name: value}}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("federation.per_round", 5),
        ("algorithm.local_steps", 2),
        ("algorithm.coding", "f32"),
        ("algorithm.bits", 0),
        ("algorithm.bits", 17),
        ("privacy.sampling", "poisson"),
        ("privacy.neighbours", "add-remove"),
        ("privacy.clip_rule", "quantile"),
        ("privacy.clip_rule", "median"),
        ("privacy.clip", "l2"),
        ("privacy.noise_multiplier", 1.0),
        ("privacy.accountant", "rdp"),
        ("privacy.accountant", "theorem-1"),
        ("privacy.trials", 0),
        ("privacy.trials", 2**31),
        ("privacy.adversary", "server"),
    ],
)
def test_what_cpsgd_cannot_do_is_refused_by_name(key: str, value: Any) -> None:
    load(GOOD)
    with pytest.raises(ConfigError, match=key) as refused:
        load(changed(key, value))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "noise",
    [{}, {"epsilon": 1.0, "trials": 5}, {"epsilon": 1.0, "compression": 0.4}, {"trials": 5, "compression": 0.4}],
)
def test_exactly_one_thing_decides_the_trials(noise: dict[str, Any]) -> None:
    compression = noise.pop("compression", 1.0)
    values = {**GOOD, "privacy": {"sampling": "fixed", "clip": "coordinate", **noise}}
    values["algorithm"] = {**GOOD["algorithm"], "compression": compression}
    with pytest.raises(ConfigError, match="exactly one of"):
        load(values)


@pytest.mark.parametrize(("key", "value"), [("trials", 10), ("adversary", "secure-aggregation")])
def test_no_other_algorithm_takes_its_keys(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"privacy.{key}"):
        load({"privacy": {"epsilon": 1.0, key: value}})


def test_with_rotation_a_norm_may_be_clipped() -> None:
    config = load(
        {**GOOD, "algorithm": {**GOOD["algorithm"], "rotation": True}, "privacy": {**GOOD["privacy"], "clip": "l2"}}
    )
    assert config.private
