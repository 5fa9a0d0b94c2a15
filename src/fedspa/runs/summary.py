"""The summary of a run: one flat object, the same for `--json`, summary.json and the screen."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from fedspa.privacy.binomial_plan import BinomialPlan
from fedspa.runs.books import Books
from fedspa.runs.metrics import RoundMetrics
from fedspa.runs.setup import Job

_UNBOUNDED = "no guarantee over all runs in the ledger: it holds participations in cpsgd outside its theorem"


def summarise(
    job: Job, history: Sequence[RoundMetrics], books: Books, seconds: float, epsilon_total: float | None = None
) -> dict[str, Any]:
    """What was reached and what it cost. Privacy keys are None where the algorithm promises nothing.

    `epsilon` is the largest over agents in this run alone, by the accountant named beside it; `epsilon_total` adds the
    earlier runs of a ledger that outlives it. `uplink_bytes` is what an agent sent in the whole run (mean over all
    agents), `payload_bytes` one upload. `epsilon` is None, too, where cpSGD is outside its theorem. `adversary` says
    against whom it holds; `bits` and `trials` are cpSGD's.
    """
    config = job.config
    uploads = sum(metrics.agents for metrics in history)
    sent = sum(metrics.uplink_bytes for metrics in history)
    unbounded = epsilon_total is not None and math.isinf(epsilon_total)
    return {
        "algorithm": config.algorithm.name,
        "accuracy_best": max(metrics.accuracy for metrics in history),
        "accuracy_last": history[-1].accuracy,
        **_privacy(job, books),
        "epsilon_total": None if unbounded else epsilon_total,
        "uplink_bytes": sent / config.federation.agents,
        "payload_bytes": sent / max(1, uploads),
        "coding": job.coding,
        "compression": job.plan.compression if job.plan is not None else job.active / job.model.dimension,
        "dimension": job.model.dimension,
        "rounds": len(history),
        "agents": config.federation.agents,
        "engine": job.engine.name,
        "engine_reason": job.engine_reason,
        "tf32": getattr(job.engine, "tf32", False),
        "seconds": round(seconds, 3),
        "seed": config.run.seed,
        "warnings": [*warnings(job), *([_UNBOUNDED] if unbounded else ())],
    }


def _privacy(job: Job, books: Books) -> dict[str, Any]:
    keys = ("epsilon", "epsilon_replace_one", "epsilon_published", "delta", "neighbours", "sampling", "accountant")
    if job.plan is None or books.guarantee is None:
        others = ("noise_multiplier", "participations_max", "noise", "adversary", "bits", "trials")
        return {**dict.fromkeys((*keys, *others)), "private": False}
    plan, guarantee = job.plan, books.guarantee
    return {
        "epsilon": guarantee.epsilon_max(plan.neighbours),
        "epsilon_replace_one": guarantee.epsilon_max("replace-one"),
        "epsilon_published": guarantee.epsilon_published(),
        "delta": plan.delta,
        "neighbours": plan.neighbours,
        "sampling": plan.sampling,
        "accountant": guarantee.accountant,
        "noise_multiplier": plan.noise_multiplier,
        "participations_max": guarantee.participations_max,
        "private": plan.is_private,
        "noise": job.config.privacy.noise,
        "adversary": plan.adversary if isinstance(plan, BinomialPlan) else "local",
        "bits": plan.bits if isinstance(plan, BinomialPlan) else None,
        "trials": plan.trials if isinstance(plan, BinomialPlan) else None,
    }


def warnings(job: Job) -> list[str]:
    """What a reader of ε must know before believing it."""
    if job.plan is None:
        return [f"{job.config.algorithm.name} promises no privacy"]
    found = [] if job.plan.flaw is None else [job.plan.flaw]
    if job.config.privacy.accountant == "theorem-1":
        found.append(
            "the noise was calibrated by the paper's Theorem 1, which is not sound; epsilon is the verified one"
        )
    if job.config.privacy.noise == "seeded":
        found.append("seeded noise: right for simulations, and no protection against anyone who knows run.seed")
    return found
