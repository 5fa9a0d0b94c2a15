"""What a config of cpSGD must say, and that each refusal is one line that names its key."""

from __future__ import annotations

from typing import Any

import pytest

from fedspa.errors import ConfigError
from fedspa.mechanisms.base import Cohort
from fedspa.runs.config import cohort_of, load

GOOD: dict[str, dict[str, Any]] = {
    "federation": {"agents": 6, "per_round": 6},
    "algorithm": {"name": "cpsgd", "local_steps": 1, "options": {"trials": 9000}},
    "privacy": {"sampling": "fixed", "clip": "coordinate"},
}


def changed(key: str, value: Any) -> dict[str, dict[str, Any]]:
    section, _, name = key.partition(".")
    if name.startswith("options."):
        name, value = "options", {"trials": 9000, name.partition(".")[2]: value}
    return {**GOOD, section: {**GOOD.get(section, {}), name: value}}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("federation.per_round", 5),
        ("algorithm.local_steps", 2),
        ("algorithm.coding", "f32"),
        ("algorithm.options.bits", 17),
        ("privacy.sampling", "poisson"),
        ("privacy.neighbours", "add-remove"),
        ("privacy.clip", "l2"),
        ("privacy.noise_multiplier", 1.0),
        ("algorithm.options.trials", 2**31),
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
    options = {key: noise[key] for key in noise if key != "epsilon"}
    values = {**GOOD, "privacy": {"sampling": "fixed", "clip": "coordinate", "epsilon": noise.get("epsilon")}}
    values["algorithm"] = {**GOOD["algorithm"], "options": options}
    with pytest.raises(ConfigError, match="exactly one of"):
        load(values)


def summed(**privacy: Any) -> dict[str, dict[str, Any]]:
    return {**GOOD, "privacy": {**GOOD["privacy"], "adversary": "secure-aggregation", **privacy}}


def test_sums_over_a_rounds_agents() -> None:
    assert cohort_of(load(GOOD)) is None
    assert cohort_of(load(summed())) == Cohort(members=6, most=6, colluders=0)
    assert cohort_of(load(summed(members=4, colluders=3))) == Cohort(members=4, most=6, colluders=3)


@pytest.mark.parametrize(
    ("privacy", "match"),
    [
        ({"members": 7}, r"privacy\.members is 7; it must not exceed federation\.per_round = 6"),
        ({"members": 1}, r"privacy\.members is 1"),
        ({"colluders": 6}, r"privacy\.colluders is 6; it must be below .* 6 "),
        ({"adversary": "local", "colluders": 1}, r"privacy\.colluders is 1, which is for"),
    ],
)
def test_a_cohort_that_hides_nobody_is_refused_by_name(privacy: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match) as refused:
        load(summed(**privacy))
    assert "\n" not in str(refused.value)


def test_a_sum_over_one_agent_and_one_of_no_noise_are_refused() -> None:
    alone = {**summed(), "federation": {"agents": 1, "per_round": 1}}
    with pytest.raises(ConfigError, match=r"federation\.per_round is 1; .* 2 or more"):
        load(alone)
    with pytest.raises(ConfigError, match="fedavg is not run under it, only: fedspa, dp-fed, cpsgd"):
        load({"algorithm": {"name": "fedavg"}, "privacy": {"adversary": "secure-aggregation"}})
