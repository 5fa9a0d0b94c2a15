"""What a round and a run come to: a line of metrics.jsonl, and one flat object for `--json`, summary.json and the
screen."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from fedspa.data.columns import Schema
from fedspa.errors import quoted
from fedspa.learning.tasks import Baseline, Task
from fedspa.runs.guarantee import Guarantee, LedgerTotal, finite, not_private_because, promised, warnings
from fedspa.runs.rundir import RoundMetrics, better, label, shown_score
from fedspa.runs.setup import Job, Simulated
from fedspa.server.coordinator import Coordinator
from fedspa.server.evaluation import Closing
from fedspa.server.optimizers import ServerOptimizer

TOGETHER = (
    "the engine of this run takes records together, so that the rounding of one may depend on another; a server that "
    "chooses its model to enlarge that could pass the clip, and a deployment takes none together so (docs/engines.md)"
)


def _takes_together(job: Simulated) -> bool:
    """Return whether rounding of one record may depend on another. Neighbours under Poisson sampling have a record more
    or less, and with it another number of slots: a simulation names no `max_records` (`fedspa.engine.local`)."""
    by_place = job.engine.takes_slots and job.config.privacy.sampling == "poisson"
    return by_place or not job.engine.separates_records


def measured(
    job: Job, server: Coordinator, guarantee: Guarantee | None, agents: int, uplink_bytes: int
) -> RoundMetrics:
    """Return the metrics of the round that the server has just closed, with the updates of so many agents."""
    scores, loss = server.evaluate()
    plan = job.plan
    return RoundMetrics(
        round=server.state.round - 1,
        accuracy=scores.get("accuracy"),
        loss=loss,
        agents=agents,
        uplink_bytes=uplink_bytes,
        epsilon=None if plan is None or guarantee is None else finite(guarantee.epsilon_max(plan.neighbours)),
        private=not_private_because(plan, job.config.privacy.noise) is None,
        clip_value=None if server.job.plan is None else server.job.plan.clip_value,
        scores=scores,
        epsilon_worst_case=None if guarantee is None else finite(guarantee.epsilon_worst_case()),
        trials=server.scores_by_agents,
    )


def summarise(
    job: Job,
    history: Sequence[RoundMetrics],
    guarantee: Guarantee | None,
    seconds: float,
    closing: Closing,
    total: LedgerTotal | None = None,
) -> dict[str, Any]:
    """Return what was reached and what it cost. Privacy keys are None where the algorithm promises nothing.

    `epsilon` is the largest over agents in this run alone, by the accountant named beside it; `epsilon_total` adds
    the earlier runs of a ledger that outlives it, against a server that saw every upload, by `accountant_total`.
    `epsilon` is None, too, where seeded noise is too small for any ε. Where `members` says that at least so many
    uploads were aggregated, both are against the server with up to `colluders` of them, `epsilon_worst_case` and
    `epsilon_total_worst_case` against all others together, and null there is infinite. `uplink_bytes` is what an
    agent sent in the whole run (mean over all agents), `payload_bytes` one upload. `accuracy_by_class` is the last
    model's, None for a class without held-out records. `baseline` is what `baseline_answer`, which looks at no input,
    scores on the held-out records that it was chosen by: the server's own, so that nothing of an agent is in it.
    `adversary` says against whom ε holds; a plan adds keys of its own. `rounds_empty` had no update. `features` and
    `schema` are what it takes to use the model: how an image becomes its input, and what a table's columns mean.
    `agent_names` are those that the data brought, in the order of the agents' numbers.
    """
    config, server = job.config, job.server
    together = isinstance(job, Simulated) and _takes_together(job)
    uploads = sum(metrics.agents for metrics in history)
    sent = sum(metrics.uplink_bytes for metrics in history)
    empty = sum(metrics.agents == 0 for metrics in history)
    task = server.model.task
    baseline = task.baseline(server.test.y)
    return {
        "algorithm": config.algorithm.name,
        "task": task.name,
        **reached(task, history),
        "accuracy_by_class": closing.by_class,
        "baseline": None if baseline is None else baseline.score,
        "baseline_answer": None if baseline is None else baseline.answer,
        **promised(job.plan, guarantee, config.privacy.noise),
        "epsilon_total": None if total is None else total.epsilon,
        "epsilon_total_worst_case": None if total is None else total.worst_case,
        "accountant_total": None if total is None else total.accountant,
        "uplink_bytes": sent / config.federation.agents,
        "payload_bytes": sent / max(1, uploads),
        "coding": server.coding,
        "compression": job.plan.compression if job.plan is not None else server.terms.active / server.model.dimension,
        "dimension": server.model.dimension,
        "features": config.data.features,
        "schema": None if job.schema is None else job.schema.model_dump(exclude_none=True),
        "rounds": len(history),
        "rounds_empty": empty,
        "agents": config.federation.agents,
        "agent_names": list(job.agents) if isinstance(job, Simulated) and job.data.agents else None,
        **job.trained_by,
        "seconds": round(seconds, 3),
        "seed": config.run.seed,
        "warnings": [
            *warnings(config),
            *([task.headline_note] if task.headline_note else []),
            *([] if total is None or total.note is None else [total.note]),
            *([f"{empty} of {len(history)} rounds had no update and left the model as it was"] if empty else []),
            *([TOGETHER] if job.plan is not None and together else []),
            *_no_better(closing, baseline, history[-1], job.server.optimizer, job.schema),
        ],
    }


def reached(task: Task, history: Sequence[RoundMetrics]) -> dict[str, Any]:
    """Return the score that the task is judged by after these rounds, and accuracy under its own name."""
    best, last = _best_and_last(task.headline, [metrics.score for metrics in history])
    right = _best_and_last("accuracy", [math.nan if each.accuracy is None else each.accuracy for each in history])
    return {
        "score": task.headline,
        "score_best": best,
        "score_last": last,
        "scores": history[-1].scores,
        "accuracy_best": right[0],
        "accuracy_last": right[1],
    }


def _best_and_last(name: str, values: Sequence[float]) -> tuple[float | None, float | None]:
    known = [value for value in values if not math.isnan(value)]
    return better(name)(known) if known else None, None if math.isnan(values[-1]) else values[-1]


def scored_otherwise(job: Job) -> list[str]:
    """Say, of a run whose trials agents scored, where that was by something else than the run is judged by."""
    task = job.server.model.task
    if job.task.metric in (None, "accuracy"):
        return []
    how = "records whose class is found" if task.name == "classification" else "the mean of e^(-loss)"
    return [
        f"agents scored the trials by {how}, record by record, and not by {label(task.headline)}; to choose settings "
        "by that, hold out records of the server's own (data.holdout)"
    ]


def _no_better(
    closing: Closing,
    baseline: Baseline | None,
    last: RoundMetrics,
    optimizer: ServerOptimizer,
    schema: Schema | None,
) -> list[str]:
    """Warnings that the last model has learned nothing that shows."""
    found = []
    if (answer := closing.constant_prediction) is not None:
        names = None if schema is None else schema.class_names
        called = str(answer) if names is None else quoted(names[answer])
        found.append(f"the last model predicts class {called} for every held-out record")
    name, score = last.headline, last.score
    if baseline is not None and not math.isnan(score) and better(name)((score, baseline.score)) == baseline.score:
        # Where noise outweighs what was learned, a step that is scaled to one size is a step of noise.
        adaptive = (
            f"; the server's adam scales every step to about algorithm.server_lr = {optimizer.server_lr:g}: try "
            "algorithm.server = 'average'"
        )
        found.append(
            f"the last model is not better than no model: {label(name)} {shown_score(name, score)}, and "
            f"{shown_score(name, baseline.score)} by {baseline.answer} of the held-out records"
            + (adaptive if optimizer.step == "adam" else "")
        )
    return found
