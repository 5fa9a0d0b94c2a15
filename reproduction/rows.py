"""A table of the paper as data: its rows, what is printed in them, and the configs that run them.

The file is TOML (tables/*.toml). Each row has up to three trials: `published` has the paper's hyperparameters and its
Theorem 1's noise, which proves nothing; `verified` has a sound guarantee on the paper's model; `tuned` has the same
guarantee and the best settings known here, the model included. A trial names a config, relative to the table's file,
and the keys in which the row differs from it. A row's `adversary` says whom its ε is to hold against. Nothing is
printed of a row that the paper does not have.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args

from pydantic import Field, ValidationError

from fedspa import configs, toml
from fedspa.errors import ConfigError
from fedspa.mechanisms.base import Adversary
from fedspa.runs.config import Config, load
from fedspa.runs.sections import Section

TrialKind = Literal["published", "verified", "tuned"]
TRIAL_KINDS: tuple[TrialKind, ...] = get_args(TrialKind)
# Seeds of tables and curves count from here, beyond all that settings were tried on.
FIRST_SEED = 2000
# And from here where someone tries other settings by --set: those above stay fresh for what is printed.
TRIED_SEED = 900
_LABELS = {"fedspa": "Fed-SPA", "cpsgd": "cpSGD", "dp-fed": "DP-Fed", "fedavg": "FedAvg"}


def label(algorithm: str, adversary: Adversary) -> str:
    """Names a row for readers."""
    return _LABELS[algorithm] + ("" if adversary == "local" else ", secure aggregation")


class Printed(Section):
    """What stands in the paper's row: accuracy in %, cost in MB; None for its dashes."""

    accuracy: float | None = None
    cost: float | None = None
    epsilon: float | None = None
    diverged: bool = False


class Trial(Section):
    """A config, and what this row changes in it (as in `fedspa run --set`); `quick` where the table's does not fit.

    `seeds`: it runs with so many at least. What is compared from row to row needs its error bars.
    """

    config: str
    set: list[str] = Field(default_factory=list)
    quick: list[str] | None = None
    seeds: int = Field(default=1, ge=1, le=1000)


class Row(Section):
    """One algorithm at one compression ratio p, against one adversary."""

    algorithm: Literal["fedspa", "cpsgd", "dp-fed", "fedavg"]
    compression: float = Field(gt=0, le=1)
    adversary: Adversary = "local"
    printed: Printed = Printed()
    published: Trial | None = None
    verified: Trial | None = None
    tuned: Trial | None = None

    @property
    def key(self) -> str:
        """Names the row in --rows and in folders."""
        return f"{self.algorithm}-{self.compression:g}" + ("" if self.adversary == "local" else f"-{self.adversary}")

    def cell(self, setting: TrialKind) -> str:
        """Names one of its cells there."""
        return f"{self.key}-{setting}"

    @property
    def trials(self) -> dict[TrialKind, Trial]:
        found = {"published": self.published, "verified": self.verified, "tuned": self.tuned}
        return {setting: trial for setting in TRIAL_KINDS if (trial := found[setting]) is not None}


class TableSpec(Section):
    """A whole table, and `curve`, the config of its half of Figure 1.

    `quick` makes every row small; `stand_in` is data for that where there are no files.
    """

    title: str
    data: str
    note: str = ""
    quick: list[str]
    stand_in: str
    curve: str
    row: list[Row] = Field(min_length=1)


HERE = Path(__file__).parent


def table_names() -> list[str]:
    return sorted(path.stem for path in (HERE / "tables").glob("*.toml"))


def find_table(name: str) -> Path:
    """Return the file of a table: the path of a TOML file, or `mnist` or `cifar10`."""
    if name in table_names():
        return HERE / "tables" / f"{name}.toml"
    if not Path(name).exists():
        raise ConfigError(
            f"there is no table {name!r}; allowed: {', '.join(table_names())}, or the path of a TOML file"
        )
    return Path(name)


def find_config(name: str) -> Path:
    """Return the file of a config of the reproduction, of one that fedspa ships, or the path of a TOML file."""
    own = {path.stem: path for path in (HERE / "configs").glob("*.toml")}
    return own[name] if name in own else configs.find(name)


def read(path: Path) -> TableSpec:
    try:
        spec = TableSpec.model_validate(toml.read(path, "a table's TOML file"))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"{path} is no table: {where}: {first['msg']}") from None
    keys = [row.key for row in spec.row]
    if len(keys) != len(set(keys)):
        raise ConfigError(f"{path} is no table: a row is in it twice ({', '.join(sorted(keys))})")
    return spec


def select(spec: TableSpec, wanted: str | None) -> list[Row]:
    """The rows that a filter like `fedspa,dp-fed` or `fedspa-0.05` keeps, with the cells that one like
    `fedspa-0.05-tuned` does; all without one."""
    if wanted is None:
        return list(spec.row)
    words = {word.strip(): False for word in wanted.split(",") if word.strip()}
    kept = []
    for row in spec.row:
        whole = {row.key, row.algorithm} & words.keys()
        cells = {setting for setting in row.trials if row.cell(setting) in words}
        words |= dict.fromkeys([*whole, *map(row.cell, cells)], True)
        if whole:
            kept.append(row)
        elif cells:
            kept.append(row.model_copy(update=dict.fromkeys(row.trials.keys() - cells)))
    for word, known in words.items():
        if not known:
            allowed = ", ".join(dict.fromkeys([*(row.algorithm for row in spec.row), *(row.key for row in spec.row)]))
            last = spec.row[0].cell([*spec.row[0].trials][-1])
            raise ConfigError(f"--rows: there is no row {word!r}; allowed: {allowed}, or a cell of one, as {last}")
    if not kept:
        raise ConfigError("--rows is empty; leave it away for all rows")
    return kept


def trial_config(path: Path, trial: Trial, overrides: Sequence[str]) -> Config:
    """The config of one run: the trial's file, what the row changes, then what the caller does."""
    return load(config_of(path, trial.config), [*trial.set, *overrides])


def config_of(table: Path, name: str) -> Path:
    """Return the file of a config that a table names: relative to the table's own file, or by its name."""
    return table.parent / name if name.endswith(".toml") else find_config(name)
