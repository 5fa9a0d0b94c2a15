"""`fedspa.tune`: settings found within a run's own budget, from what is free to what is paid for.

1. Arithmetic fixes what decides the cost of a participation, and gives a first setting (`suggest`).
2. Proxy runs on records that are not the agents' rank settings under the real run's noise, at no privacy cost.
3. The best few are tried in the first rounds of the run itself, half of them are dropped again and again, and the one
   that is left trains on (`runs.trials`). These rounds are in the ledger like all others, and ε is that of all.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from torch import nn

from fedspa import durable, report
from fedspa.algorithms.base import deviation
from fedspa.data.dataset import Dataset, view, with_floats
from fedspa.data.datasets import load as load_data
from fedspa.errors import ConfigError, RunWarning, quoted, warn
from fedspa.examples import Examples, count, taken
from fedspa.learning import models
from fedspa.learning.flat import FlatModel
from fedspa.learning.tasks import Loss, Metric
from fedspa.result import RunResult
from fedspa.running import run
from fedspa.runs import config as configs
from fedspa.runs.config import Config
from fedspa.runs.defaults import first_settings
from fedspa.runs.halving import Halving, Settings, check_searched, settled
from fedspa.runs.run_ledger import check_budget
from fedspa.runs.rundir import (
    LOWER,
    SHARES,
    RoundMetrics,
    Stopping,
    better,
    check_out,
    label,
    shown_score,
    write_summary,
)
from fedspa.runs.sections import ScoredBy, Tuning
from fedspa.runs.setup import CLASS_TASKS, Given, Job, Simulated, prepare, records_of, with_targets
from fedspa.runs.trials import scoring_rounds
from fedspa.server.evaluation import Evaluation
from fedspa.tuning.proxy import RATE, ProxyRuns, Search, Space, distinct_settings, scaled

BEST = "best.toml"  # a config with the settings that won, in the folder of the run
MOST_TRIALS = 4
SHARE = 0.2
_CLEARLY = 2.0  # standard deviations of repeats
_WITHOUT_PROXY = (1.0, 3.0, 1 / 3, 9.0)  # of the first rate: not far, for short trials flatter whatever learns fast


@dataclass(frozen=True)
class ProxyRun:
    """Settings and the score of a proxy run with them, None if its model diverged, and how much its repeats differ."""

    settings: Settings
    score: float | None
    spread: float = 0.0


def tune(
    config: Config | Mapping[str, Any] | Path | str | None = None,
    *,
    epsilon: float | None = None,
    share: float = SHARE,
    proxy: bool | None = None,
    space: Space | None = None,
    data: Dataset | None = None,
    module: nn.Module | None = None,
    task: str | Loss | None = None,
    metrics: Mapping[str, Metric] | None = None,
    resume: Path | str | None = None,
    progress: bool | None = None,
    on_proxy: Callable[[ProxyRun], None] | None = None,
    on_start: Callable[[Simulated, Path], None] | None = None,
    on_round: Callable[[RoundMetrics], None] | None = None,
    stop: Callable[[], bool] | None = None,
) -> RunResult:
    """Find settings and train with them, all within the ε of the config or of `epsilon`.

    Args:
        config: As for `run`; `data.holdout` says how many of the server's records trials are scored by. Where it is 0,
            agents score them (`tuning.scored_by`).
        epsilon: In place of the config's.
        share: The most of the rounds that trials may take.
        proxy: Whether to compare settings in proxy runs on the records that the server holds out and scores trials by;
            by default, if any are held out.
        space: Values of keys to try beside the rate, the clip and the average of the iterates.
        data: As for `run`.
        module: As for `run`.
        task: As for `run`.
        metrics: As for `run`.
        resume: The folder of a tuning run that was interrupted.
        progress: As for `run`.
        on_proxy: Called after each proxy run, with its settings and score.
        on_start: As for `run`.
        on_round: As for `run`.
        stop: As for `run`.

    Returns:
        The result of the run. Its summary's `tuning` has the trials, the choice, and the scores on the test records,
        which are not used for selection.

    Raises:
        FedspaError: As for `run`. Nothing is spent where the config leaves no rounds for trials.

    Examples:
        >>> import fedspa
        >>> small = {"federation": {"agents": 4, "rounds": 6, "per_round": 4}, "data": {"holdout": 0.2}}
        >>> result = fedspa.tune(small, epsilon=3.0, proxy=False, progress=False)
        >>> result.summary["epsilon"] <= 3.0
        True
    """
    calls: dict[str, Any] = {"progress": progress, "on_round": on_round, "stop": stop}
    if resume is not None:
        moved = None if config is None else _with_budget(config, None).data.dir
        result = run(
            config, resume=resume, data=data, module=module, task=task, metrics=metrics, on_start=on_start, **calls
        )
        return _judged(result, data, Given(module, None if isinstance(task, str) else task, metrics), moved)
    settings = _with_budget(config, epsilon)
    if isinstance(task, str):
        settings, task = configs.with_task(settings, task), None
    given = Given(module, task, metrics)
    if not (isinstance(share, int | float) and 0 <= share < 1):
        raise ConfigError(f"share is {quoted(share)}; it must be a number from 0 up to, and below, 1")
    if settings.tuning.candidates is not None:
        raise ConfigError("the config names tuning.candidates, which `fedspa tune` chooses: leave them out, or run it")
    check_searched(space or {})
    proxy = settings.data.holdout > 0 if proxy is None else proxy
    records = records_of(settings, data, module)
    job = prepare(settings, records, given)
    scoring = _scoring_rounds(job, proxy)
    # Everything that the run itself would refuse at its start is refused before the proxy runs.
    check_out(settings)
    check_budget(job)

    def check_stop() -> None:
        """Raise if the user stops the search: before the next round of a proxy run, and before a paid round."""
        if stop is not None and stop():
            raise Stopping("stopped before the first round, and nothing was spent; call it again to start over")

    within = int(share * job.config.federation.rounds)
    runs = None
    if proxy:  # one score for all of them, and for the run: a part of the records may look more balanced than the whole
        assert job.plan is not None
        pinned = job.config.model_copy(update={"task": job.task})
        runs = ProxyRuns(pinned, job.plan, records, given, check_stop)
    tuning, proxies = _plan_trials(job, within, scoring, space or {}, runs, on_proxy)
    _warn_of_a_constant(job, proxies)
    found = settings.model_copy(update={"tuning": tuning})
    check_stop()

    def started(job: Simulated, folder: Path) -> None:
        found = [{"settings": dict(r.settings), "score": r.score} for r in proxies]
        durable.replace_text(folder / "proxy.json", json.dumps(found, ensure_ascii=False, allow_nan=False) + "\n")
        if on_start is not None:
            on_start(job, folder)

    result = run(found, on_start=started, data=data, module=module, task=task, metrics=metrics, **calls)
    return _judged(result, data, given)


def _with_budget(config: Config | Mapping[str, Any] | Path | str | None, epsilon: float | None) -> Config:
    if epsilon is None:
        return config if isinstance(config, Config) else configs.load(config)
    source = config.model_dump(exclude_none=True) if isinstance(config, Config) else config
    return configs.load(source, ["privacy.noise_multiplier=none", f"privacy.epsilon={float(epsilon)!r}"])


def _scoring_rounds(job: Job, proxy: bool) -> int:
    """Return the rounds of each rung in which agents score. Raise for what a run with trials refuses, before hours of
    proxy runs."""
    config = job.config
    if job.plan is None:
        raise ConfigError(
            f"{config.algorithm.name} spends no budget: try settings by `fedspa run`, as often as you like"
        )
    if config.data.holdout == 0 and proxy:
        raise ConfigError(
            "data.holdout is 0, so that the server has no records for proxy runs: hold some out, as in "
            "--set data.holdout=0.1, or do without them (--no-proxy)"
        )
    return scoring_rounds(job)


def _plan_trials(
    job: Simulated,
    within: int,
    scoring: int,
    space: Space,
    runs: ProxyRuns | None,
    on_proxy: Callable[[ProxyRun], None] | None,
) -> tuple[Tuning, list[ProxyRun]]:
    """Return the settings to try, the best first, with their expected gains; and all proxy runs. Trials may take the
    rounds `within`, of which `scoring` after each rung are for the agents to score in."""
    config, plan = job.config, job.plan
    assert plan is not None
    algorithm, rounds, by = config.algorithm, config.federation.rounds, config.tuning.scored_by
    most = _most_trials(within, scoring)
    classes = isinstance(job.server.model.task, CLASS_TASKS)
    start = first_settings(plan, rounds, config.federation.per_round, algorithm.local_lr, classes=classes)
    if algorithm.local_steps > 1:
        start = {**start, "algorithm.local_lr": algorithm.local_lr}
    if runs is None:
        declared: list[Settings] = [{**start, key: value} for key, values in space.items() for value in values]
        rates: list[Settings] = [{**start, RATE: scaled(start[RATE], factor)} for factor in _WITHOUT_PROXY]
        return _tuning((declared or rates)[:most], within, by), []
    proxies: list[ProxyRun] = []

    def score(settings: Settings) -> list[float]:
        curves = runs.curves(settings)
        proxies.append(ProxyRun(settings, curves.last, curves.spread))
        if on_proxy is not None:
            on_proxy(proxies[-1])
        return curves.values

    search = Search(score)
    winner = search.run(start, space, local=algorithm.local_steps > 1)
    winner = search.best(winner, {})  # the config's own settings are a candidate, too
    if not search.of(winner):
        raise ConfigError("every model diverged in proxy runs; check the scale of records and targets")
    best = distinct_settings([winner, *search.ranking], most)
    # What the server's score gains says nothing of the agents', unless both are shares of right answers.
    comparable = not scoring or job.server.model.task.headline == "accuracy"
    curves = [runs.curves(settings) for settings in best]
    gains = [each.expected_gains for each in curves] if comparable else None
    if gains is not None and curves[0].name in SHARES:
        gains[0] = [gain + _doubt(job, scoring, len(best), curves[0].last or 0.0) for gain in gains[0]]
    return _tuning(best, within, by, gains), proxies


def _warn_of_a_constant(job: Job, proxies: Sequence[ProxyRun]) -> None:
    """Warn, before anything is spent, where no proxy run clearly beats an answer that looks at no input: the best of
    many runs that learn nothing is above it by chance."""
    task, known = job.server.model.task, [run.score for run in proxies if run.score is not None]
    baseline = task.baseline(job.server.test.y)
    if baseline is None or not known:
        return
    name, best = task.headline, better(task.headline)(known)
    chance = _CLEARLY * median(run.spread for run in proxies if run.score is not None)
    if (baseline.score - best if name in LOWER else best - baseline.score) <= chance:
        warn(
            f"nothing is spent yet, and none of {len(known)} proxy runs clearly beats a constant answer: {label(name)} "
            f"{shown_score(name, best)} at best, {shown_score(name, baseline.score)} by {baseline.answer}, and "
            f"repeats of one run differ by {shown_score(name, chance / _CLEARLY)}; more "
            "records, rounds or a larger privacy.epsilon help, or another task.metric",
            RunWarning,
        )


def _doubt(job: Job, scoring: int, models: int, share: float) -> float:
    """Return by how much a trial may beat what was best in proxy runs by chance alone: a standard error of the server's
    held-out records, or the noise in the difference of two scores of agents."""
    if scoring:
        return math.sqrt(2) * deviation(job.plan, models, job.config.federation.per_round)
    return math.sqrt(share * (1 - share) / count(job.server.test.y))


def _most_trials(rounds: int, scoring: int) -> int:
    """Return the most trials that halving can decide between within so many rounds."""
    fitting = [n for n in range(2, MOST_TRIALS + 1) if Halving(n, 1, scoring=scoring).rounds <= rounds]
    return max(fitting, default=1)


def _tuning(
    candidates: Sequence[Settings], within: int, by: ScoredBy | None, gains: list[list[float]] | None = None
) -> Tuning:
    found = [dict(settings) for settings in candidates]
    return Tuning(candidates=found, rounds=max(1, within), scored_by=by, expected_gains=gains)


def _judged(result: RunResult, data: Dataset | None, given: Given, moved: str | None = None) -> RunResult:
    """Add the scores on the test records, which nothing was chosen by, and the proxy runs to a result. `moved` is where
    the data's files lie now, if not where the run began with them."""
    tuning = dict(result.summary.get("tuning", {}))
    if not tuning:
        raise ConfigError(f"{result.folder} holds a run without trials; `fedspa run --resume` resumes it")
    if "test" in tuning:
        return result
    where = [] if moved is None else [f"data.dir={json.dumps(moved)}"]
    config = configs.load(result.folder / "config.toml", where)
    job = prepare(config, records_of(config, data, given.module), given)
    tuning["test"] = _test_scores(job, result, data)
    settings = tuning["trials"][tuning["choice"]]["settings"]
    best = settled(config, settings)
    alone = best.model_copy(update={"run": best.run.model_copy(update={"out": None})})
    durable.replace_text(result.folder / BEST, configs.to_toml(alone))
    kept = result.folder / "proxy.json"
    tuning["proxy"] = json.loads(kept.read_text("utf-8")) if kept.exists() else None
    summary = {**result.summary, "tuning": tuning}
    write_summary(result.folder, summary)
    report.write(result.folder)
    return replace(result, summary=summary)


def _test_scores(job: Job, result: RunResult, data: Dataset | None) -> dict[str, float | None] | None:
    """Return None if the data has no test records beside those that were held out."""
    config = job.config
    named = config.data
    whole = data
    if whole is None:
        whole = load_data(named.name, Path(named.dir), named.person, named.schema_of_table, config.run.code)
    if not count(whole.test_y):
        return None
    few = slice(0, 1)  # of the training records, which are not looked at
    whole = replace(
        whole, train_x=taken(whole.train_x, few), train_y=taken(whole.train_y, few), owners=None, persons=None
    )
    whole = view(whole, named.features, 0.0, per_example=config.privacy.noise == "exact")
    if job.given.module is None and config.model.name in models.NAMES:
        whole = with_floats(whole)
    learned = job.server.model.task
    whole = with_targets(whole, learned)
    theta = FlatModel(result.module, learned).flatten()
    server = replace(job.server, test=Examples(whole.test_x, whole.test_y))
    return Evaluation(server, theta.device)(theta).scores
