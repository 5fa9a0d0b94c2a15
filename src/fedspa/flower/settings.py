"""A Flower run's config: fedspa's own sections, and `[flower]` for what only a deployment has.

Flower hands over one flat mapping (`[tool.flwr.app.config]`, overridden by `flwr run -c 'federation.rounds=5'`), whose
keys read `section.key`. Flower only overrides what the app's pyproject.toml declares, and TOML has no word for
nothing: a key declared as "" is one that is not set.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, ValidationError

from fedspa.errors import ConfigError
from fedspa.runs import config as configs
from fedspa.runs.config import Config, Count, Positive, Section


class FlowerSettings(Section):
    """How the server waits. Times are in seconds.

    `records` is the fewest records that an agent of a deployment holds: it sets the public sampling rate, so that the
    server's ε holds for all. Without it the run is a simulation, in which `data` is dealt out to the nodes. `quorum` is
    the number of valid updates that a round needs for θ to move (default: half of per_round). `resume` goes on from
    `run.out`.
    """

    records: Count | None = None
    round_timeout: Positive = 600.0
    start_timeout: Positive = 600.0
    poll: Annotated[float, Field(ge=0.01, le=60)] = 0.2
    quorum: Count | None = None
    resume: bool = False


def read_config(run_config: Mapping[str, Any]) -> tuple[Config, FlowerSettings]:
    """Both parts of a run config, checked; an unknown key is an error that names it."""
    sections: dict[str, dict[str, Any]] = {}
    for key, value in run_config.items():
        section, dot, name = key.partition(".")
        if not dot:
            raise ConfigError(
                f"run config: {key} belongs to no section; write it as section.key, as in federation.rounds"
            )
        sections.setdefault(section, {})
        if value != "":
            sections[section][name] = value
    try:
        settings = FlowerSettings.model_validate(sections.pop("flower", {}))
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        allowed = ", ".join(FlowerSettings.model_fields)
        raise ConfigError(f"flower.{name} is {first['input']!r}: {first['msg']}; keys: {allowed}") from None
    config = configs.load(sections)
    quorum = settings.quorum
    if quorum is not None and quorum > config.federation.per_round:
        raise ConfigError(
            f"flower.quorum is {quorum}; it must not exceed federation.per_round = {config.federation.per_round}"
        )
    return config, settings
