"""Totals of the records' statistics, as a task: a private step on a linear model releases them.

A record's statistics are a vector v of norm 1 at most. The loss is −⟨θ, v⟩, so that a record's gradient is −v whatever
θ is, and one private step from θ = 0 over all records leaves θ = (Σ v + noise) / B. Sampling, clipping, noise, ledger,
coding and secure aggregation are those of a training, and nothing here decides privacy: a vector that were longer than
1 would be clipped as a gradient is. Where persons are protected, a person's vector is the mean over their records.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fedspa.data.columns import Category, Flag, Number, Schema
from fedspa.errors import ConfigError, did_you_mean
from fedspa.examples import Tree
from fedspa.learning.options import StatisticsOptions
from fedspa.learning.tasks.base import Measure, NoScores, Task

Kind = Literal["count", "categories", "histogram", "moments"]
MOST_STATISTICS = 1_000_000


@dataclass(frozen=True, slots=True)
class Block:
    """One block of a record's vector, of norm `weight` at most, made from the features `start` to `stop`.

    `count`: 1 for every record. `categories`: the features themselves, at most one of which is 1. `moments`: a number t
    in [-1, 1] and its square. `histogram`: which of `size` equal parts of [-1, 1] holds t, or the last place where it
    is missing. A number is feature · `factor` + `shift`; `missing` is the feature that says it is missing, −1 where
    none does. With `of_target` the features are those of the target, a class number or numbers.
    """

    column: str
    kind: Kind
    weight: float
    start: int = 0
    stop: int = 0
    size: int = 1
    missing: int = -1
    factor: float = 1.0
    shift: float = 0.0
    of_target: bool = False

    def vectors(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the block of each record, (records, size)."""
        if self.kind == "count":
            return self.weight * torch.ones_like(x[:, :1])
        if self.of_target and not y.is_floating_point():
            return self.weight * _one_hot(y, self.size).to(x.dtype)
        features = y.reshape(len(y), -1).to(x.dtype) if self.of_target else x
        if self.kind == "categories":
            return self.weight * features[:, self.start : self.stop]
        t = (features[:, self.start] * self.factor + self.shift).clamp(-1, 1)
        there = 1 - features[:, self.missing] if self.missing >= 0 else torch.ones_like(t)
        if self.kind == "moments":
            return self.weight / math.sqrt(2) * torch.stack([t * there, t * t * there], dim=1)
        bins = self.size - (self.missing >= 0)
        part = ((t + 1) * (bins / 2)).clamp(0, bins - 1).floor()
        if self.missing >= 0:
            part = part * there + bins * (1 - there)
        return self.weight * _one_hot(part, self.size).to(x.dtype)


def _one_hot(numbers: Tensor, size: int) -> Tensor:
    return numbers.unsqueeze(1) == torch.arange(size, device=numbers.device)


@dataclass(frozen=True)
class Layout:
    """The blocks of a record's vector; `classes` is more than 1 where every statistic is taken per class."""

    blocks: tuple[Block, ...]
    classes: int = 1

    @property
    def width(self) -> int:
        return self.classes * sum(block.size for block in self.blocks)

    @classmethod
    def of(cls, schema: Schema, given: Mapping[str, Any]) -> Layout:
        """Return the layout that a [task.options] asks for of a table's columns."""
        options = StatisticsOptions.model_validate(dict(given))
        columns = schema.counted
        wanted = list(columns) if options.columns is None else list(options.columns)
        for name in (*wanted, *options.shares):
            if name not in columns:
                raise ConfigError(
                    f"task.options names the column {name!r}, which the schema has no use for; it has "
                    f"{', '.join(columns)}{did_you_mean(name, columns)}"
                )
        if unused := [name for name in options.shares if name not in wanted]:
            raise ConfigError(f"task.options.shares names {unused[0]!r}, which task.options.columns leaves out")
        parts = {name: _blocks(name, columns[name], schema, options.bins) for name in dict.fromkeys(wanted)}
        # Each column has its share of the squared norm, and the count of the records an ordinary one.
        shares = {name: options.shares.get(name, 1.0) * len(blocks) for name, blocks in parts.items()}
        whole = 1.0 + sum(shares.values())
        weighted = [Block("", "count", math.sqrt(1 / whole))]
        for name, blocks in parts.items():
            weight = math.sqrt(shares[name] / len(blocks) / whole)
            weighted += [Block(**{**asdict(block), "weight": weight}) for block in blocks]
        found = cls(tuple(weighted), (schema.classes or 1) if options.by_class else 1)
        if options.by_class and schema.classes is None:
            raise ConfigError("task.options.by_class is true; the schema's targets are no classes: leave it out")
        if found.width > MOST_STATISTICS:
            raise ConfigError(
                f"these columns have {found.width} statistics; at most {MOST_STATISTICS} can be released: name fewer "
                "columns, or fewer bins"
            )
        return found

    @classmethod
    def parse(cls, text: str) -> Layout:
        """Read a layout as a server announces it; raise a ConfigError where it is none."""
        try:
            values = json.loads(text)
            found = cls(tuple(Block(**each) for each in values["blocks"]), int(values["classes"]))
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise ConfigError("task.options.layout is no layout of statistics; the server writes it") from error
        if not found._valid() or not 1 <= found.width <= MOST_STATISTICS:
            raise ConfigError("task.options.layout is no valid layout of statistics; the server writes it")
        return found

    def text(self) -> str:
        return json.dumps({"blocks": [asdict(block) for block in self.blocks], "classes": self.classes})

    def vectors(self, x: Tensor, y: Tensor) -> Tensor:
        """Return each record's vector, (records, width)."""
        x = x.reshape(len(x), -1)
        found = torch.cat([block.vectors(x, y) for block in self.blocks], dim=1)
        if self.classes == 1:
            return found
        of_class = _one_hot(y, self.classes).to(found.dtype)
        return (of_class[:, :, None] * found[:, None, :]).reshape(len(x), self.width)

    def _valid(self) -> bool:
        return bool(self.blocks) and all(
            block.kind in ("count", "categories", "histogram", "moments")
            and all(type(n) is int and -1 <= n <= MOST_STATISTICS for n in (block.start, block.stop, block.missing))
            and type(block.size) is int
            and 1 <= block.size <= MOST_STATISTICS
            and all(isinstance(n, float) and math.isfinite(n) for n in (block.weight, block.factor, block.shift))
            and 0 < block.weight <= 1
            for block in self.blocks
        )


def _blocks(name: str, column: Number | Category | Flag, schema: Schema, bins: int) -> list[Block]:
    """Return the blocks of a column, whose weights are still 1."""
    features, of_target = schema.inputs, column.target
    lacking = not of_target and features[name].missing == "indicator"
    start = 0
    for other, each in (schema.targets if of_target else features).items():
        if other == name:
            break
        start += 1 if of_target else each.width()
    missing = start + features[name].width() - 1 if lacking else -1
    if isinstance(column, Number):
        low, high = column.range
        half = (high - low) / 2
        place: dict[str, Any] = {
            "start": start,
            "stop": start + 1,
            "missing": missing,
            "factor": column.scale / half,
            "shift": (column.offset - low) / half - 1,
            "of_target": of_target,
        }
        return [
            Block(name, "moments", 1.0, size=2, **place),
            Block(name, "histogram", 1.0, size=bins + (missing >= 0), **place),
        ]
    if of_target:
        places = len(schema.targets) if schema.task == "multi-label" else schema.classes or 2
        size = 1 if schema.task == "multi-label" else places
        return [Block(name, "categories", 1.0, start, start + size, size, of_target=True)]
    return [Block(name, "categories", 1.0, start, start + column.width(), column.width())]


class Totals(Task):
    """Totals of the records' statistics, which nobody learns from: see the module's docstring."""

    name = "statistics"
    headline = "loss"

    def __init__(self, layout: Layout) -> None:
        self.layout, self.width = layout, layout.width

    def targets(self, y: Tree, what: str) -> Tree:
        return y

    def loss(self, module: nn.Module, x: Tree, y: Tree) -> Tensor:
        if not isinstance(x, Tensor) or not isinstance(y, Tensor):
            raise ConfigError("statistics are of tables, whose records are one tensor each")
        found: Tensor = -module(self.layout.vectors(x, y)).mean()
        return found

    def require_fit(self, module: nn.Module, x: Tree, y: Tree) -> None:
        self.loss(module, x, y)

    def measure(self) -> Measure:
        return NoScores()


class TotalsModel(nn.Module):
    """θ, which begins at zero and ends as the totals."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.totals = nn.Parameter(torch.zeros(width))

    def forward(self, vectors: Tensor) -> Tensor:
        return vectors @ self.totals


def layout_of(options: Mapping[str, Any], schema: Schema | None) -> Layout:
    """Return the announced layout where there is one, else that of the table's schema."""
    if (announced := options.get("layout")) is not None:
        return Layout.parse(announced)
    if schema is None:
        raise ConfigError("task 'statistics' is for a table, whose schema says what its columns are (data.table)")
    return Layout.of(schema, options)
