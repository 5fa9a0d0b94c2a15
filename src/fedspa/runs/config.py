"""The configuration of a run: TOML in, checked values out, every error one line that names its key.

`sections` has the keys.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from importlib import resources
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import ValidationError, ValidationInfo, model_validator

from fedspa import toml
from fedspa.data import columns as tables
from fedspa.data.columns import Schema
from fedspa.data.plugin import GIVEN, is_plugin
from fedspa.errors import ConfigError, quoted
from fedspa.runs import combinations
from fedspa.runs.plans import algorithm_of, import_own_algorithm
from fedspa.runs.section import Section
from fedspa.runs.sections import Algorithm, Data, Federation, Model, Privacy, Run, Task
from fedspa.runs.tuning_section import Tuning


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
        """Whether the algorithm has an ε at all."""
        return algorithm_of(self).private

    @model_validator(mode="before")
    @classmethod
    def _task_of_a_table(cls, values: Any) -> Any:
        """Where the task has no name, a table's targets say it, so that every file of the run does."""
        if not isinstance(values, Mapping):
            return values
        data, task = _given(values.get("data")), _given(values.get("task"))
        if "columns" in data and "name" not in task and isinstance(values.get("task", {}), Mapping | Task):
            with suppress(ConfigError):  # it is told where the columns are read
                own = tables.checked({key: data[key] for key in Schema.model_fields if key in data})
                return {**values, "task": {**task, "name": own.task}}
        return values

    @model_validator(mode="after")
    def _fits_together(self, info: ValidationInfo) -> Config:
        try:
            if info.context is None or info.context["own_code"]:
                import_own_algorithm(self)
        except ConfigError as error:
            raise ValueError(str(error)) from None
        combinations.check(self)
        return self


def _given(section: object) -> dict[str, Any]:
    """The keys of a section that somebody set."""
    if isinstance(section, Section):
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
    """The config with another task and the options that it has; what does not go together is a ConfigError."""
    try:
        return Config.model_validate({**dict(config), "task": {**config.task.model_dump(), "name": name}})
    except ValidationError as error:
        raise ConfigError(_one_line(error)) from None


def to_toml(config: Config) -> str:
    """The config with every default written out; keys that are unset are left out."""
    return tomli_w.dumps(config.model_dump(exclude_none=True))


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
    own = any(isinstance(name, str) and is_plugin(name) and not name.startswith(GIVEN) for name in names)
    # A run's own folder may be somebody else's, and is no place to import from: its config says where it was.
    if own and not _is_a_runs(folder) and isinstance(run := values.setdefault("run", {}), dict):
        run.setdefault("code", str(folder.absolute()))


def _is_a_runs(folder: Path) -> bool:
    return any((folder / name).exists() for name in ("summary.json", "checkpoint", "metrics.jsonl"))


def _one_line(error: ValidationError) -> str:
    return "; ".join(_describe(item["type"], item["loc"], item["msg"], item.get("input")) for item in error.errors())


def _describe(kind: str, location: tuple[int | str, ...], message: str, given: Any) -> str:
    if location[:2] == ("data", "columns"):
        return tables.told(kind, location[1:], message, given)
    key = ".".join(str(part) for part in location)
    if kind == "extra_forbidden":
        owner: Any = Config
        for part in location[:-1]:
            owner = owner.model_fields[part].annotation
        return f"unknown key {key}; allowed: {', '.join(sorted(owner.model_fields))}"
    if kind == "value_error":
        message = message.removeprefix("Value error, ")
        return f"{key} is {quoted(given)}; {message}" if key else message
    return f"{key or 'the config'} is {quoted(given)}; {message.replace('Input should be', 'it must be', 1)}"
