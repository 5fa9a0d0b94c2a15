"""The guarantee in plain words, from a run's summary. No ε is ever shown without what it is relative to."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fedspa.privacy.cap import AGAINST_ALL
from fedspa.privacy.cap import shown as shown  # with its kin, for all who show figures
from fedspa.runs.plans import algorithm_of

if TYPE_CHECKING:
    from fedspa.runs.config import Config


def shown_bytes(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.4g} {unit}"
        count /= 1000
    return f"{count:.4g} GB"


def observer(summary: Mapping[str, Any]) -> str:
    """Against whom ε holds."""
    members = summary.get("members")
    if not members:
        return "the server and all others"
    if not summary["colluders"]:
        return f"the server, which sees sums over {members} agents or more"
    return f"the server with up to {summary['colluders']} of the {members} agents or more whose sums it sees"


def statement(summary: Mapping[str, Any]) -> str:
    if summary["epsilon"] is None and summary["delta"] is None:
        return "none: this algorithm has no differential privacy"
    if summary["epsilon"] is None:
        return "NONE: the noise is too small for any ε"
    other = ""
    if summary["neighbours"] != "replace-one":
        other = f"; ε = {shown(summary['epsilon_replace_one'])} under replace-one (pld)"
    if summary.get("members"):
        other += f"; FLOOR ε = {shown(summary['epsilon_floor'])} {AGAINST_ALL}, {summary['neighbours']}"
    if summary["epsilon_total"] is not None:
        by = summary["accountant_total"]
        other += f"; ε = {shown(summary['epsilon_total'])} against the server with all runs in the ledger ({by})"
        if _sums_in_ledger(summary):
            other += f", and {shown(summary['epsilon_total_floor'])} {AGAINST_ALL}"
    flaw = "NOT PRIVATE: THE NOISE WAS SEEDED, a simulation; with secure noise: " if is_seeded(summary) else ""
    return (
        f"{flaw}(ε = {shown(summary['epsilon'])}, δ = {summary['delta']:g}) for each {protected(summary)} of each "
        f"agent, against {observer(summary)}: {summary['neighbours']}, {summary['sampling']} sampling, "
        f"accountant {summary['accountant']}, at most {summary['participations_max']} participations{other}"
    )


def is_seeded(summary: Mapping[str, Any]) -> bool:
    """Whether ε is a simulation's, of a run whose noise whoever knows the seed can subtract."""
    return bool(summary["noise"] == "seeded")


def protected(summary: Mapping[str, Any]) -> str:
    """Return the unit that is protected: a record, or a person with all records."""
    return str(summary["unit"])


def plain_words(summary: Mapping[str, Any], agents: int) -> list[tuple[str, str]]:
    """The guarantee for a reader who signs it: (what about, sentences), a paragraph each."""
    if summary["epsilon"] is None:
        return [("Nothing is promised.", NO_PROMISE if summary["delta"] is None else NO_EPSILON)]
    relation = summary["neighbours"]
    terms = f"neighbouring relation {relation}, {summary['sampling']} sampling, accountant {summary['accountant']}"
    person = protected(summary) == "person"
    return [
        *([("Nothing is promised:", SEEDED_NOISE)] if is_seeded(summary) else []),
        (
            "Who is protected.",
            f"Each person of whom any of the {agents} agents holds records, with all of these, however many they are."
            if person
            else f"Each single record that any of the {agents} agents holds.",
        ),
        ("Against whom.", f"{_against_whom(summary)}{_noise_words(summary)}"),
        (
            "What would be promised." if is_seeded(summary) else "What is promised.",
            f"{_example(summary)} {_definition(summary)} This is for the agent that spent most, with "
            f"{summary['participations_max']} participations ({terms}).{_other_terms(summary)}",
        ),
        *([("The floor.", _floor_words(summary))] if summary.get("members") else []),
        (
            "What is not covered.",
            "What the records teach together, which is what training is for. That an agent takes part, when, for how "
            f"long, and with how many {protected(summary)}s. {_PERSON_AT_SEVERAL if person else _PERSON_WITH_SEVERAL} "
            "Other runs and trials on the same records that are not in the same ledger. The server's own held-out "
            "records, on which the model is scored.",
        ),
    ]


def guesses(epsilon: float, delta: float) -> int:
    """How often in 100, at most, a guess is right at which of two neighbouring data sets was used, where a coin chose
    one; rounded up. (ε, δ) bounds the errors of both kinds, P(S) ≤ e^ε·Q(S) + δ and the other way, and so their sum."""
    most = 1 - (1 - delta) / (1 + math.exp(min(epsilon, 700.0)))
    return min(100, math.ceil(round(100 * most, 9)))


def _example(summary: Mapping[str, Any]) -> str:
    """What ε means for one of those who are protected, without a formula."""
    thing = "all that the agent holds of you" if protected(summary) == "person" else "your record"
    coin = (
        f"whether {thing} is used or left out"
        if summary["neighbours"] == "add-remove"
        else f"whether {thing} is used or something else in its place"
    )
    often = guesses(summary["epsilon"], summary["delta"])
    weak = " So large an ε protects hardly at all." if often == 100 else ""
    local = not summary.get("members")
    who = "Someone sees all that the agent sent in this run" if local else "Such an observer sees what there is to see"
    return (
        f"Let a coin decide {coin}. {who}, knows all other records, and guesses how the coin fell: the guess is right "
        f"at most {often} times in 100. Without looking it would be 50.{weak}"
    )


def _definition(summary: Mapping[str, Any]) -> str:
    change = {
        ("add-remove", "record"): "had that record been left out, or one been added",
        ("replace-one", "record"): "had that record been any other",
        ("add-remove", "person"): "had that person been left out, with all their records there, or one been added",
        ("replace-one", "person"): "had all that the agent holds of that person been anything else",
    }[summary["neighbours"], protected(summary)]
    epsilon = summary["epsilon"]
    factor = f" = {math.ceil(math.exp(epsilon) * 100) / 100:,.2f}" if epsilon < 10 else ""
    return (
        f"In the words of the definition, ε = {shown(epsilon)} and δ = {summary['delta']:g}: {change}, the chance of "
        f"any conclusion would have changed by a factor of at most e^ε{factor}, give or take δ."
    )


def _other_terms(summary: Mapping[str, Any]) -> str:
    """ε under the other relation, and with all that the ledger knows of."""
    found = ""
    if summary["neighbours"] != "replace-one":
        found += f" Were a {protected(summary)} exchanged for another (replace-one), "
        found += f"ε = {shown(summary['epsilon_replace_one'])}."
    if summary["epsilon_total"] is not None:
        found += (
            f" With all earlier runs in the same ledger, against the server{_with_colluders(summary)}, "
            f"ε = {shown(summary['epsilon_total'])} ({summary['accountant_total']})"
            f"{_total_floor(summary)}."
        )
    return found


def noise_kind(summary: Mapping[str, Any]) -> str | None:
    """How the noise was drawn; None where it is nobody's protection. Some mechanisms draw whole numbers in any
    mode."""
    if summary["noise"] not in ("secure", "exact"):
        return None
    whole = summary["noise"] == "exact" or summary.get("members") or summary.get("whole_numbers")
    return f"keyed by the operating system, in {'whole numbers' if whole else 'float64'}"


def _noise_words(summary: Mapping[str, Any]) -> str:
    kind = noise_kind(summary)
    return "" if kind is None else f" The noise is cryptographic, {kind}."


def _sums_in_ledger(summary: Mapping[str, Any]) -> bool:
    """Whether some of the runs that a total is of were aggregated."""
    return bool(summary.get("members") or summary.get("epsilon_total_floor") is not None)


def _with_colluders(summary: Mapping[str, Any]) -> str:
    return " with up to the colluding agents that each run reckoned with" if _sums_in_ledger(summary) else ""


def _total_floor(summary: Mapping[str, Any]) -> str:
    if not _sums_in_ledger(summary):
        return ""
    return f", and ε = {shown(summary['epsilon_total_floor'])} {AGAINST_ALL}"


def _against_whom(summary: Mapping[str, Any]) -> str:
    members, colluders = summary.get("members"), summary.get("colluders")
    if not members:
        return (
            "Everyone outside that agent: the server, the other agents, and whoever sees the uploads or the model. "
            "Each agent adds its own noise before anything leaves it, so nobody else has to be honest."
        )
    counted = members - (colluders or 0)
    with_them = f", also where up to {colluders} of these agents tell it all they know" if colluders else ""
    return (
        f"The server, and whoever sees the uploads or the model{with_them}. Deployed agents mask their uploads, and "
        f"only their sum over {members} agents or more can be read. That sum holds the noise of {counted} honest "
        "agents at least, the agent's own among it: they have to add it and keep their keys to themselves."
    )


def _floor_words(summary: Mapping[str, Any]) -> str:
    case = "Should all other agents be with the server, or the masks be broken, only the agent's own noise is left: "
    if summary["epsilon_floor"] is None:
        return f"{case}that alone has no ε, and nothing is promised then."
    return f"{case}ε = {shown(summary['epsilon_floor'])} at the same δ, by the same accountant."


_PERSON_WITH_SEVERAL = (
    "A person with several records, whose guarantee is weaker: for g records, g times the ε and a larger δ."
)
_PERSON_AT_SEVERAL = (
    "A person of whom several agents hold records: they pay at each, and their ε add up. What others' records tell of "
    "a person."
)
NO_EPSILON = "The noise of this simulation is too small for any ε."
SEEDED_NOISE = (
    "THE NOISE OF THIS RUN WAS SEEDED. It is a simulation: whoever knows or guesses run.seed can subtract the noise, "
    "so neither its uploads nor its model are private. What is said of ε would hold for the same run with secure noise."
)
NO_PROMISE = (
    "Updates leave the agents without noise. Whoever sees them, the server first of all, may learn what single records "
    "say: this algorithm has no differential privacy."
)


def warnings(config: Config) -> list[str]:
    """What a reader of ε must know before believing it."""
    if algorithm_of(config).mechanism is None:
        return [f"{config.algorithm.name} promises no privacy"]
    found = []
    if config.privacy.noise == "seeded":
        found.append(
            "seeded noise, not private: a simulation, whose noise whoever knows run.seed can subtract; what ε says is "
            'true with privacy.noise = "secure"'
        )
    return found
