"""The summary of a run: one flat object, the same for `--json`, summary.json and the screen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fedspa.runs.books import Books, Total
from fedspa.runs.guarantee import promised
from fedspa.runs.metrics import RoundMetrics
from fedspa.runs.setup import Job
from fedspa.runs.statement import warnings

TOGETHER = (
    "the engine of this run takes records together, so that the rounding of one may depend on another; a server that "
    "chooses its model to enlarge that could pass the clip, and a deployment takes no such engine (docs/engine.md)"
)


def summarise(
    job: Job,
    history: Sequence[RoundMetrics],
    books: Books,
    seconds: float,
    accuracy_by_class: Sequence[float | None],
    total: Total | None = None,
) -> dict[str, Any]:
    """What was reached and what it cost. Privacy keys are None where the algorithm promises nothing.

    `epsilon` is the largest over agents in this run alone, by the accountant named beside it; `epsilon_total` adds the
    earlier runs of a ledger that outlives it, against a server that saw every update, by `accountant_total`. `epsilon`
    is None, too, where cpSGD has no guarantee. `uplink_bytes` is what an agent sent in the whole run (mean over all
    agents), `payload_bytes` one upload. `accuracy_by_class` is the last model's, None for a class without held-out
    records. `adversary` says against whom ε holds; `bits` and `trials` are cpSGD's. `rounds_empty` had no update.
    """
    config = job.config
    uploads = sum(metrics.agents for metrics in history)
    sent = sum(metrics.uplink_bytes for metrics in history)
    empty = sum(metrics.agents == 0 for metrics in history)
    return {
        "algorithm": config.algorithm.name,
        "accuracy_best": max(metrics.accuracy for metrics in history),
        "accuracy_last": history[-1].accuracy,
        "accuracy_by_class": list(accuracy_by_class),
        **promised(job.plan, books.guarantee, config.privacy.noise),
        "epsilon_total": None if total is None else total.epsilon,
        "accountant_total": None if total is None else total.accountant,
        "uplink_bytes": sent / config.federation.agents,
        "payload_bytes": sent / max(1, uploads),
        "coding": job.coding,
        "compression": job.plan.compression if job.plan is not None else job.active / job.model.dimension,
        "dimension": job.model.dimension,
        "rounds": len(history),
        "rounds_empty": empty,
        "agents": config.federation.agents,
        "engine": job.engine.name,
        "engine_reason": job.engine_reason,
        "tf32": getattr(job.engine, "tf32", False),
        "seconds": round(seconds, 3),
        "seed": config.run.seed,
        "warnings": [
            *warnings(config, job.plan),
            *([] if total is None or total.note is None else [total.note]),
            *([f"{empty} of {len(history)} rounds had no update and left the model as it was"] if empty else []),
            *([TOGETHER] if job.plan is not None and not job.engine.separates_records else []),
        ],
    }
