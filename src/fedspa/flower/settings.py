"""A Flower run's config: fedspa's own sections, and `[flower]` for what only a deployment has.

Flower hands over one flat mapping (`[tool.flwr.app.config]`, overridden by `flwr run -c 'federation.rounds=5'`), whose
keys read `section.key`. Flower only overrides what the app's pyproject.toml declares, and TOML has no word for
nothing: a key declared as "" is one that is not set. Its values are numbers, texts and truths: a list or a table comes
as the text of one. What a Flower run could not heed is refused by name; nothing is dropped in silence.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Final

from pydantic import Field, ValidationError

from fedspa.errors import ConfigError, describe_invalid, quoted
from fedspa.learning.options import BALANCED
from fedspa.runs import config as configs
from fedspa.runs.config import Config
from fedspa.runs.sections import Many, Section

Seconds = Annotated[float, Field(gt=0, le=10**7)]

# Keys whose values may come as the text of JSON, and what that must be.
AS_TEXT: Final = {
    **dict.fromkeys(
        (
            "algorithm.compression",
            "task.options.weights",
            "task.options.columns",
            "tuning.candidates",
            "tuning.expected_gains",
            "run.chosen",
        ),
        list,
    ),
    **dict.fromkeys(("data.table.columns", "task.options.shares"), dict),
}


class FlowerSettings(Section):
    """How the server waits. Times are in seconds.

    `records` is the fewest records that an agent of a deployment holds: it sets the public sampling rate, so that the
    server's ε holds for all. Without it the run is a simulation, in which `data` is partitioned among the nodes.
    `quorum` is the number of valid updates that a round needs for θ to move (default: half of per_round). `resume`
    continues `run.out`. `roster` is the server's copy of the sites' names and public keys, for secure aggregation.
    """

    records: Many | None = None
    round_timeout: Seconds = 600.0
    start_timeout: Seconds = 600.0
    poll: Annotated[float, Field(ge=0.01, le=60)] = 0.2
    quorum: Many | None = None
    resume: bool = False
    roster: str | None = None


def read_config(run_config: Mapping[str, Any]) -> tuple[Config, FlowerSettings]:
    """Both parts of a run config, checked; an unknown key is an error that names it."""
    sections: dict[str, dict[str, Any]] = {}
    for key, value in run_config.items():
        *tables, name = key.split(".")
        if not tables:
            raise ConfigError(
                f"run config: {key} belongs to no section; write it as section.key, as in federation.rounds"
            )
        if value == "":  # not set, and no reason for a table of keys
            continue
        table: dict[str, Any] = sections
        for part in tables:
            table = table.setdefault(part, {})
        table[name] = _read(key, value) if key in AS_TEXT and isinstance(value, str) and value != BALANCED else value
    try:
        settings = FlowerSettings.model_validate(sections.pop("flower", {}))
    except ValidationError as error:
        raise ConfigError(describe_invalid(error, FlowerSettings, "flower.")) from None
    config = configs.load(sections)
    _check_left_out(config, _OF_NODES)
    quorum = settings.quorum
    if quorum is not None and quorum > config.federation.per_round:
        raise ConfigError(
            f"flower.quorum is {quorum}; it must not exceed federation.per_round = {config.federation.per_round}"
        )
    return config, settings


# Keys of a simulation, with the value that leaves each to Flower's nodes, and why.
_OF_NODES: Final = {
    "run.device": ("cpu", "on Flower each site names its own device"),
    "run.tf32": (False, "no engine of a Flower site takes it"),
    "run.workers": (1, "on Flower each node trains its own agent"),
    "run.checkpoint_every": (1, "agents answer no earlier round again, so that none may be lost"),
}
# Likewise, of agents that have records and limits already.
_OF_SITES: Final = {
    "data.partition": ("iid", "with flower.records the agents hold their own"),
    "data.agent_holdout": (0.0, "with flower.records each agent trains on all that its site names"),
    "run.engine": ("auto", "each deployed agent takes the fastest that it has"),
    "run.ledger": (None, "a deployed agent names its ledger in its own node-config"),
    "run.policy": (None, "a deployed agent names its policy in its own node-config"),
}


def check_deployable(config: Config) -> None:
    """Raise on a key by which a simulation's agents are made."""
    if config.private and config.privacy.noise == "seeded":
        raise ConfigError(
            "privacy.noise is 'seeded', which the server could subtract; a deployment takes secure or exact"
        )
    _check_left_out(config, _OF_SITES)


def _check_left_out(config: Config, keys: Mapping[str, tuple[object, str]]) -> None:
    values = configs.flat(config)
    for key, (unset, why) in keys.items():
        if values[key] != unset:
            raise ConfigError(f"{key} is {values[key]!r}; {why}: leave it out")


def _read(key: str, value: Any) -> Any:
    """Read a value from its text, as in "[0, 1, 0.1, 1]"."""
    try:
        found = json.loads(value)
    except (TypeError, ValueError, RecursionError):
        found = None
    if not isinstance(found, AS_TEXT[key]):
        like = 'list, as in "[0, 1, 0.1, 1]"' if AS_TEXT[key] is list else """JSON object, as in '{"age": {…}}'"""
        raise ConfigError(f"run config: {key} is {quoted(value)}; it must be the text of a {like}")
    return found
