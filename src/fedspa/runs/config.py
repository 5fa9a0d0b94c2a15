"""The configuration of a run: TOML in, checked values out, every error one line that names its key.

`sections` has the keys; `check_combination` says which of them exclude each other. What a mechanism asks of the keys,
it checks itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from importlib import resources
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import BaseModel, ValidationError, ValidationInfo, model_validator

from fedspa import registry, toml
from fedspa.algorithms import Algorithm as Registered
from fedspa.algorithms import against, chosen
from fedspa.data import columns as tables
from fedspa.data import plugin
from fedspa.data.partition import cap_for
from fedspa.data.plugin import GIVEN, is_pattern, is_plugin, is_table
from fedspa.errors import ConfigError, PrivacyError, describe_detail, describe_invalid, first_of, quoted
from fedspa.learning.options import OPTIONS
from fedspa.mechanisms import Mechanism, Plan, PlanRequest
from fedspa.mechanisms.base import Cohort
from fedspa.privacy.event import Event, Unit
from fedspa.runs.sections import Algorithm, Data, Federation, Model, Privacy, Run, Section, Task, Tuning
from fedspa.secagg.session import threshold_of


class Config(Section):
    """The settings of a whole run, in eight sections; `load` makes one. It cannot be changed, and unknown keys, values
    of another type, NaN and ∞ are errors."""

    federation: Federation = Federation()
    data: Data = Data()
    model: Model = Model()
    task: Task = Task()
    algorithm: Algorithm = Algorithm()
    privacy: Privacy = Privacy()
    tuning: Tuning = Tuning()
    run: Run = Run()

    @property
    def private(self) -> bool:
        """Return whether the algorithm has an ε at all."""
        return algorithm_of(self).private

    @model_validator(mode="before")
    @classmethod
    def _task_of_a_table(cls, values: Any) -> Any:
        """Return where the task has no name, a table's targets say it, so that every file of the run does."""
        if not isinstance(values, Mapping):
            return values
        data, task = _given(values.get("data")), _given(values.get("task"))
        if data.get("table") and "name" not in task and isinstance(values.get("task", {}), Mapping | Task):
            with suppress(ConfigError):  # the error is raised where the section is read
                schema = tables.checked({**_given(data["table"]), **{k: data[k] for k in ("person",) if k in data}})
                return {**values, "task": {**task, "name": schema.task}}
        return values

    @model_validator(mode="before")
    @classmethod
    def _one_step_of_sums(cls, values: Any) -> Any:
        """Set the one step that secure aggregation allows, where nobody says how many."""
        if not isinstance(values, Mapping) or _given(values.get("privacy")).get("adversary") != "secure-aggregation":
            return values
        algorithm = values.get("algorithm", {})
        if not isinstance(algorithm, Mapping | Algorithm):
            return values
        return {**values, "algorithm": {"local_steps": 1, **_given(algorithm)}}

    @model_validator(mode="after")
    def _fits_together(self, info: ValidationInfo) -> Config:
        try:
            if info.context is None or info.context["own_code"]:
                import_own_algorithm(self)
        except ConfigError as error:
            raise ValueError(str(error)) from None
        check_combination(self)
        return self


def _given(section: object) -> dict[str, Any]:
    """Return the keys of a section that somebody set."""
    if isinstance(section, BaseModel):
        return {key: getattr(section, key) for key in section.model_fields_set}
    return dict(section) if isinstance(section, Mapping) else {}


def load(
    source: Path | str | Mapping[str, Any] | None = None, overrides: Iterable[str] = (), *, own_code: bool = True
) -> Config:
    """A checked config.

    Args:
        source: The path of a TOML file, the same as a nested mapping, or None for the packaged quickstart.
        overrides: Texts that read `section.key=value`, with the value in TOML's notation or a bare word; `none` unsets
            a key. `--set` on the command line takes the same.
        own_code: Whether an algorithm of the user's own (`algorithm.name = "package.module:NAME"`) is imported. A
            reader of somebody's files says False: there it must be installed.

    Returns:
        The config, with a default for every key that was not given.

    Raises:
        ConfigError: A key is unknown, or a value not allowed; one line names the key and what is.

    Examples:
        >>> import fedspa
        >>> config = fedspa.load({"privacy": {"epsilon": 2.0}}, ["algorithm.compression=0.05"])
        >>> config.algorithm.compression, config.privacy.sampling
        (0.05, 'poisson')
    """
    if source is None:
        values = toml.parse(resources.files("fedspa.runs").joinpath("quickstart.toml").read_text("utf-8"))
    elif isinstance(source, Mapping):
        values = {key: dict(value) if isinstance(value, Mapping) else value for key, value in source.items()}
    elif isinstance(source, str | Path):
        values = _read(Path(source))
    else:
        raise ConfigError(
            f"the config is {quoted(source)}; give the path of a TOML file, a nested mapping as in "
            '{"privacy": {"epsilon": 2.0}}, a fedspa.Config, or nothing for the quickstart'
        )
    for override in overrides if isinstance(overrides, Iterable) else (overrides,):
        if not isinstance(override, str):
            raise ConfigError(f"an override is {quoted(override)}; give a list of texts, as in ['run.seed=1']")
        _apply(values, override)
    _with_code(values, Path(source).parent if isinstance(source, str | Path) else Path())
    try:
        return Config.model_validate(values, context={"own_code": own_code})
    except ValidationError as error:
        raise ConfigError(_one_line(error)) from None


def with_task(config: Config, name: str) -> Config:
    """Return the config with another task and the options that it has; what does not go together is a ConfigError."""
    return _with(config, task={**config.task.model_dump(), "name": name})


def with_agents(config: Config, agents: int) -> Config:
    """Return the config with so many agents, where it names no number. The agents of a round and the rounds follow; a
    release of statistics is of all agents."""
    given = config.federation
    if "agents" in given.model_fields_set:
        return config
    federation = {**_given(given), "agents": agents}
    if config.task.name == "statistics":
        federation["per_round"] = agents
    found = _with(config, federation=federation)
    return found.model_copy(
        update={"run": config.run.model_copy(update={"chosen": sorted({*config.run.chosen, "federation.agents"})})}
    )


def _with(config: Config, **sections: Mapping[str, Any]) -> Config:
    try:
        return Config.model_validate({**dict(config), **sections})
    except ValidationError as error:
        raise ConfigError(_one_line(error)) from None


def to_toml(config: Config, *, given_only: bool = False) -> str:
    """Return the config with every default written out, or (`given_only`) with what somebody set; keys that are unset
    are left out."""
    return tomli_w.dumps(config.model_dump(exclude_none=True, exclude_unset=given_only))


def _read(path: Path) -> dict[str, Any]:
    values = toml.read(path, "a TOML config")
    if not values:
        raise ConfigError(f"{path} is empty; a config needs at least a [privacy] section with an epsilon")
    return values


def _apply(values: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    *tables, name = key.strip().split(".")
    if not (equals and tables and all(tables) and name):
        raise ConfigError(f"--set {override}: it must read section.key=value, as in algorithm.compression=0.05")
    for i, table in enumerate(tables, 1):
        inner = values.get(table, {})
        if not isinstance(inner, Mapping):
            raise ConfigError(f"{'.'.join(tables[:i])} must be a table of keys, not a single value")
        values[table] = dict(inner)  # what was given stays as it is
        values = values[table]
    if text.strip() == "none":
        values.pop(name, None)
        return
    try:
        value = toml.parse(f"value = {text.strip()}")["value"]
    except ConfigError:
        value = text.strip()
    values[name] = value


def _with_code(values: dict[str, Any], folder: Path) -> None:
    """Where functions of the user's own are named, they lie in `folder`, beside the file that names them. Every file of
    the run says so, and it can be resumed from anywhere."""
    names = [_given(values.get(section)).get("name") for section in ("data", "model", "task", "algorithm")]
    names.append(_given(values.get("task")).get("metric"))
    own = any(isinstance(name, str) and is_plugin(name) and not name.startswith(GIVEN) for name in names)
    # A run's own folder may be somebody else's, and is no place to import from: its config says where it was.
    of_a_run = any((folder / name).exists() for name in ("summary.json", "checkpoint", "metrics.jsonl"))
    if own and not of_a_run and isinstance(run := values.setdefault("run", {}), dict):
        run.setdefault("code", str(folder.absolute()))


def _one_line(error: ValidationError) -> str:
    return first_of(
        [
            tables.describe_error(item["type"], item["loc"][2:], item["msg"], item.get("input"))
            if item["loc"][:2] == ("data", "table")
            else describe_detail(item, Config)
            for item in error.errors()
        ]
    )


def check_combination(config: Config) -> None:
    """Raise a ValueError of one line that names the keys."""
    federation, algorithm, privacy = config.federation, config.algorithm, config.privacy
    if federation.per_round > federation.agents:
        raise ValueError(
            f"federation.per_round is {federation.per_round}; it must not exceed federation.agents = "
            f"{federation.agents}"
        )
    check_task_options(config.task)
    _check_statistics(config)
    _check_table(config.data)
    _check_workers(config.run)
    for key in ("rounds", "expected_gains"):
        if getattr(config.tuning, key) is not None and config.tuning.candidates is None:
            raise ValueError(f"tuning.{key} is for tuning.candidates, and there are none: name some, or leave it out")
    try:
        known = algorithm_of(config)
    except ConfigError as error:
        raise ValueError(str(error)) from None
    _check_members(federation, privacy)
    _check_optimizer(config)
    mechanism = known.mechanism
    check_options(algorithm.options, known)
    if algorithm.compression != 1 and not known.sparse:
        raise ValueError(
            f"algorithm.compression is {algorithm.compression}; {algorithm.name} uploads every coordinate: only 1.0"
        )
    if isinstance(algorithm.compression, list) and algorithm.mask != "fixed":
        raise ValueError(
            f"algorithm.compression is a list, which is for algorithm.mask 'fixed'; the mask is {algorithm.mask!r}"
        )
    if mechanism is not None:
        mechanism.check(flat(config))
        return
    if algorithm.coding == "int":
        raise ValueError(
            f"algorithm.coding is 'int', whose step is a share of the noise; {algorithm.name} has none: 'f32'"
        )
    for key, path in (("ledger", config.run.ledger), ("policy", config.run.policy)):
        if path is not None:
            raise ValueError(
                f"run.{key} is {path!r}; {algorithm.name} releases what no ledger can count and no policy allows: "
                f"leave it out (--set run.{key}=none)"
            )


def check_options(options: dict[str, Any], algorithm: Registered) -> None:
    """Raise a ValueError where `[algorithm.options]` is not what the algorithm reads; fill in its defaults."""
    options.update(_checked_options("algorithm.options", options, algorithm.options, algorithm.name))


def check_task_options(task: Task) -> None:
    """Raise a ValueError where `[task.options]` is not what the task reads."""
    _checked_options("task.options", task.options, OPTIONS.get(task.name), f"task {task.name!r}")


def _checked_options(key: str, options: dict[str, Any], model: type[BaseModel] | None, owner: str) -> Mapping[str, Any]:
    """Return the options with the defaults of their owner; raise a ValueError where it does not read them."""
    if model is None:
        if options:
            raise ValueError(f"{key} has {', '.join(options)}; {owner} has no options: leave it out")
        return {}
    try:
        return model.model_validate(options).model_dump(exclude_none=True)
    except ValidationError as error:
        raise ValueError(describe_invalid(error, model, f"{key}.")) from None


# A release of statistics is one step from θ = 0 on every record (learning/tasks/totals.py).
STATISTICS: dict[str, Any] = {
    "federation.rounds": 1,
    "model.name": "totals",
    "algorithm.name": "fedspa",
    "algorithm.compression": 1.0,
    "algorithm.local_steps": 1,
    "algorithm.local_lr": 1.0,
    "algorithm.local_optimizer": "sgd",
    "algorithm.schedule": "constant",
    "algorithm.warmup": 0,
    "algorithm.server": "average",
    "algorithm.server_lr": 1.0,
    "algorithm.ema": 0.0,
    "privacy.sampling": "poisson",
    "privacy.clip": "l2",
    "privacy.clip_value": 1.0,
}


def _check_statistics(config: Config) -> None:
    """Raise a ValueError where a release of statistics would not be what it says, or something else has its model."""
    if config.task.name != "statistics":
        if config.model.name == STATISTICS["model.name"]:
            raise ValueError("model.name is 'totals', which is for task.name 'statistics'; name another model")
        return
    values = flat(config)
    for key, needed in STATISTICS.items():
        if values[key] != needed:
            raise ValueError(
                f"{key} is {values[key]!r}; for task.name 'statistics' it must be {needed!r} (`fedspa stats` sets it)"
            )


def _check_optimizer(config: Config) -> None:
    """Raise a ValueError where no local steps are taken that an optimiser could change."""
    algorithm = config.algorithm
    if algorithm.local_optimizer == "sgd" or algorithm_of(config).local_steps:
        return
    sums = config.privacy.adversary == "secure-aggregation"
    what = "under secure aggregation" if sums else f"for {algorithm.name}"
    raise ValueError(
        f"algorithm.local_optimizer is {algorithm.local_optimizer!r}; {what} it must be 'sgd': an agent takes one step"
    )


def _check_members(federation: Federation, privacy: Privacy) -> None:
    """Raise a ValueError where sums over a round's agents would hide none of them, or nobody sees sums."""
    if privacy.adversary == "local":
        for key, unset in (("members", None), ("colluders", 0), ("recovery", False)):
            if getattr(privacy, key) != unset:
                raise ValueError(
                    f"privacy.{key} is {getattr(privacy, key)}, which is for privacy.adversary 'secure-aggregation'; "
                    "it is 'local': leave it out"
                )
        return
    if federation.per_round < 2:
        raise ValueError(
            f"federation.per_round is {federation.per_round}; privacy.adversary 'secure-aggregation' hides an agent in "
            "a sum over 2 or more"
        )
    if privacy.members is not None and privacy.members > federation.per_round:
        raise ValueError(
            f"privacy.members is {privacy.members}; it must not exceed federation.per_round = {federation.per_round}"
        )
    members = federation.per_round if privacy.members is None else privacy.members
    if privacy.colluders >= members:
        raise ValueError(
            f"privacy.colluders is {privacy.colluders}; it must be below the fewest agents that are added up, "
            f"{members} (privacy.members, or federation.per_round): the noise of the others is what counts"
        )
    needed = threshold_of(federation.per_round, privacy.colluders)
    if privacy.recovery and not needed <= members < federation.per_round:
        raise ValueError(
            f"privacy.recovery is true and privacy.members {members}; it must be from {needed} to "
            f"{federation.per_round - 1}: more than half of federation.per_round = {federation.per_round} and "
            f"privacy.colluders = {privacy.colluders} together must agree on whom a sum is of, and fewer than all"
        )


def _check_workers(run: Run) -> None:
    """Raise a ValueError where one GPU would have several workers."""
    if run.workers > 1 and run.device.startswith("cuda:"):
        raise ValueError(
            f"run.device is {run.device!r}; each of run.workers = {run.workers} has a GPU of its own: 'cuda'"
        )


def _check_table(data: Data) -> None:
    """Raise a ValueError where a table's keys stand beside other data, or other data's beside a table."""
    if not is_table(data.name):
        if data.table is not None:
            raise ValueError(f"data.table is for a table (.csv, .parquet); data.name is {data.name!r}: leave it out")
        return
    schema = data.schema_of_table
    if schema is None:
        raise ValueError(
            f"data.name is {data.name!r}, a table; what its columns are must stand in [data.table.columns] "
            "(docs/data.md)"
        )
    if data.features is not None:
        raise ValueError(f"data.features is {data.features!r}, which is for images; data.name is a table: leave it out")
    whose = None if schema.agent is None else f"the column {schema.agent!r} of data.table.agent says who holds a record"
    if is_pattern(data.name):
        if whose is not None:
            raise ValueError(f"data.name is {data.name!r}, a file per agent, and {whose}: leave one of them out")
        whose = "each file is one agent's"
    if whose is not None and data.partition != "iid":
        raise ValueError(f"data.partition is {data.partition!r}; {whose}: leave one of them out")


# The plan of a config: calibrated before a run, or made again from what its ledger holds, by the same mechanism.


def cap_of(config: Config) -> int:
    """Return the most rounds that an agent takes part in."""
    federation = config.federation
    return cap_for(federation.participation, federation.agents, federation.per_round, federation.rounds, federation.cap)


# A user's own algorithms that this process has imported, by name and folder.
_OWN: dict[tuple[str, str | None], Registered] = {}


def import_own_algorithm(config: Config) -> None:
    """Import the algorithm that `algorithm.name = "package.module:NAME"` names, as the other functions of a user's own
    are: from an installed package, beside the config, or from the current folder."""
    name, code = config.algorithm.name, config.run.code
    if not plugin.is_plugin(name) or name in registry.offered():
        return
    found = plugin.imported(name, key="algorithm.name", error=ConfigError, code=code)
    if not isinstance(found, Registered):
        raise ConfigError(
            f"algorithm.name = {name!r} is a {type(found).__name__}; it must be a fedspa.algorithms.Algorithm"
        )
    _OWN[name, code] = registry.add(name, found)


def algorithm_of(config: Config) -> Registered:
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
    """Return the plan whose participations are `event`; of the config, only what an event does not say is read."""
    if config.data.person is not None and event.unit != "person":
        raise PrivacyError(
            f"the ledger says that each {event.unit} was protected, the config names data.person: rely on no ε of this "
            "page"
        )
    return _mechanism(config).of_event(event, _asked(config, dimension, active, event.records, event.unit))


def calibrated_plan(config: Config, dimension: int, active: int, records: int, unit: Unit) -> Plan:
    """Return the plan of a run that is to start, with the least noise that its ε allows."""
    return _mechanism(config).calibrated(_asked(config, dimension, active, records, unit))


def flat(config: Config) -> dict[str, Any]:
    """Its values by `section.key`; of a table's columns by `data.table.columns.age.range`."""
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


def _asked(config: Config, dimension: int, active: int, records: int, unit: Unit) -> PlanRequest:
    algorithm, privacy = config.algorithm, config.privacy
    return PlanRequest(
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
        epsilon=privacy.epsilon,
        options=flat(config),
        unit=unit,
        cohort=cohort_of(config),
    )
