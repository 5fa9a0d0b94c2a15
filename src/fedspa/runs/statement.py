"""The guarantee in plain words, from a run's summary. No ε is ever shown without what it is relative to."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fedspa.mechanisms.gaussian.plan import CLIP_OFF_DATA

if TYPE_CHECKING:
    from fedspa.mechanisms import Plan
    from fedspa.runs.config import Config


def shown(epsilon: float) -> str:
    """ε to three digits, rounded up: a figure on a page may overstate a cost, never understate it."""
    return "∞" if math.isinf(epsilon) else f"{math.ceil(epsilon * 1000) / 1000:.3f}"


def shown_bytes(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.4g} {unit}"
        count /= 1000
    return f"{count:.4g} GB"


def statement(summary: Mapping[str, Any]) -> str:
    if summary["epsilon"] is None and summary["delta"] is None:
        return "none: this algorithm has no differential privacy"
    if summary["epsilon"] is None:
        return "NONE: no accountant knows one for these settings (see the notes)"
    other = ""
    if summary["neighbours"] != "replace-one":
        other = f"; ε = {shown(summary['epsilon_replace_one'])} under replace-one (pld)"
    if summary["epsilon_total"] is not None:
        by = summary.get("accountant_total") or "accountant not recorded"  # older summaries do not say
        other += f"; ε = {shown(summary['epsilon_total'])} against the server with all runs in the ledger ({by})"
    flaw = "NOT PRIVATE (see the notes); were the clip value given, " if _clip_off_data(summary) else ""
    against = "against the server and all others"
    if summary["adversary"] != "local":
        flaw = "NOT PRIVATE against the server (see the notes); under secure aggregation, which was not run, "
        against = "against who sees only the sum over all agents"
    if is_seeded(summary):
        flaw = f"NOT PRIVATE: THE NOISE WAS SEEDED, a simulation; with secure noise: {flaw}"
    return (
        f"{flaw}(ε = {shown(summary['epsilon'])}, δ = {summary['delta']:g}) for each record of each agent, {against}: "
        f"{summary['neighbours']}, {summary['sampling']} sampling, "
        f"accountant {summary['accountant']}, at most {summary['participations_max']} participations{other}"
    )


def is_seeded(summary: Mapping[str, Any]) -> bool:
    """Whether ε is a simulation's, of a run whose noise whoever knows the seed can subtract."""
    return bool(summary["noise"] == "seeded")


def _clip_off_data(summary: Mapping[str, Any]) -> bool:
    return CLIP_OFF_DATA in (summary["not_private_because"] or "")


def plain_words(summary: Mapping[str, Any], agents: int) -> list[tuple[str, str]]:
    """The guarantee for a reader who signs it: (what about, sentences), to be read as one paragraph."""
    if summary["epsilon"] is None:
        return [("Nothing is promised.", NO_PROMISE if summary["delta"] is None else NO_EPSILON)]
    epsilon, relation, local = summary["epsilon"], summary["neighbours"], summary["adversary"] == "local"
    terms = f"neighbouring relation {relation}, {summary['sampling']} sampling, accountant {summary['accountant']}"
    if _clip_off_data(summary):
        given = f" ε = {shown(epsilon)} at δ = {summary['delta']:g} ({terms}) would hold had the clip value been given."
        seeded = f" {SEEDED_NOISE}" if is_seeded(summary) else ""
        return [("Nothing is promised:", CLIP_FROM_DATA + given + seeded)]
    change = {
        "add-remove": "had that record been left out, or one been added",
        "replace-one": "had that record been any other",
    }[relation]
    factor = f" = {math.ceil(math.exp(epsilon) * 100) / 100:,.2f}" if epsilon < 10 else ""
    other = (
        f" Were a record exchanged for another (replace-one), ε = {shown(summary['epsilon_replace_one'])}."
        if relation != "replace-one"
        else ""
    )
    total = (
        f" With all earlier runs in the same ledger, against the server, ε = {shown(summary['epsilon_total'])} "
        f"({summary.get('accountant_total') or 'accountant not recorded'})."
        if summary["epsilon_total"] is not None
        else ""
    )
    promises = local and not is_seeded(summary)
    return [
        *([("Nothing is promised:", SEEDED_NOISE)] if is_seeded(summary) else []),
        *([] if local else [("Nothing is promised:", SERVER_SAW)]),
        ("Who is protected.", f"Each single record that any of the {agents} agents holds."),
        (
            "Against whom.",
            "Everyone outside that agent: the server, the other agents, and whoever sees the uploads or the model. "
            "Each agent adds its own noise before anything leaves it, so nobody else has to be honest."
            if local
            else "ONLY someone who sees nothing but the sum over all agents.",
        ),
        (
            "What is promised." if promises else "What would be promised.",
            f"Whatever such an observer concludes from all that the agent sent in this run: {change}, the chance of "
            f"that conclusion would have changed by a factor of at most e^ε{factor}, give or take δ = "
            f"{summary['delta']:g}. Here ε = {shown(epsilon)}, for the agent that spent most, with "
            f"{summary['participations_max']} participations ({terms}).{other}{total}",
        ),
        (
            "What is not covered.",
            "What the records teach together, which is what training is for; that an agent takes part, when, and with "
            "how many records; a person with several records, whose guarantee is weaker (for g records, g times the ε "
            "and a larger δ); other runs and trials on the same records that are not in the same ledger; the server's "
            "own held-out records, on which the model is scored; and the time that a participation takes.",
        ),
    ]


NO_EPSILON = "No accountant bounds the noise of these settings: ε is not stated."
CLIP_FROM_DATA = (
    'the clip value was read off the records (privacy.clip_rule = "median") and nothing was paid for it, so what left '
    "the agents may tell more of a record than the noise hides, and no ε bounds how much."
)
SEEDED_NOISE = (
    "THE NOISE OF THIS RUN WAS SEEDED. It is a simulation: whoever knows or guesses run.seed can subtract the noise, "
    "so neither its uploads nor its model are private. What is said of ε would hold for the same run with secure noise."
)
SERVER_SAW = (
    "the server of this run saw each agent's update, and against it there is no guarantee. Secure aggregation would "
    "have hidden them and was not run; what follows holds only under it."
)
NO_PROMISE = (
    "Updates leave the agents without noise. Whoever sees them, the server first of all, may learn what single records "
    "say: this algorithm has no differential privacy."
)


def warnings(config: Config, plan: Plan | None) -> list[str]:
    """What a reader of ε must know before believing it. `plan` is the run's; None where it has none, or it is lost."""
    if not config.private:
        return [f"{config.algorithm.name} promises no privacy"]
    found = [] if plan is None else list(plan.notes)
    if config.privacy.accountant == "theorem-1":
        found.append(
            "the noise was calibrated by the paper's Theorem 1, which is not sound; epsilon is the verified one"
        )
    if config.privacy.noise == "seeded":
        found.append(
            "seeded noise, not private: a simulation, whose noise whoever knows run.seed can subtract; what ε says is "
            'true with privacy.noise = "secure"'
        )
    return found
