"""`fedspa.evaluate`: how well a trained model does at each agent, as one private release per agent.

Each record that an agent kept out of training becomes a vector: its cell of the confusion matrix, the part of [0, 1]
that its score lies in together with its label, and its clipped loss. The totals of these are released as statistics are
(learning/tasks/totals.py): nothing here decides privacy. A record's outputs are computed from it alone.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedspa import durable, report
from fedspa.analytics.estimates import CONFUSION, DETAILS, ERROR, LOSS, MOST_LOG_ODDS, SCORES, Release, released
from fedspa.analytics.statistics import release_config, spending
from fedspa.data.columns import Number
from fedspa.data.dataset import Dataset
from fedspa.errors import ConfigError, FedspaError
from fedspa.examples import Tree, single_examples, taken
from fedspa.learning.forward import evaluating, one_example_a_time, outputs
from fedspa.learning.tasks import Binary, Classification, Regression, Task
from fedspa.learning.tasks.totals import Block, Layout
from fedspa.report.record import EVALUATION
from fedspa.result import RunResult
from fedspa.running import run as run_release
from fedspa.runs import config as configs
from fedspa.runs.guarantee import statement
from fedspa.runs.rundir import ledger_of
from fedspa.runs.setup import holdings_of, records_of, task_of, with_targets

MOST_LOSS = math.log(1000)  # a log loss beyond it counts as it: the probability of the true class was below 1/1000
MOST_CLASSES = 30  # with more of them a confusion matrix is nothing but noise
# Of the squared norm of a record's vector; what is left counts the records.
_SHARES = {CONFUSION: 0.4, SCORES: 0.4, LOSS: 0.15, ERROR: 0.9}
_BINARY_SHARES = {SCORES: 0.8, LOSS: 0.15}  # whose scores are a confusion matrix, too


@dataclass(frozen=True)
class Evaluation(Release):
    """Released scores of a model at its agents.

    Attributes:
        estimates: Every score with its 95 % interval: those of all agents together first, then each agent's where the
            server saw its upload.
        summary: The release's summary: ε, δ, the accountant and the settings, as of `fedspa.run`.
        folder: The release's folder.
    """

    @classmethod
    def load(cls, run: Path | str) -> Evaluation:
        """Return an evaluation that was released earlier.

        Args:
            run: The folder of the release.

        Returns:
            Its scores: nothing is released again.

        Raises:
            ConfigError: The folder holds no finished evaluation.
        """
        found = released(Path(run))
        if found.schema is not None:
            raise ConfigError(f"the run in {run} released statistics of tables; `fedspa stats {run}` shows them")
        return cls(found.estimates, found.summary, found.folder)

    def __str__(self) -> str:
        shown = [each for each in self.estimates if not each.site and not each.statistic.startswith(DETAILS)]
        lines = [f"{each.statistic}: {each.shown[0]} ({each.shown[1]})" for each in shown]
        return "\n".join([*lines, statement(self.summary)])


def evaluate(
    run: Path | str,
    *,
    epsilon: float,
    data: Dataset | None = None,
    bins: int = 16,
    error_bound: float | None = None,
    out: Path | str | None = None,
) -> Evaluation:
    """Evaluate the model of a finished run on records that its agents kept out of training, under a privacy guarantee.

    Each agent releases once and pays in the ledger of the run, where its training was paid for.

    Args:
        run: The folder of a finished run, whose config set `data.agent_holdout`.
        epsilon: ε of the release, for each record or person.
        data: The records that the run was given from Python; those that its config names if there were none.
        bins: Parts of the scores' range, an even number. More of them resolve AUC better, and carry more noise.
        error_bound: The largest error of a regression that counts, a public number in the target's unit; by default
            the width of the target's range in a table.
        out: The release's folder; a new one under runs/ if nothing is said.

    Returns:
        Scores of all agents together and of each, with 95 % intervals.

    Raises:
        FedspaError: Something that was given is not allowed, or the budget does not cover it.

    Examples:
        >>> import fedspa
        >>> found = fedspa.evaluate("runs/mine", epsilon=0.2)  # doctest: +SKIP
        >>> found.value("auc")  # doctest: +SKIP
        0.83
    """
    if bins < 2 or bins % 2:
        raise ConfigError(f"bins is {bins}; it must be an even number, so that one half is below 0.5")
    folder = Path(run)
    trained, config = RunResult.load(folder), configs.load(folder / "config.toml")
    if config.data.agent_holdout == 0:
        raise ConfigError(
            f"the run in {folder} was trained with data.agent_holdout = 0, so that no agent has records that the model "
            "has not seen; train with a share held out, as in data.agent_holdout = 0.1"
        )
    records = records_of(config, data)
    task = task_of(config, records)
    holdings = holdings_of(config, records, held_out=True)  # by the content that training saw
    records = with_targets(records, task)
    layout = _layout(task, bins, error_bound if error_bound is not None else _width(records))
    vectors, whose, persons = _held_out(holdings, records, trained, task, layout)
    asked = release_config(config, {"layout": layout.text()}, epsilon, out)
    # A run without privacy has no ledger: its evaluation is in the one that private runs beside it share.
    ledger = ledger_of(folder, config) if config.private else folder.absolute().parent / "ledger.sqlite"
    if config.private and not ledger.exists():
        raise ConfigError(
            f"the ledger of the run, {ledger}, is missing; put it back: a new one would be a fresh budget"
        )
    values = asked.model_dump(exclude_unset=True) | {"data": {"person_records": config.data.person_records}}
    values["run"] = {**values["run"], "ledger": str(ledger)}
    given = Dataset(
        train_x=vectors,
        train_y=torch.zeros(len(vectors)),
        test_x=torch.zeros_like(vectors[:1]),
        test_y=torch.zeros(1),
        classes=None,
        name=f"evaluation of {folder.name}",
        owners=whose,
        persons=persons,
        agents=records.agents,
    )
    found = Evaluation.load(run_release(configs.load(values, spending(epsilon)), data=given, progress=False).folder)
    with suppress(OSError, FedspaError):  # it is paid for, wherever it can be shown
        durable.replace_text(folder / EVALUATION, found.to_json() + "\n")
        report.write(folder)
    return found


def _width(records: Dataset) -> float | None:
    """Return the width of a table's target; None where no public range is known."""
    if records.schema is None:
        return None
    target = next(iter(records.schema.targets.values()))
    return target.range[1] - target.range[0] if isinstance(target, Number) else None


def _layout(task: Task, bins: int, error_bound: float | None) -> Layout:
    """Return the layout of the task's scores: a function of public numbers."""
    parts: list[tuple[str, str, int, float]] = []
    if isinstance(task, Classification | Binary):
        classes = task.classes if isinstance(task, Classification) else 2
        assert classes is not None
        if 2 < classes <= MOST_CLASSES:
            parts.append((CONFUSION, "categories", classes**2, 1.0))
        parts += [(SCORES, "categories", 2 * bins, 1.0), (LOSS, "moments", 2, 1 / MOST_LOSS)]
    elif isinstance(task, Regression) and task.width == 1:
        if error_bound is None:
            raise ConfigError("error_bound is missing: give the largest error that counts, in the target's unit")
        parts.append((ERROR, "moments", 2, 1 / error_bound))
    else:
        raise ConfigError(
            f"task {task.name!r} has no private scores; classification, binary and regression of one number have"
        )
    two_classes = isinstance(task, Binary) or (isinstance(task, Classification) and task.classes == 2)
    shares = _BINARY_SHARES if two_classes else _SHARES
    blocks, start = [], 0
    for column, kind, size, factor in parts:
        stop = start + (1 if kind == "moments" else size)
        weight = math.sqrt(shares[column])
        blocks.append(Block(column, kind, weight, start, stop, size, factor=factor))  # type: ignore[arg-type]
        start = stop
    left = 1 - sum(block.weight**2 for block in blocks)
    return Layout((Block("", "count", math.sqrt(left)), *blocks))


def _held_out(
    holdings: list[np.ndarray[Any, np.dtype[np.int64]]],
    records: Dataset,
    trained: RunResult,
    task: Task,
    layout: Layout,
) -> tuple[Tensor, np.ndarray[Any, np.dtype[np.int64]], np.ndarray[Any, np.dtype[np.int64]] | None]:
    """Return what is released of each record that its agent kept out of training, whose it is, and its person."""
    if records.persons is not None:
        known = np.unique(records.persons, return_inverse=True)[1]
        holdings = [np.flatnonzero(np.isin(known, held)) for held in holdings]
    rows = np.concatenate(holdings)
    whose = np.concatenate([np.full(len(held), number) for number, held in enumerate(holdings)])
    index = torch.from_numpy(rows)
    found, module = [], trained.module.cpu()
    scale = 1.0 if records.target_scale is None else records.target_scale[0]  # of the target's own unit
    with torch.no_grad(), one_example_a_time(), evaluating(module), torch.random.fork_rng(devices=[]):
        for x, y in zip(single_examples(taken(records.train_x, index)), single_examples(taken(records.train_y, index))):
            torch.default_generator.manual_seed(0)
            found.append(_of_record(outputs(module, x), y, task, layout, scale))
    persons = None if records.persons is None else np.unique(records.persons[rows], return_inverse=True)[1]
    return torch.stack(found), whose, persons


def _of_record(found: Tensor, y: Tree, task: Task, layout: Layout, scale: float) -> Tensor:
    """Return the features of one record that the layout reads, from the model's outputs."""
    assert isinstance(y, Tensor)
    if isinstance(task, Regression):
        error: Tensor = (found.reshape(-1)[:1] - y.reshape(-1)[:1]).abs().float() * scale
        return error
    features = []
    sizes = {block.column: block.size for block in layout.blocks}
    probabilities = task.probabilities(found)
    assert probabilities is not None
    chances = probabilities.reshape(-1).double()
    if isinstance(task, Binary):
        chances = torch.cat([1 - chances, chances])
    label = int(y.reshape(-1)[0])
    predicted = int(chances.argmax())
    if CONFUSION in sizes:
        features.append(_one_hot(label * len(chances) + predicted, sizes[CONFUSION]))
    bins = sizes[SCORES] // 2
    if len(chances) == 2:  # equal parts of the log odds: most records of a good model have scores near 0 or 1
        good, share = label == 1, float(torch.logit(chances[1], 1e-9)) / (2 * MOST_LOG_ODDS) + 0.5
    else:
        good, share = label == predicted, float(chances[predicted])
    place = min(max(int(share * bins), 0), bins - 1)
    features.append(_one_hot(bins * good + place, sizes[SCORES]))
    loss = min(-math.log(max(float(chances[label]), 1e-300)), MOST_LOSS)
    return torch.cat([*features, torch.tensor([loss])])


def _one_hot(place: int, size: int) -> Tensor:
    found = torch.zeros(size)
    found[place] = 1.0
    return found
