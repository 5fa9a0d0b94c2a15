"""Confidence bounds, and questions that any mechanism can ask: of a threshold attack, a law, independence, a sampler.

`alpha` is always the chance that a bound is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import special, stats

from fedspa.mechanisms import Plan

# What an audit asks and what it answers: a `Question` becomes a `Check`, and a `Report` holds all checks.
#
# A question is made after its experiment, and judged later: how sure its bound must be depends on how many questions
# rest on chance, and the runner counts those.

# What claimed and lower_bound count. `mu` and `epsilon` are privacy, `levels` a sensitivity after rounding; the others
# are departures from the mechanism as accounted: `claimed` is then the largest value that chance allows at the check's
# confidence.
Unit = Literal["mu", "epsilon", "levels", "deviation", "correlation", "count"]
ATTACK_UNITS = ("mu", "epsilon")
# Stands for "nothing is hidden": JSON has no infinity.
UNBOUNDED = 1e9


@dataclass(frozen=True, slots=True)
class Check:
    """An answer. It holds where `lower_bound`, what was seen, stays within `claimed`, and the attack had its reach.

    `confidence` is the chance that a sound mechanism passes; 1 for a check without chance.
    """

    name: str
    unit: Unit
    claimed: float
    lower_bound: float
    confidence: float
    holds: bool
    detail: str

    @property
    def ratio(self) -> float:
        """Return how near to the claim it came; above 1 is a breach."""
        if self.claimed > 0:
            return self.lower_bound / self.claimed
        return UNBOUNDED if self.lower_bound > self.claimed else 0.0


class Finding(NamedTuple):
    """What a question found. `holds` is given where more is asked than that `seen` is at most `claimed`."""

    claimed: float
    seen: float
    detail: str
    holds: bool | None = None


@dataclass(frozen=True, slots=True)
class Question:
    """`judge` takes the chance at which it may fail sound code.

    `share` is the question's part of the audit's false-alarm rate, relative to the other questions. It is 0 where sound
    code cannot fail. It must not depend on what was drawn.
    """

    name: str
    unit: Unit
    judge: Callable[[float], Finding]
    share: float = 1.0

    def answer(self, alpha: float) -> Check:
        """Return the check, wrong about sound code with a chance of at most `alpha`."""
        claimed, seen, detail, holds = self.judge(alpha)
        confidence = 1 - alpha if self.share > 0 else 1.0
        return Check(
            self.name, self.unit, claimed, seen, confidence, seen <= claimed if holds is None else holds, detail
        )


def certain(name: str, unit: Unit, claimed: float, seen: float, detail: str, holds: bool | None = None) -> Question:
    """A question without chance."""
    return Question(name, unit, lambda _: Finding(claimed, seen, detail, holds), share=0.0)


@dataclass(frozen=True, slots=True)
class Report:
    """All checks. `false_alarm` bounds the chance that any of them fails on a sound mechanism (union bound)."""

    checks: tuple[Check, ...]
    false_alarm: float
    notes: tuple[str, ...] = ()

    @property
    def holds(self) -> bool:
        return all(check.holds for check in self.checks)

    @property
    def headline(self) -> Check:
        """Return the worst failure, a breach before a mere departure; else the statistical attack that came nearest."""
        failed = [check for check in self.checks if not check.holds]
        candidates = failed or [check for check in self.checks if check.confidence < 1] or self.checks
        attacks = [check for check in candidates if check.unit in ATTACK_UNITS]
        return max(attacks or candidates, key=lambda check: check.ratio)

    def to_json(self) -> dict[str, Any]:
        """Return the headline's figures, the verdict over all checks, and the checks."""
        headline = self.headline
        return {
            "claimed": headline.claimed,
            "lower_bound": headline.lower_bound,
            "confidence": headline.confidence,
            "holds": self.holds,
            "check": headline.name,
            "unit": headline.unit,
            "false_alarm": self.false_alarm,
            "checks": [asdict(check) for check in self.checks],
            "notes": list(self.notes),
        }


Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
MOST_COLUMNS = 256


def proportion(successes: int, trials: int, alpha: float) -> tuple[float, float]:
    """Clopper–Pearson: both ends hold together except with chance `alpha`."""
    low = float(stats.beta.ppf(alpha / 2, successes, trials - successes + 1)) if successes > 0 else 0.0
    high = float(stats.beta.isf(alpha / 2, successes + 1, trials - successes)) if successes < trials else 1.0
    return low, high


def mu_lower(hits: int, false_hits: int, trials: int, alpha: float) -> float:
    """Gaussian DP (Dong, Roth & Su 2022): a test of these error rates needs μ ≥ Φ⁻¹(1 − FPR) − Φ⁻¹(FNR)."""
    hit_rate, _ = proportion(hits, trials, alpha / 2)
    _, false_rate = proportion(false_hits, trials, alpha / 2)
    return max(0.0, float(stats.norm.isf(false_rate) - stats.norm.isf(hit_rate)))


def epsilon_lower(delta: float, hits: int, false_hits: int, trials: int, alpha: float) -> float:
    """(ε, δ)-DP: P(S|D) ≤ e^ε·P(S|D′) + δ for the attack's event S, hence ε ≥ ln((TPR − δ)/FPR)."""
    hit_rate, _ = proportion(hits, trials, alpha / 2)
    _, false_rate = proportion(false_hits, trials, alpha / 2)
    return math.log((hit_rate - delta) / false_rate) if hit_rate - delta > false_rate else 0.0


def epsilon_lower_one_run(canaries: int, guesses: int, correct: int, delta: float, alpha: float) -> float:
    """One run, many canaries: in or out by fair coins, guessed or abstained (Steinke, Nasr & Jagielski 2023, Thm 5.2).

    Under (ε, δ)-DP the number of right guesses is dominated by Bin(guesses, e^ε/(1 + e^ε)), but for an excess that
    δ pays for. The bound is the largest ε at which so many right guesses have a chance below `alpha`.
    """
    if _chance(canaries, guesses, correct, delta, 0.0) > alpha:
        return 0.0
    low, high = 0.0, 50.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if _chance(canaries, guesses, correct, delta, middle) <= alpha else (low, middle)
    return low


def _chance(canaries: int, guesses: int, correct: int, delta: float, epsilon: float) -> float:
    """Most that P(X ≥ correct) can be: the tail of Bin, and 2·canaries·δ·max_i P(correct − i ≤ X < correct)/i."""
    rate = 1 / (1 + math.exp(-epsilon))
    tail = float(stats.binom.sf(correct - 1, guesses, rate))
    if correct == 0:
        return 1.0
    below = stats.binom.pmf(np.arange(correct - 1, -1, -1), guesses, rate).cumsum()
    share = float((below / np.arange(1, correct + 1)).max())
    return min(1.0, tail + 2 * canaries * delta * share)


@cache
def variance_limits(count: int, alpha: float) -> tuple[float, float]:
    """Return where the mean square of `count` standard normals lies but for `alpha` (χ², both sides)."""
    low, high = stats.chi2.ppf(alpha / 2, count), stats.chi2.isf(alpha / 2, count)
    return float(low) / count, float(high) / count


def cosine_limit(length: int, pairs: int, alpha: float) -> float:
    """The largest |cosine| among `pairs` pairs of independent Gaussian vectors of this length, but for `alpha`."""
    shape = (length - 1) / 2
    return float(2 * stats.beta.isf(alpha / (2 * pairs), shape, shape) - 1)


def threshold_attack(
    name: str,
    unit: Unit,
    claimed: float,
    sides: Sequence[Floats],
    threshold: float | Callable[[float], float],
    bound: Callable[[int, int, int, float], float],
    detail: str,
) -> Question:
    """`sides` are scores of releases with either of two neighbours. A score above the threshold is guessed to be of the
    first; `bound` makes a lower bound from the right and the wrong guesses, the draws and alpha.

    The threshold may depend on the claim and on alpha, never on the draws, so that the bound holds at its confidence.
    """
    draws = len(sides[0])

    def judge(alpha: float) -> Finding:
        at = threshold(alpha) if callable(threshold) else threshold
        hits, false_hits = (int((scores > at).sum()) for scores in sides)
        return Finding(claimed, bound(hits, false_hits, draws, alpha), f"{detail}, {draws} draws a side")

    return Question(name, unit, judge)


def law_question(name: str, law: Any, samples: Sequence[NDArray[Any]], detail: str) -> Question:
    """Every sample against a law of scipy's, by the largest distance of the distribution functions.

    What chance allows is the bound of Dvoretzky, Kiefer & Wolfowitz (Massart 1990), for all samples together. The
    figures are those of the sample that comes nearest to it.
    """
    sizes = [sample.size for sample in samples]
    distances = [_distance(law, sample.ravel().astype(np.float64)) for sample in samples]
    worst = int(np.argmax(np.array(distances) * np.sqrt(sizes)))

    def judge(alpha: float) -> Finding:
        return Finding(math.sqrt(math.log(2 * len(samples) / alpha) / (2 * sizes[worst])), distances[worst], detail)

    return Question(name, "deviation", judge)


def _distance(law: Any, values: Floats) -> float:
    points, counts = np.unique(values, return_counts=True)
    reached = counts.cumsum() / len(values)
    below = np.concatenate([[0.0], reached[:-1]])
    # A discrete law jumps at a point: just before it, its distribution function is still lower.
    before = law.cdf(np.nextafter(points, -math.inf))
    return float(max(np.abs(reached - law.cdf(points)).max(), np.abs(below - before).max()))


def cosines(name: str, vectors: NDArray[Any], what: str) -> Question:
    """Return whether these vectors look independent: their largest |cosine| against what chance gives."""
    units = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-300)
    above = np.triu_indices(len(units), 1)
    largest = float(np.abs((units @ units.T)[above]).max()) if len(above[0]) else 0.0
    pairs, length = max(1, len(above[0])), vectors.shape[1]
    detail = f"largest |cosine| among {pairs} {what}, {length} values each"
    return Question(name, "correlation", lambda alpha: Finding(cosine_limit(length, pairs, alpha), largest, detail))


def columns(name: str, draws: NDArray[Any]) -> Question:
    """Return whether coordinates are independent; of a large model evenly spread coordinates and their neighbours."""
    k = draws.shape[1]
    if k > MOST_COLUMNS:
        first = np.linspace(0, k - 2, MOST_COLUMNS // 2).astype(np.int64)
        draws = draws[:, np.unique(np.concatenate([first, first + 1]))]
    return cosines(name, draws.T, "pairs of coordinates")


def noise_size(name: str, claimed: float, groups: Sequence[Floats], detail: str) -> Question:
    """Return whether groups of values, over the claimed σ, have variance 1: two-sided, all groups together.

    As a bound on μ: the least noise that was seen, at its upper confidence limit.
    """
    means = np.array([(group**2).mean() for group in groups])
    ratios = f"σ over claimed: {math.sqrt(means[0]):.4f}"
    if len(means) > 1:
        ratios += f" in all, {math.sqrt(means.min()):.4f} to {math.sqrt(means.max()):.4f} by batch size and coordinate"

    def judge(alpha: float) -> Finding:
        low, high = np.array([variance_limits(group.size, alpha / len(groups)) for group in groups]).T
        # A mean square s of noise of variance v lies below v·low only by chance: v is at most s/low.
        most_noise = math.sqrt(float((means / low).min()))
        bound = min(UNBOUNDED, claimed / max(most_noise, 1e-300))
        return Finding(claimed, bound, f"{ratios}; {detail}", bool(((means >= low) & (means <= high)).all()))

    return Question(name, "mu", judge)


def sampler_questions(prefix: str, plan: Plan, drawn: Integers, last: str = "steps") -> list[Question]:
    """Whether batches are of the right size, each record is drawn as often as others, at most once in a step, and steps
    start afresh.

    Of pairs of successive steps: `drawn` is [2, pairs, records], how often the record was drawn in that step, or
    [1, pairs, records], how often it was drawn in the two.
    """
    parts, pairs, _ = drawn.shape
    twice = int((drawn > 2 // parts).sum())
    return [
        certain(f"{prefix}: twice", "count", 0.0, float(twice), "records that were drawn more than once in one step"),
        sizes_question(f"{prefix}: batch sizes", plan, drawn.sum(axis=2).ravel(), 2 // parts),
        shares_question(f"{prefix}: records", plan, drawn.sum(axis=(0, 1)), 2 * pairs),
        overlap_question(f"{prefix}: {last}", plan, int((drawn.sum(axis=0) == 2).sum()), pairs),
    ]


def sizes_question(name: str, plan: Plan, sizes: Integers, steps: int) -> Question:
    """Sizes (each a total over `steps` steps): Bin(m, q) for Poisson; exactly B for fixed."""
    if plan.sampling == "fixed":
        off = int((sizes != steps * plan.batch).sum())
        return certain(name, "count", 0.0, float(off), f"batches of another size than B, of {len(sizes)}")
    detail = f"distance from Bin(m, q); mean size {sizes.mean() / steps:.3g}, variance {sizes.var() / steps:.3g}"
    return law_question(name, stats.binom(steps * plan.records, plan.event.rate), [sizes], detail)


def shares_question(name: str, plan: Plan, counts: Integers, steps: int) -> Question:
    """How often each record was drawn: Bin(steps, q) under either sampling. The most and the least often drawn."""
    law = stats.binom(steps, plan.event.rate)
    chance = 2 * plan.records * min(float(law.sf(counts.max() - 1)), float(law.cdf(counts.min())))
    return _surprise(name, chance, f"most drawn {counts.max()}, least {counts.min()} times in {steps} steps")


def overlap_question(name: str, plan: Plan, both: int, pairs: int) -> Question:
    """Records drawn in both of two successive steps, over disjoint pairs of steps: a share q² if steps are fresh."""
    q, m = plan.event.rate, plan.records
    expected = pairs * m * q * q
    if plan.sampling == "poisson":
        law = stats.binom(pairs * m, q * q)
        chance = 2 * min(float(law.cdf(both)), float(law.sf(both - 1)))
    else:
        # A pair's overlap is hypergeometric, whose moments those of independent draws bound (Hoeffding 1963). So
        # Chernoff's bound holds whatever the number of pairs, which a normal law in its place does not.
        draws = pairs * plan.batch
        share = both / draws
        divergence = float(special.rel_entr(share, q) + special.rel_entr(1 - share, 1 - q))  # Kullback–Leibler
        chance = 2 * math.exp(-draws * divergence)
    return _surprise(name, chance, f"drawn twice in a row: {both}, expected {expected:.0f}")


def _surprise(name: str, chance: float, detail: str) -> Question:
    """A p-value as −log₁₀, so that more is worse."""
    seen = max(0.0, -math.log10(max(chance, 1e-300)))
    detail += "; −log₁₀ of its chance"
    return Question(name, "deviation", lambda alpha: Finding(-math.log10(alpha), seen, detail))
