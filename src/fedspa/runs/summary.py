"""The summary of a run: one flat object, the same for `--json`, summary.json and the screen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fedspa.runs.books import Books
from fedspa.runs.metrics import RoundMetrics
from fedspa.runs.setup import Job


def summarise(
    job: Job, history: Sequence[RoundMetrics], books: Books, seconds: float, epsilon_total: float | None = None
) -> dict[str, Any]:
    """What was reached and what it cost. Privacy keys are None where the algorithm promises nothing.

    `epsilon` is the largest over agents in this run alone, by the accountant named beside it; `epsilon_total` adds the
    earlier runs of a ledger that outlives it. `uplink_bytes` is what an agent sent in the whole run (mean over all
    agents), `payload_bytes` one upload.
    """
    config = job.config
    uploads = sum(metrics.agents for metrics in history)
    sent = sum(metrics.uplink_bytes for metrics in history)
    return {
        "algorithm": config.algorithm.name,
        "accuracy_best": max(metrics.accuracy for metrics in history),
        "accuracy_last": history[-1].accuracy,
        **_privacy(job, books),
        "epsilon_total": epsilon_total,
        "uplink_bytes": sent / config.federation.agents,
        "payload_bytes": sent / max(1, uploads),
        "coding": job.coding,
        "compression": job.active / job.model.dimension,
        "dimension": job.model.dimension,
        "rounds": len(history),
        "agents": config.federation.agents,
        "engine": job.engine.name,
        "engine_reason": job.engine_reason,
        "tf32": getattr(job.engine, "tf32", False),
        "seconds": round(seconds, 3),
        "seed": config.run.seed,
        "warnings": warnings(job),
    }


def _privacy(job: Job, books: Books) -> dict[str, Any]:
    keys = ("epsilon", "epsilon_replace_one", "epsilon_published", "delta", "neighbours", "sampling", "accountant")
    if job.plan is None or books.guarantee is None:
        return {**dict.fromkeys((*keys, "noise_multiplier", "participations_max", "noise")), "private": False}
    plan, guarantee = job.plan, books.guarantee
    return {
        "epsilon": guarantee.epsilon_max(plan.neighbours),
        "epsilon_replace_one": guarantee.epsilon_max("replace-one"),
        "epsilon_published": guarantee.epsilon_published(),
        "delta": plan.delta,
        "neighbours": plan.neighbours,
        "sampling": plan.sampling,
        "accountant": guarantee.accountant_for(plan.neighbours),
        "noise_multiplier": plan.noise_multiplier,
        "participations_max": guarantee.participations_max,
        "private": plan.is_private,
        "noise": job.config.privacy.noise,
    }


def warnings(job: Job) -> list[str]:
    """What a reader of ε must know before believing it."""
    if job.plan is None:
        return [f"{job.config.algorithm.name} promises no privacy"]
    found = []
    if not job.plan.is_private:
        found.append("not private: privacy.clip_rule 'median' reads the clip value off the data without paying for it")
    if job.config.privacy.accountant == "theorem-1":
        found.append(
            "the noise was calibrated by the paper's Theorem 1, which is not sound; epsilon is the verified one"
        )
    if job.config.privacy.noise == "seeded":
        found.append("seeded noise: right for simulations, and no protection against anyone who knows run.seed")
    return found
