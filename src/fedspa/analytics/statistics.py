"""`fedspa.statistics`: counts, shares, means and quantiles of the agents' tables, as one private release per agent."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from fedspa import durable
from fedspa.analytics.estimates import Release, estimates, released, typical
from fedspa.data.columns import Number, Schema
from fedspa.data.dataset import Dataset
from fedspa.errors import ConfigError, os_errors_as
from fedspa.learning.options import BALANCED
from fedspa.learning.tasks.totals import Totals
from fedspa.running import run
from fedspa.runs import config as configs
from fedspa.runs.config import STATISTICS, Config
from fedspa.runs.guarantee import Guarantee, promised, statement
from fedspa.runs.setup import prepare

# Of the config that the statistics are asked for, only what says whose records they are and what protects them.
_KEPT = {
    "federation": ("agents",),
    "data": None,
    "privacy": ("epsilon", "noise_multiplier", "delta", "neighbours", "noise", "adversary", "colluders", "members"),
    "run": ("seed", "threads", "workers", "code", "ledger", "policy"),
}

NO_EPSILON = (
    "--epsilon is missing: what the release may cost each record or person, as in --epsilon 0.5 (Python: epsilon=0.5); "
    "privacy.epsilon of the config is the training's"
)


@dataclass(frozen=True)
class Statistics(Release):
    """Released statistics, with what they cost.

    Attributes:
        estimates: Every number with its 95 % interval: those of all sites together first, then each site's where the
            server saw its upload.
        summary: The run's summary: ε, δ, the accountant and the settings, as of `fedspa.run`.
        folder: The run's folder; None where nothing was released yet and the numbers are expectations.
        schema: The columns.

    Examples:
        >>> import fedspa
        >>> found = fedspa.Statistics.load("runs/stats")  # doctest: +SKIP
        >>> found.value("mean", "age")  # doctest: +SKIP
        38.6
    """

    schema: Schema

    @classmethod
    def load(cls, run: Path | str) -> Statistics:
        """Return the statistics of a run that finished earlier, in the simulator or on Flower.

        Args:
            run: The run's folder.

        Returns:
            Its statistics: nothing is released again.

        Raises:
            ConfigError: The folder holds no finished run, or one that released no statistics.
        """
        found = released(Path(run))
        if found.schema is None:
            raise ConfigError(f"the run in {run} evaluated a model; `fedspa evaluate {run}` shows it")
        return cls(found.estimates, found.summary, found.folder, found.schema)

    def write_schema(self, path: Path | str) -> None:
        """Write the table's schema with released means and standard deviations, so that training standardises by them.

        Args:
            path: The TOML file, with [data.table]; one that is there is replaced.
        """
        person = {} if self.schema.person is None else {"person": self.schema.person}
        with os_errors_as(ConfigError, f"{path} cannot be written"):
            durable.replace_text(Path(path), self.paid + tomli_w.dumps({"data": {**person, "table": self._table()}}))

    @property
    def paid(self) -> str:
        """Return a comment of TOML: what released the means and deviations, and which entries of the ledger paid."""
        from fedspa.report.record import read
        from fedspa.runs.rundir import ledger_of

        assert self.folder is not None
        run = read(self.folder)
        entries = [entry.sequence for entry in run.participations.entries if entry.sequence is not None]
        ledger = ledger_of(self.folder, run.config)
        where = f", entries {min(entries)} to {max(entries)} of {ledger}" if entries else ""
        return f"# mean and deviation were released by the run in {self.folder}{where}: {statement(self.summary)}\n"

    def standardised(self, config: Config) -> Config:
        """Return a config that trains on columns which are standardised by what was released. Where
        `task.options.weights` is "balanced" and the frequencies of the classes were released, these give the weights.

        Args:
            config: A config with the same table.

        Returns:
            The config, with another [data.table].

        Raises:
            ConfigError: Too few records of a class were found to give it a weight.
        """
        values = config.model_dump(exclude_none=True, exclude_unset=True)
        task = values.get("task", {})
        if task.get("options", {}).get("weights") == BALANCED and (weights := self._weights()):
            values["task"] = {**task, "options": {**task["options"], "weights": weights}}
        return configs.load({**values, "data": {**values["data"], "table": self._table()}})

    def _weights(self) -> list[float]:
        """Return weights by which every class counts the same, by released frequencies; none where there are none."""
        target, names = next(iter(self.schema.targets)), self.schema.class_names or ()
        found = {
            each.statistic: each for each in self.estimates if (each.site, each.group, each.column) == ("", "", target)
        }
        counts = [found[f"count of {name}"] for name in names if f"count of {name}" in found]
        if len(counts) < len(names):
            return []
        for name, each in zip(names, counts):
            if not each.value or each.value <= each.error:
                raise ConfigError(
                    f"task.options.weights is 'balanced', and too few records of class {name!r} were released to weigh "
                    "them: give the weights as numbers, or release again with a larger ε (this one stays paid)"
                )
        values = [each.value or 0.0 for each in counts]
        return [float(f"{sum(values) / (len(values) * value):.3g}") for value in values]

    def _table(self) -> dict[str, Any]:
        columns = {}
        for name, column in self.schema.columns.items():
            values = column.model_dump(exclude_none=True)
            if isinstance(column, Number) and not column.target:
                values |= self._released(name, column)
            columns[name] = values
        return self.schema.model_dump(exclude_none=True, exclude={"columns", "person"}) | {"columns": columns}

    def _released(self, name: str, column: Number) -> dict[str, float]:
        found = {each.statistic: each for each in self.estimates if (each.site, each.column) == ("", name)}
        mean, deviation = found.get("mean"), found.get("standard deviation")
        if mean is None or deviation is None or mean.value is None or deviation.value is None:
            return {}
        # A deviation that the noise made too small would blow its column up.
        least = (column.range[1] - column.range[0]) / 100
        return {"mean": mean.value, "deviation": max(deviation.value, deviation.error, least)}


def statistics(
    config: Config | Mapping[str, Any] | Path | str,
    *,
    data: Dataset | None = None,
    epsilon: float | None = None,
    columns: Sequence[str] | None = None,
    bins: int = 20,
    by_class: bool = False,
    shares: Mapping[str, float] | None = None,
    out: Path | str | None = None,
) -> Statistics:
    """Release statistics of the agents' tables: one Gaussian release per agent, paid for in its ledger.

    Args:
        config: A config whose data is a table. What it says of training is left aside.
        data: Records in place of those that the config names, made by `from_table`.
        epsilon: ε of the release; only a config with `privacy.noise_multiplier` may leave it out.
        columns: Columns of the schema; all of them if nothing is said.
        bins: Parts of a number's public range, for its histogram and quantiles.
        by_class: Whether each statistic is taken for each class of the target by itself.
        shares: Weights of columns; a column of weight 4 has half its error, and all others pay for it.
        out: The run's folder; a new one under runs/ if nothing is said.

    Returns:
        Every number with its 95 % interval.

    Raises:
        FedspaError: Something that was given is not allowed, or the budget does not cover it.

    Examples:
        >>> import fedspa
        >>> found = fedspa.statistics("config.toml", epsilon=0.5)  # doctest: +SKIP
        >>> found.write_schema("schema.toml")  # doctest: +SKIP
    """
    asked = release_config(loaded(config, epsilon), release_options(columns, bins, by_class, shares), epsilon, out)
    return Statistics.load(run(asked, data=data, progress=False).folder)


def loaded(config: Config | Mapping[str, Any] | Path | str, epsilon: float | None) -> Config:
    """Return the checked config, whose own ε may be missing where one is given."""
    if isinstance(config, Config):
        return config
    return configs.load(config, () if epsilon is None else spending(epsilon))


def spending(epsilon: float) -> list[str]:
    """Return the overrides of a config by which it spends ε."""
    return ["privacy.noise_multiplier=none", f"privacy.epsilon={float(epsilon)}"]


def expected(asked: Config) -> Statistics:
    """Return the errors to expect of a release with this config, before anything is spent: of sites as large as the
    largest, whose records are spread evenly. No record has a part in the numbers."""
    job = prepare(asked)
    task, plan, agents = job.server.model.task, job.plan, job.config.federation.agents
    assert isinstance(task, Totals)
    assert plan is not None
    schema = job.schema
    assert schema is not None
    records = max(len(held) for held in job.holdings)
    noise = plan.noise_multiplier
    found = estimates(
        task.layout, schema, typical(task.layout, records * agents), noise * math.sqrt(agents), "", plan.unit
    )
    if plan.aggregation is None:
        found += estimates(task.layout, schema, typical(task.layout, records), noise, "each site", plan.unit)
    guarantee = Guarantee(plan)
    guarantee.count_participation([0])
    return Statistics(found, {**promised(plan, guarantee, asked.privacy.noise), "epsilon_total": None}, None, schema)


def release_config(config: Config, options: Mapping[str, Any], epsilon: float | None, out: Path | str | None) -> Config:
    """Return the config of a release: that of a training, with what it says of training left aside."""
    if epsilon is None and config.privacy.noise_multiplier is None:
        raise ConfigError(NO_EPSILON)
    values: dict[str, dict[str, Any]] = {}
    for section, keys in _KEPT.items():
        given = getattr(config, section).model_dump(exclude_unset=True)
        values[section] = {key: value for key, value in given.items() if keys is None or key in keys}
    for key, value in STATISTICS.items():
        section, _, name = key.partition(".")
        values.setdefault(section, {})[name] = value
    if "agents" in values["federation"]:
        values["federation"]["per_round"] = config.federation.agents
    values["task"] = {"name": Totals.name, "options": dict(options)}
    if epsilon is not None:
        values["privacy"] |= {"epsilon": epsilon}
        values["privacy"].pop("noise_multiplier", None)
    if config.privacy.adversary == "local":
        values["algorithm"]["coding"] = "f32"  # the noise is known to the last digit then
    if out is not None:
        values["run"]["out"] = str(out)
    return configs.load(values)


def release_options(
    columns: Sequence[str] | None, bins: int, by_class: bool, shares: Mapping[str, float] | None
) -> dict[str, Any]:
    """Return [task.options] of a release."""
    found: dict[str, Any] = {"bins": bins, "by_class": by_class, "shares": dict(shares or {})}
    return found if columns is None else {**found, "columns": list(columns)}
