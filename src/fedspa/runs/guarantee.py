"""What a run has promised so far: ε by agent, from the number of times each took part."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from fedspa.errors import FedspaError, PrivacyError
from fedspa.mechanisms import Plan
from fedspa.privacy.accounting import epsilon
from fedspa.privacy.budget import AGAINST_ALL, FirstPlan, total, worst_case_total
from fedspa.privacy.event import Event, Neighbours, noise_modes, seeded_warning, shown
from fedspa.runs.config import algorithm_of

if TYPE_CHECKING:
    from fedspa.agent.ledger.ledger import Ledger
    from fedspa.runs.config import Config


class Guarantee:
    """Counts participations and prices them. ε belongs to an agent: its own participations in the plan's event."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._counts: dict[int, int] = {}
        self.participations_max = 0

    def participations(self, agent: int) -> int:
        return self._counts.get(agent, 0)

    def count_participation(self, agents: Iterable[int], times: int = 1) -> None:
        for agent in agents:
            self._counts[agent] = self._counts.get(agent, 0) + times
            self.participations_max = max(self.participations_max, self._counts[agent])

    def epsilon_max(self, neighbours: Neighbours) -> float:
        """Return the largest ε over agents under this relation, at the plan's δ; 0 before anyone took part."""
        return epsilon({self._plan.event: self.participations_max}, self._plan.delta, neighbours=neighbours)

    def epsilon_worst_case(self) -> float | None:
        """The largest ε over agents against one who colludes with all others, under the plan's relation: never less
        than against the server, and infinite where one agent's noise has none. None where nothing is aggregated."""
        plan, event = self._plan, self._plan.worst_case_event
        if event is None:
            return None
        alone = epsilon({event: self.participations_max}, plan.delta, neighbours=plan.neighbours)
        return max(alone, self.epsilon_max(plan.neighbours))

    @property
    def accountant(self) -> str:
        """Return the name of the accountant, for the reader of ε."""
        return self._plan.event.accountant(self._plan.neighbours)


SEEDED = "seeded noise"
ALL_RUNS = "all runs of these agents in the ledger"


def finite(cost: float | None) -> float | None:
    """Replace ∞ for JSON, which has none: an ε that is null beside a δ is infinite, and so is a worst case that is null
    beside `members`."""
    return None if cost is None or math.isinf(cost) else cost


def check_finite(plan: Plan) -> None:
    """Raise where ε of the first round or of the whole plan is not finite, before anything is paid.

    Both, since a single release at a tiny δ may have no finite ε by the same arithmetic that composes many.
    """
    for times in (1, plan.participations):
        spent = Guarantee(plan)
        spent.count_participation([0], times)
        if not all(math.isfinite(spent.epsilon_max(relation)) for relation in (plan.neighbours, "replace-one")):
            raise PrivacyError(
                f"no accountant gives a finite ε for noise multiplier {plan.noise_multiplier:g} at δ = {plan.delta:g} "
                f"over {plan.participations} participations; take more noise (privacy.epsilon finds the least), a "
                "larger delta, or fewer steps and rounds"
            )


def not_private_because(plan: Plan | None, noise: str) -> str | None:
    """Return why whatever ε is stated beside it is no guarantee, in a few words; None where it is one."""
    if plan is None:
        return "no noise at all"
    return SEEDED if noise == "seeded" else None


def promised(plan: Plan | None, guarantee: Guarantee | None, noise: str) -> dict[str, Any]:
    """What a summary says of privacy; `noise` is where it came from. None throughout where nothing is promised."""
    if plan is None or guarantee is None:
        keys = (
            *("unit", "epsilon", "epsilon_worst_case", "epsilon_replace_one", "delta", "neighbours"),
            *("sampling", "accountant", "noise_multiplier", "participations_max", "noise", "adversary", "members"),
            "colluders",
        )
        return {**dict.fromkeys(keys), "private": False, "not_private_because": not_private_because(None, noise)}
    why = not_private_because(plan, noise)
    summed = plan.aggregation
    return {
        "unit": plan.unit,
        "epsilon": finite(guarantee.epsilon_max(plan.neighbours)),
        "epsilon_worst_case": finite(guarantee.epsilon_worst_case()),
        "epsilon_replace_one": finite(guarantee.epsilon_max("replace-one")),
        "delta": plan.delta,
        "neighbours": plan.neighbours,
        "sampling": plan.sampling,
        "accountant": guarantee.accountant,
        "noise_multiplier": plan.noise_multiplier,
        "participations_max": guarantee.participations_max,
        "private": why is None,
        "not_private_because": why,
        "noise": noise,
        "adversary": "local" if summed is None else "secure-aggregation",
        "members": None if summed is None else summed.members,
        "colluders": None if summed is None else summed.colluders,
        **plan.summary(),
    }


def shown_bytes(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.4g} {unit}"
        count /= 1000
    return f"{count:.4g} GB"


def observer(summary: Mapping[str, Any]) -> str:
    """Return the adversary against whom ε holds."""
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
        other += f"; WORST-CASE ε = {shown(summary['epsilon_worst_case'])} {AGAINST_ALL}, {summary['neighbours']}"
    if summary["epsilon_total"] is not None:
        by = summary["accountant_total"]
        other += f"; ε = {shown(summary['epsilon_total'])} against the server with {ALL_RUNS} ({by})"
        if _sums_in_ledger(summary):
            other += f", and {shown(summary['epsilon_total_worst_case'])} {AGAINST_ALL}"
    flaw = "NOT PRIVATE: THE NOISE WAS SEEDED, a simulation; with secure noise: " if is_seeded(summary) else ""
    return (
        f"{flaw}(ε = {shown(summary['epsilon'])}, δ = {summary['delta']:g}) for each {protected(summary)} of each "
        f"agent, against {observer(summary)}: {summary['neighbours']}, {summary['sampling']} sampling, "
        f"accountant {summary['accountant']}, at most {summary['participations_max']} participations{other}"
    )


def is_seeded(summary: Mapping[str, Any]) -> bool:
    """Return whether ε is that of a simulation, whose noise anyone who knows the seed can subtract."""
    return bool(summary["noise"] == "seeded")


def protected(summary: Mapping[str, Any]) -> str:
    """Return the unit that is protected: a record, or a person with all records."""
    return str(summary["unit"])


def describe_guarantee(summary: Mapping[str, Any], agents: int) -> list[tuple[str, str]]:
    """Return the guarantee for a reader who signs it: (what about, sentences), a paragraph each."""
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
        ("Against whom.", f"{_against_whom(summary)}{_describe_noise(summary)}"),
        (
            "What would be promised." if is_seeded(summary) else "What is promised.",
            f"{_example(summary)} {_definition(summary)} This is for the agent that spent most, with "
            f"{summary['participations_max']} participations ({terms}).{_other_terms(summary)}",
        ),
        *([("The worst case.", _describe_worst_case(summary))] if summary.get("members") else []),
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


def found_at(epsilon: float, delta: float, wrongly: float = 0.01) -> float:
    """Return which share of the records that were used an attack finds at most, where it accuses a share `wrongly` of
    those that were not: the largest power of a test at that level under (ε, δ) (Kairouz, Oh and Viswanath 2015)."""
    factor = math.exp(min(epsilon, 700.0))
    return min(1.0, factor * wrongly + delta, 1 - (1 - delta - wrongly) / factor)


def _example(summary: Mapping[str, Any]) -> str:
    """Return what ε means for one of those who are protected, without a formula."""
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
    found = found_at(summary["epsilon"], summary["delta"])
    return (
        f"Let a coin decide {coin}. {who}, knows all other records, and guesses how the coin fell: the guess is right "
        f"at most {often} times in 100. Without looking it would be 50. One who accuses 1 in 100 of those who were "
        f"left out finds at most {found:.1%} of those who were used.{weak}"
    )


def _definition(summary: Mapping[str, Any]) -> str:
    change = {
        ("add-remove", "record"): "if that record had been removed, or one added",
        ("replace-one", "record"): "if that record had been replaced by any other",
        ("add-remove", "person"): "if that person, with all records, had been removed, or one added",
        ("replace-one", "person"): "if all that the agent holds of that person had been replaced by anything else",
    }[summary["neighbours"], protected(summary)]
    epsilon = summary["epsilon"]
    factor = f" = {math.ceil(math.exp(epsilon) * 100) / 100:,.2f}" if epsilon < 10 else ""
    return (
        f"In the words of the definition, ε = {shown(epsilon)} and δ = {summary['delta']:g}: {change}, the chance of "
        f"any conclusion would have changed by a factor of at most e^ε{factor}, plus δ."
    )


def _other_terms(summary: Mapping[str, Any]) -> str:
    """ε under the other relation, and with all that the ledger knows of."""
    found = ""
    if summary["neighbours"] != "replace-one":
        found += f" If a {protected(summary)} is replaced by another (replace-one), "
        found += f"ε = {shown(summary['epsilon_replace_one'])}."
    if summary["epsilon_total"] is not None:
        colluders = worst = ""
        if _sums_in_ledger(summary):
            colluders = " with up to the colluding agents of each run"
            worst = f", and ε = {shown(summary['epsilon_total_worst_case'])} {AGAINST_ALL}"
        found += (
            f" With all other runs of these agents in the ledger, against the server{colluders}, "
            f"ε = {shown(summary['epsilon_total'])} ({summary['accountant_total']}){worst}."
        )
    return found


def noise_kind(summary: Mapping[str, Any]) -> str | None:
    """Return how the noise was drawn; None where it is nobody's protection. Some mechanisms draw whole numbers in any
    mode."""
    if summary["noise"] not in ("secure", "exact"):
        return None
    whole = summary["noise"] == "exact" or summary.get("members") or summary.get("whole_numbers")
    return f"keyed by the operating system, in {'whole numbers' if whole else 'float64'}"


def _describe_noise(summary: Mapping[str, Any]) -> str:
    kind = noise_kind(summary)
    return "" if kind is None else f" The noise is cryptographic, {kind}."


def _sums_in_ledger(summary: Mapping[str, Any]) -> bool:
    """Return whether some of the runs that a total is of were aggregated."""
    return bool(summary.get("members") or summary.get("epsilon_total_worst_case") is not None)


def _against_whom(summary: Mapping[str, Any]) -> str:
    members, colluders = summary.get("members"), summary.get("colluders")
    if not members:
        return (
            "Everyone outside that agent: the server, the other agents, and anyone who sees the uploads or the model. "
            "Each agent adds its own noise before anything leaves it, so nobody else has to be honest."
        )
    counted = members - (colluders or 0)
    with_them = f", even if up to {colluders} of these agents collude with it" if colluders else ""
    return (
        f"The server, and anyone who sees the uploads or the model{with_them}. Deployed agents mask their uploads, and "
        f"only their sum over {members} agents or more can be read. That sum holds the noise of {counted} honest "
        "agents at least, the agent's own included: they have to add it and keep their keys secret."
    )


def _describe_worst_case(summary: Mapping[str, Any]) -> str:
    case = "If all other agents collude with the server, or the masks are broken, only the agent's own noise is left: "
    if summary["epsilon_worst_case"] is None:
        return f"{case}that alone has no ε, and nothing is promised then."
    return f"{case}ε = {shown(summary['epsilon_worst_case'])} at the same δ, by the same accountant."


_PERSON_WITH_SEVERAL = (
    "A person with several records, whose guarantee is weaker: for g records, g times the ε and a larger δ."
)
_PERSON_AT_SEVERAL = (
    "A person of whom several agents hold records: they pay at each, and their ε add up. What others' records tell of "
    "a person."
)
NO_EPSILON = "The noise of this simulation is too small for any ε."
SEEDED_NOISE = (
    "THE NOISE OF THIS RUN WAS SEEDED. It is a simulation: anyone who knows or guesses run.seed can subtract the "
    "noise, so neither its uploads nor its model are private. The stated ε would hold for the same run with secure "
    "noise."
)
NO_PROMISE = (
    "Updates leave the agents without noise. Anyone who sees them, the server first of all, may learn what single "
    "records contain: this algorithm has no differential privacy."
)


def warnings(config: Config) -> list[str]:
    """Return what a reader of ε must know before relying on it."""
    if algorithm_of(config).mechanism is None:
        return [f"{config.algorithm.name} promises no privacy"]
    found = []
    if config.privacy.noise == "seeded":
        found.append(
            "seeded noise, not private: a simulation, whose noise anyone who knows run.seed can subtract; "
            'ε holds with privacy.noise = "secure"'
        )
    return found


@dataclass(frozen=True, slots=True)
class LedgerTotal:
    """ε of all runs in a ledger and what priced it; None where none can be stated, and then `note` says why: a trained
    run never fails. `worst_case` is the same against all others together, where some of it was aggregated and there is
    one."""

    epsilon: float | None
    note: str | None = None
    accountant: str | None = None
    worst_case: float | None = None


def no_total(error: FedspaError) -> LedgerTotal:
    """Return no total: another process wrote into the ledger what this version cannot read, or damaged it."""
    return LedgerTotal(None, f"no ε over {ALL_RUNS}: {error}; this run's own ε stands")


def total_in(ledger: Ledger, plan: Plan, agents: Iterable[str]) -> LedgerTotal:
    """Return what a record of `agents` can have cost over the runs of a ledger, and how many runs are not counted."""
    runs = ledger.runs_with(agents)
    found = total_of(plan, ledger.largest(runs), ledger.first_plan_of(runs))
    if left := ledger.run_count() - len(runs):
        note = (
            f"runs in the ledger that are not counted, since their agents have other names: {left}. An agent's name "
            "stands for its records; if they had the same records, their ε adds up"
        )
        found = replace(found, note="; ".join(filter(None, (found.note, note))))
    return found


def total_of(plan: Plan, held: Mapping[Event, int], first: FirstPlan | None) -> LedgerTotal:
    """Return what `held` can have cost a record, under the plan's relation: the events of all runs of these agents in a
    ledger (`Ledger.runs_with`), of each run those of the agent that took part most. `first` is the first plan."""
    # Events of fixed-size batches have no ε under add-remove; those of both kinds have one under replace-one.
    mixed = plan.neighbours == "add-remove" and any(event.sampling == "fixed" for event in held)
    relation = "replace-one" if mixed else plan.neighbours
    own = total(held, plan.delta, relation, first)
    largest, by = own
    if math.isinf(largest):
        return LedgerTotal(
            None,
            f"no guarantee over {ALL_RUNS}: it holds participations whose noise, seeded in a "
            "simulation, is too small for any ε",
        )
    worst = worst_case_total(held, plan.delta, relation, first, own).epsilon
    aggregated = any(event.members for event in held)
    beside = f", and {shown(worst)} {AGAINST_ALL}" if aggregated else ""
    words = seeded_warning(noise_modes(held))
    by += "" if words is None else f"; {words}"
    if mixed:
        return LedgerTotal(
            None,
            f"no ε over {ALL_RUNS} under add-remove, since some of them drew batches of a fixed size; under "
            f"replace-one it is {shown(largest)} at δ = {plan.delta:g}, against the server{beside} ({by})",
        )
    if math.isinf(worst):
        note = f"no ε over {ALL_RUNS} {AGAINST_ALL}: one agent's noise of some of them bounds nothing"
        return LedgerTotal(largest, note, by)
    return LedgerTotal(largest, accountant=by, worst_case=worst if aggregated else None)
