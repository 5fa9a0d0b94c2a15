"""The plan of a config: calibrated before a run, or made again from what its ledger holds, by the same mechanism."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from fedspa import registry
from fedspa.algorithms import Algorithm, against, chosen
from fedspa.data import plugin
from fedspa.data.participation import cap_for
from fedspa.errors import ConfigError, PrivacyError
from fedspa.mechanisms import Asked, Mechanism, Plan
from fedspa.mechanisms.base import Cohort
from fedspa.privacy.event import Event, Unit

if TYPE_CHECKING:
    from fedspa.runs.config import Config


def cap_of(config: Config) -> int:
    """The most rounds that an agent takes part in."""
    federation = config.federation
    return cap_for(federation.participation, federation.agents, federation.per_round, federation.rounds, federation.cap)


# A user's own algorithms that this process has imported, by name and folder.
_OWN: dict[tuple[str, str | None], Algorithm] = {}


def import_own_algorithm(config: Config) -> None:
    """Import the algorithm that `algorithm.name = "package.module:NAME"` names, as the other functions of a user's own
    are: from an installed package, beside the config, or from the current folder."""
    name, code = config.algorithm.name, config.run.code
    if not plugin.is_plugin(name) or name in registry.offered():
        return
    found = plugin.imported(name, key="algorithm.name", error=ConfigError, code=code)
    if not isinstance(found, Algorithm):
        raise ConfigError(
            f"algorithm.name = {name!r} is a {type(found).__name__}; it must be a fedspa.algorithms.Algorithm"
        )
    _OWN[name, code] = registry.add(name, found)


def algorithm_of(config: Config) -> Algorithm:
    """Return the algorithm of a config, by its name and its adversary."""
    name, adversary = config.algorithm.name, config.privacy.adversary
    own = _OWN.get((name, config.run.code))
    return chosen(name, adversary) if own is None else against(own, adversary)


def cohort_of(config: Config) -> Cohort | None:
    """Whose sums the server is to see; None where it sees each agent's upload."""
    privacy, most = config.privacy, config.federation.per_round
    if privacy.adversary == "local":
        return None
    return Cohort(most if privacy.members is None else privacy.members, most, privacy.colluders)


def plan_of(config: Config, event: Event, dimension: int, active: int) -> Plan:
    """The plan whose participations are `event`; of the config, only what an event does not say is read."""
    if config.data.person is not None and event.unit != "person":
        raise PrivacyError(
            f"the ledger says that each {event.unit} was protected, the config names data.person: rely on no ε of this "
            "page"
        )
    return _mechanism(config).of_event(event, _asked(config, dimension, active, event.records, event.unit))


def calibrated_plan(config: Config, dimension: int, active: int, records: int, unit: Unit) -> Plan:
    """The plan of a run that is to start, with the least noise that its ε allows."""
    return _mechanism(config).calibrated(_asked(config, dimension, active, records, unit))


def flat(config: Config) -> dict[str, Any]:
    """Its values by `section.key`; of a table's columns by `data.columns.age.range`."""
    return dict(_named("", config.model_dump()))


def _named(prefix: str, values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _named(f"{prefix}{key}.", value)
        else:
            yield f"{prefix}{key}", value


def _mechanism(config: Config) -> Mechanism:
    mechanism = algorithm_of(config).mechanism
    assert mechanism is not None  # nobody asks for the plan of an algorithm without one
    return mechanism


def _asked(config: Config, dimension: int, active: int, records: int, unit: Unit) -> Asked:
    algorithm, privacy = config.algorithm, config.privacy
    return Asked(
        dimension=dimension,
        active=active,
        agents=config.federation.agents,
        participations=cap_of(config),
        sampling=privacy.sampling,
        batch=algorithm.batch,
        records=records,
        local_steps=algorithm.local_steps,
        neighbours=privacy.neighbours,
        delta=privacy.delta,
        clip=privacy.clip,
        clip_value=privacy.clip_value,
        clip_rule=privacy.clip_rule,
        epsilon=privacy.epsilon,
        options=flat(config),
        unit=unit,
        cohort=cohort_of(config),
    )
