"""The run rehearsed on records that are not the agents': those that the server holds out for scoring, or a public
data set. Nothing of an agent is to be in it, so it is in no ledger and costs nothing. A data set that holds more than a
few of the agents' records is refused; beyond that, who calls it public answers for that.

A rehearsal has the round of the real run: as many agents, the same masks, the same sampling rate, steps and clip, and
noise of the same size on the mean gradient. Only the records are others, and fewer. So what it finds out about rates,
clips and averages is what they do under this noise.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

import numpy as np
import torch
from torch import nn

from fedspa import __version__, durable
from fedspa.data.dataset import Dataset
from fedspa.errors import ConfigError
from fedspa.examples import Examples, count, joined, leaves, taken
from fedspa.learning.tasks import Loss
from fedspa.learning.threads import torch_threads
from fedspa.mechanisms import Plan
from fedspa.runs import identity
from fedspa.runs.config import Config, load
from fedspa.runs.halving import Settings, settled
from fedspa.runs.identity import digests_of
from fedspa.runs.metrics import LOWER, RoundMetrics
from fedspa.runs.records import records_of
from fedspa.runs.run_ledger import RunLedger
from fedspa.runs.setup import prepare
from fedspa.runs.simulate import Simulation
from fedspa.server.coordinator import Diverged
from fedspa.server.job import Metric

OWN = "holdout"  # the records that the server holds out
# More records to rehearse with tell little more under the run's noise; with fewer it is repeated on other ones.
_MOST, _TRAINED, _REPEATS = 2000, 2 / 3, 6
# Of the agents' records, the share that a public data set may hold, too, by chance: rows of a table may be alike.
_ALIKE = 0.01


class _Unpaid(RunLedger):
    """Of records that nobody was promised anything about. No agent's may ever come here."""

    def __init__(self) -> None:
        ExitStack.__init__(self)
        self.run, self.skipped, self.guarantee, self.ledger, self.cap = "rehearsal", 0, None, None, None


@dataclass(frozen=True)
class Curves:
    """The score called `name` after each round, for each repeat; none at all where a model diverged."""

    repeats: tuple[tuple[float, ...], ...]
    name: str

    @property
    def last(self) -> float | None:
        """Mean over the repeats, after the last round."""
        return fmean(curve[-1] for curve in self.repeats) if self.repeats else None

    @property
    def values(self) -> list[float]:
        """After the last round; larger is better."""
        return [(-1 if self.name in LOWER else 1) * curve[-1] for curve in self.repeats]

    @property
    def expected_gains(self) -> list[float]:
        """What the mean score gained after each round, to the end."""
        means = list(map(fmean, zip(*self.repeats)))
        return [means[-1] - score for score in means]


class Rehearsal:
    """`config` is the real run's, with what is learned given beside it; `plan` has its noise. Scores are kept in the
    folder `studies`, by all that decides them, and an earlier study's are taken from there. `ask` is called before each
    round, and raises where that is not to come."""

    def __init__(
        self,
        config: Config,
        plan: Plan,
        records: Dataset,
        public: str = OWN,
        module: nn.Module | None = None,
        task: Loss | None = None,
        metrics: Mapping[str, Metric] | None = None,
        studies: Path | None = None,
        ask: Callable[[], None] | None = None,
    ) -> None:
        self._ask = ask
        self._given = (module, task, metrics)
        self._studies = studies
        self._parts = _split(_stand_in(config, records, public))
        self._config = _rehearsed(config, plan, count(self._parts[0].train_y))
        self._known = json.dumps(
            [
                __version__,
                [digests_of(part) for part in self._parts],
                *self._learned(),
            ]
        )

    def _learned(self) -> list[str]:
        """What learns, whoever brings it: its code, which a name in the config does not tell, and its first values."""
        module, task, metrics = self._given
        model = prepare(self._config, self._parts[0], module, task, metrics).server.model
        return [
            identity.digest_code(model.module),
            identity.digest_code(model.task),
            identity.digest_tensors([model.flatten()]),
        ]

    def curves(self, settings: Settings) -> Curves:
        config = settled(self._config, settings)
        path = self._path(config)
        if path is not None and (found := _read(path)) is not None:
            return found
        runs = [self._run(config, part, seed) for seed, part in enumerate(self._parts)]
        repeats = tuple(tuple(metrics.score for metrics in run) for run in runs)
        whole = all(repeats) and all(math.isfinite(score) for curve in repeats for score in curve)
        curves = Curves(repeats if whole else (), runs[0][-1].headline if runs[0] else "")
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            kept = {"settings": dict(settings), "name": curves.name, "repeats": curves.repeats}
            durable.replace_text(path, json.dumps(kept, ensure_ascii=False, allow_nan=False) + "\n")
        return curves

    def _run(self, config: Config, part: Dataset, seed: int) -> list[RoundMetrics]:
        config = config.model_copy(update={"run": config.run.model_copy(update={"seed": config.run.seed + seed})})
        module, task, metrics = self._given
        simulation, books = Simulation(prepare(config, part, module, task, metrics)), _Unpaid()
        done = []
        try:
            with torch_threads(1):
                for cohort in simulation.job.cohorts():
                    if self._ask is not None:
                        self._ask()
                    done.append(simulation.round(cohort, books))
                return done
        except Diverged:
            return []

    def _path(self, config: Config) -> Path | None:
        if self._studies is None:
            return None
        known = json.dumps([self._known, config.model_dump(mode="json")], sort_keys=True)
        return self._studies / f"{hashlib.blake2b(known.encode(), digest_size=16).hexdigest()}.json"


def _stand_in(config: Config, records: Dataset, public: str) -> Dataset:
    """All records of the stand-in, as one heap."""
    if public == OWN:
        found = records
        x, y = found.test_x, found.test_y
    else:
        given = config.model_dump(exclude_none=True)
        for key in ("columns", "agent", "split", "test", "person"):
            given["data"].pop(key, None)
        given["data"] |= {"name": public, "holdout": 0.0}
        given["tuning"] = {}
        found = records_of(load(given))
        x, y = joined([found.train_x, found.test_x]), joined([found.train_y, found.test_y])
        _refuse_agents_own(records, Examples(x, y), public)
    return replace(found, train_x=x, train_y=y, owners=None, persons=None)


def _refuse_agents_own(records: Dataset, stand_in: Examples, public: str) -> None:
    """Raise where the agents' own records are in it: nobody would pay for what is learned of them there."""
    public_ones = set(_digests(stand_in))
    own = _digests(Examples(records.train_x, records.train_y))
    found = sum(digest in public_ones for digest in own)
    if found > _ALIKE * len(own):
        raise ConfigError(
            f"public is {public!r}, which holds {found:,} of the {len(own):,} records that the agents hold: a "
            "rehearsal pays for nothing, so that no ε would cover them; name records of nobody's, or 'none'"
        )


def _digests(examples: Examples) -> list[bytes]:
    """Of each example, by every byte of it."""
    columns = [leaf.reshape(len(leaf), -1).contiguous().numpy() for tree in examples for leaf in leaves(tree)]
    found = []
    for row in zip(*columns):
        digest = hashlib.blake2b(digest_size=16)
        for part in row:
            digest.update(part)
        found.append(digest.digest())
    return found


def _split(data: Dataset) -> Sequence[Dataset]:
    """The heap dealt into records to rehearse with and records to score by, anew for each repeat."""
    records = count(data.train_y)
    trained = min(_MOST, round(_TRAINED * records))
    if not 0 < trained < records:
        raise ConfigError(
            f"the stand-in {data.name!r} has {records} records: a rehearsal trains on some and scores by others"
        )
    repeats = min(_REPEATS, max(1, 2 * _MOST // trained))
    parts = []
    for seed in range(repeats):
        order = torch.from_numpy(np.random.Generator(np.random.PCG64(seed)).permutation(records))
        train, test = order[:trained], order[trained:]
        parts.append(
            replace(
                data,
                train_x=taken(data.train_x, train),
                train_y=taken(data.train_y, train),
                test_x=taken(data.train_x, test),
                test_y=taken(data.train_y, test),
            )
        )
    return parts


def _rehearsed(config: Config, plan: Plan, records: int) -> Config:
    """A round of the config for so many records, with the plan's own noise on the mean gradient of an agent."""
    agents = min(config.federation.per_round, records)
    held = records // agents
    batch = min(held, max(1, round(plan.batch * held / plan.records)))
    given = config.model_dump(exclude_none=True)
    for section, key in (("privacy", "epsilon"), ("federation", "cap"), ("data", "person"), ("data", "features")):
        given[section].pop(key, None)
    for key in ("ledger", "policy", "out", "track", "cluster"):
        given["run"].pop(key, None)
    for key in ("columns", "agent", "split", "test"):
        given["data"].pop(key, None)
    given["data"] |= {"name": "digits", "holdout": 0.0}  # the records are given
    given["federation"] |= {"agents": agents, "per_round": agents, "participation": "balanced"}
    given["algorithm"]["batch"] = batch
    given["privacy"] |= {
        "noise_multiplier": plan.noise_multiplier * batch / plan.batch,
        "noise": "seeded",
        "delta": min(config.privacy.delta, 0.5 / held),
    }
    given["run"]["workers"] = 1
    given["tuning"] = {}
    try:
        return load(given)
    except ConfigError as error:
        raise ConfigError(
            f"this run cannot be rehearsed ({error}); try settings in its own rounds: public 'none'"
        ) from None


def _read(path: Path) -> Curves | None:
    try:
        kept = json.loads(path.read_bytes())
        return Curves(tuple(tuple(map(float, curve)) for curve in kept["repeats"]), str(kept["name"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None  # it is made anew
