"""`fedspa.tune`: settings found within a run's own budget, from what is free to what is paid for.

1. Arithmetic fixes what decides the cost of a participation, and gives a first setting (`suggest`).
2. Rehearsals on records that are not the agents' rank settings under the real run's noise, for nothing (`rehearse`).
3. The best few are tried in the first rounds of the run itself, half of them are dropped again and again, and the one
   that is left trains on (`runs.trials`). These rounds are in the ledger like all others, and ε is that of all.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from fedspa import durable, report
from fedspa.data.dataset import Dataset
from fedspa.data.datasets import load as load_data
from fedspa.data.view import view, with_floats
from fedspa.errors import ConfigError, quoted
from fedspa.examples import Examples, count, taken
from fedspa.learning import models
from fedspa.learning.flat import FlatModel
from fedspa.learning.tasks.own import Loss
from fedspa.result import RunResult
from fedspa.running import simulate
from fedspa.runs import config as configs
from fedspa.runs.config import Config
from fedspa.runs.halving import Halving, Settings
from fedspa.runs.metrics import RoundMetrics
from fedspa.runs.records import records_of
from fedspa.runs.sections import Tuning
from fedspa.runs.setup import Job, Simulated, prepare, with_targets
from fedspa.server.evaluation import Evaluation
from fedspa.server.job import Metric
from fedspa.tuning.rehearse import OWN, Rehearsal
from fedspa.tuning.search import RATE, Search, Space, apart, scaled
from fedspa.tuning.suggest import first_settings

NONE = "none"  # no rehearsal
MOST_TRIALS = 4
SHARE = 0.2
_UNREHEARSED = (1.0, 3.0, 1 / 3, 9.0)  # of the first rate


@dataclass(frozen=True)
class Rehearsed:
    """Settings and what a rehearsal with them scored; None where its model diverged."""

    settings: Settings
    score: float | None


def tune(
    config: Config | Mapping[str, Any] | Path | str | None = None,
    *,
    epsilon: float | None = None,
    share: float = SHARE,
    public: str = OWN,
    space: Space | None = None,
    studies: Path | str | None = None,
    data: Dataset | None = None,
    module: nn.Module | None = None,
    task: str | Loss | None = None,
    metrics: Mapping[str, Metric] | None = None,
    resume: Path | str | None = None,
    progress: bool | None = None,
    on_rehearsed: Callable[[Rehearsed], None] | None = None,
    on_start: Callable[[Simulated, Path], None] | None = None,
    on_round: Callable[[RoundMetrics], None] | None = None,
    stop: Callable[[], bool] | None = None,
) -> RunResult:
    """Find settings and train with them, all within the ε of the config or of `epsilon`.

    Args:
        config: As for `run`; `data.holdout` says how many of the server's records trials are scored by.
        epsilon: In place of the config's.
        share: The most of the rounds that trials may take.
        public: What settings are rehearsed on: "holdout", the records that the server holds out and scores trials by,
            the name of a public data set, or "none".
        space: Values of keys to try beside the rate, the clip and the average of the iterates.
        studies: A folder in which rehearsals are kept for the next time.
        data: As for `run`.
        module: As for `run`.
        task: As for `run`.
        metrics: As for `run`.
        resume: The folder of a tuning run that was interrupted.
        progress: As for `run`.
        on_rehearsed: Called after each rehearsal, with its settings and score.
        on_start: As for `run`.
        on_round: As for `run`.
        stop: As for `run`.

    Returns:
        The result of the run. Its summary's `tuning` has the trials, the choice, and the scores on the test records,
        which chose nothing.
    """
    calls: dict[str, Any] = {"progress": progress, "on_round": on_round, "stop": stop}
    if resume is not None:
        result = simulate(
            config, resume=resume, data=data, module=module, task=task, metrics=metrics, on_start=on_start, **calls
        )
        return _judged(result, data, module, None if isinstance(task, str) else task, metrics)
    settings = _with_budget(config, epsilon)
    if isinstance(task, str):
        settings, task = configs.with_task(settings, task), None
    given: dict[str, Any] = {"data": data, "module": module, "task": task, "metrics": metrics}
    if not (isinstance(share, int | float) and 0 <= share < 1):
        raise ConfigError(f"share is {quoted(share)}; it must be a number from 0 up to, and below, 1")
    if settings.tuning.candidates is not None:
        raise ConfigError("the config names tuning.candidates, which `fedspa tune` chooses: leave them out, or run it")
    records = records_of(settings, data, module)
    job = prepare(settings, records, module, task, metrics)
    _refuse(job)
    tuning, rehearsed = _plan_trials(
        job, records, share, public, space or {}, None if studies is None else Path(studies), on_rehearsed, **given
    )
    found = settings.model_copy(update={"tuning": tuning})

    def started(job: Simulated, folder: Path) -> None:
        kept = {"public": public, "found": [{"settings": dict(r.settings), "score": r.score} for r in rehearsed]}
        durable.replace_text(folder / "rehearsal.json", json.dumps(kept, ensure_ascii=False, allow_nan=False) + "\n")
        if on_start is not None:
            on_start(job, folder)

    result = simulate(found, on_start=started, **given, **calls)
    return _judged(result, **given)


def _with_budget(config: Config | Mapping[str, Any] | Path | str | None, epsilon: float | None) -> Config:
    if epsilon is None:
        return config if isinstance(config, Config) else configs.load(config)
    source = config.model_dump(exclude_none=True) if isinstance(config, Config) else config
    return configs.load(source, ["privacy.noise_multiplier=none", f"privacy.epsilon={float(epsilon)!r}"])


def _refuse(job: Job) -> None:
    """Before hours of rehearsing; a run with trials refuses the same."""
    config = job.config
    if job.plan is None:
        raise ConfigError(
            f"{config.algorithm.name} spends no budget: try settings by `fedspa run`, as often as you like"
        )
    if config.data.holdout == 0:
        raise ConfigError(
            "data.holdout is 0, and trials must not be scored by the records that the result is judged by: hold out "
            "some of the server's own, as in --set data.holdout=0.1 (a server without records cannot tune here: agents "
            "would have to score, and every score is a release more)"
        )


def _plan_trials(
    job: Simulated,
    records: Dataset,
    share: float,
    public: str,
    space: Space,
    studies: Path | None,
    on_rehearsed: Callable[[Rehearsed], None] | None,
    data: Dataset | None,
    module: nn.Module | None,
    task: Loss | None,
    metrics: Mapping[str, Metric] | None,
) -> tuple[Tuning, list[Rehearsed]]:
    """What is worth a trial, the best first, and all that was rehearsed for it."""
    config, plan = job.config, job.plan
    assert plan is not None
    algorithm, rounds = config.algorithm, config.federation.rounds
    within = int(share * rounds)
    start = first_settings(rounds, algorithm.local_steps, algorithm.local_lr, plan.compression, plan.clip, plan.active)
    if algorithm.local_steps > 1:
        start = {**start, "algorithm.local_lr": algorithm.local_lr}
    if public == NONE:
        declared: list[Settings] = [{**start, key: value} for key, values in space.items() for value in values]
        rates: list[Settings] = [{**start, RATE: scaled(start[RATE], factor)} for factor in _UNREHEARSED]
        return _tuning((declared or rates)[: _most_trials(within)], within, None), []
    rehearsal = Rehearsal(config, plan, records, public, module, task, metrics, studies)
    found: list[Rehearsed] = []

    def score(settings: Settings) -> list[float]:
        curves = rehearsal.curves(settings)
        found.append(Rehearsed(settings, curves.last))
        if on_rehearsed is not None:
            on_rehearsed(found[-1])
        return curves.values

    search = Search(score)
    winner = search.run(start, space, local=algorithm.local_steps > 1)
    winner = search.best(winner, {})  # the config's own settings are a candidate, too
    if not search.of(winner):
        raise ConfigError("every model diverged in rehearsals; look at how large records and targets are")
    best = apart([winner, *search.ranking], _most_trials(within))
    return _tuning(best, within, [rehearsal.curves(settings).ahead for settings in best]), found


def _most_trials(rounds: int) -> int:
    """That halving can decide between within so many rounds."""
    fitting = [number for number in range(2, MOST_TRIALS + 1) if Halving(number, 1).rounds <= rounds]
    return max(fitting, default=1)


def _tuning(candidates: Sequence[Settings], within: int, ahead: list[list[float]] | None) -> Tuning:
    longest = Halving.within(len(candidates), max(1, within)).longest
    return Tuning(
        candidates=[dict(settings) for settings in candidates],
        rounds=max(1, within),
        ahead=None if ahead is None else [each[:longest] for each in ahead],
    )


def _judged(
    result: RunResult,
    data: Dataset | None,
    module: nn.Module | None,
    task: Loss | None,
    metrics: Mapping[str, Metric] | None,
) -> RunResult:
    """With the scores on the test records, which nothing was chosen by, and with what was rehearsed."""
    tuning = dict(result.summary.get("tuning", {}))
    if not tuning:
        raise ConfigError(f"{result.folder} holds a run without trials; `fedspa run --resume` goes on with it")
    if "test" in tuning:
        return result
    config = configs.load(result.folder / "config.toml")
    tuning["test"] = _test_scores(config, result, data, module, task, metrics)
    kept = result.folder / "rehearsal.json"
    tuning["rehearsal"] = json.loads(kept.read_text("utf-8")) if kept.exists() else None
    summary = {**result.summary, "tuning": tuning}
    text = json.dumps(summary, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    durable.replace_text(result.folder / "summary.json", text)
    report.write([result.folder], result.folder / "report.html")
    return replace(result, summary=summary)


def _test_scores(
    config: Config,
    result: RunResult,
    data: Dataset | None,
    module: nn.Module | None,
    task: Loss | None,
    metrics: Mapping[str, Metric] | None,
) -> dict[str, float | None] | None:
    """None where the data has no test records beside those that were held out."""
    named = config.data
    whole = data
    if whole is None:
        whole = load_data(named.name, Path(named.dir), named.person, named.table, config.run.code)
    if not count(whole.test_y):
        return None
    few = slice(0, 1)  # of the training records, which are not looked at
    whole = replace(
        whole, train_x=taken(whole.train_x, few), train_y=taken(whole.train_y, few), owners=None, persons=None
    )
    whole = view(whole, named.features, 0.0, alone=config.privacy.noise == "exact")
    if module is None and config.model.name in models.NAMES:
        whole = with_floats(whole)
    job = prepare(config, records_of(config, data, module), module, task, metrics)
    learned = job.server.model.task
    whole = with_targets(whole, learned)
    theta = FlatModel(result.module, learned).flatten()
    server = replace(job.server, test=Examples(whole.test_x, whole.test_y))
    return Evaluation(server, theta.device)(theta).scores
