"""Who holds which training records: iid, Dirichlet(α) or label shards.

Every scheme gives each record to exactly one agent, so nothing is left over, and agents' sizes differ by at most one.
Equal sizes matter to privacy: the plan's sampling rate is B/m with one m for all.

- ``iid``: a shuffled, equal split.
- ``dirichlet``: Hsu, Qi and Brown (2019, arXiv:1909.06335) with agents of equal size. Agent by agent, class proportions
  are drawn from a Dirichlet distribution and records are taken from the classes without replacement; a class that has
  run out is struck and the proportions of the others are renormalised. The agents that come last therefore share what
  is left, and their mix strays from Dir(α).
- ``shards``: McMahan et al. (2017, arXiv:1602.05629). Records sorted by label are cut into two shards an agent, which
  are assigned at random.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedspa.errors import ConfigError

Scheme = Literal["iid", "dirichlet", "shards"]

# Keeps the public draws of this file apart from others made with the same seed.
_STREAM = (0x70617274,)
# Beyond these a smaller or larger α no longer changes a partition: one class an agent, or every class in its own share.
ALPHA_RANGE = (1e-6, 1e6)
DEFAULT_ALPHA = 0.5


def split_scheme(text: str) -> tuple[Scheme, float]:
    """Return the scheme and the concentration that a config writes as `iid`, `shards`, `dirichlet` or `dirichlet:α`."""
    name, colon, number = text.partition(":")
    low, high = ALPHA_RANGE
    with suppress(ValueError):
        if name == "dirichlet" and low <= (alpha := float(number) if colon else DEFAULT_ALPHA) <= high:
            return "dirichlet", alpha
    if text == "iid":
        return "iid", DEFAULT_ALPHA
    if text == "shards":
        return "shards", DEFAULT_ALPHA
    raise ConfigError(f"it must be 'iid', 'shards', 'dirichlet' or 'dirichlet:α' with α from {low:g} to {high:g}")


def partition(
    labels: ArrayLike, agents: int, scheme: Scheme, *, alpha: float, seed: int, held: str = "records"
) -> list[NDArray[np.int64]]:
    """Return the indices of each agent's records, sorted. ``alpha`` is the concentration that only ``dirichlet`` reads.
    ``held`` is what an error calls them.

    The split is an experiment's stand-in for data that agents would hold anyway; it looks at labels and is not private.
    """
    y = np.asarray(labels, dtype=np.int64)
    if agents > len(y):
        raise ConfigError(f"federation.agents = {agents} is more than the {len(y)} training {held}: each needs one")
    rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=_STREAM))
    match scheme:
        case "iid":
            owner = rng.permutation(np.repeat(np.arange(agents), _sizes(len(y), agents)))
        case "dirichlet":
            owner = _dirichlet(y, agents, alpha, rng)
        case "shards":
            owner = _shards(y, agents, rng)
    by_owner = np.argsort(owner, kind="stable")
    return np.split(by_owner, np.cumsum(_sizes(len(y), agents))[:-1])


def _sizes(records: int, agents: int) -> NDArray[np.int64]:
    """Return how many records each agent gets: equal up to one, the first agents the larger."""
    return records // agents + (np.arange(agents) < records % agents).astype(np.int64)


def _shards(y: NDArray[np.int64], agents: int, rng: np.random.Generator) -> NDArray[np.int64]:
    # An agent's size, not the shard's, is what must be equal: an odd size is one shard larger by a record.
    sizes = _sizes(len(y), agents)
    shard_sizes = np.concatenate([(sizes + 1) // 2, sizes // 2])
    order = rng.permutation(2 * agents)
    owner = np.empty(len(y), dtype=np.int64)
    owner[_sorted_by_label(y, rng)] = np.repeat(order % agents, shard_sizes[order])
    return owner


def _sorted_by_label(y: NDArray[np.int64], rng: np.random.Generator) -> NDArray[np.int64]:
    """Return indices in order of label, and at random within a label."""
    shuffled = rng.permutation(len(y))
    return shuffled[np.argsort(y[shuffled], kind="stable")]


def _dirichlet(y: NDArray[np.int64], agents: int, alpha: float, rng: np.random.Generator) -> NDArray[np.int64]:
    _, left = np.unique(y, return_counts=True)
    # Hsu's Dir(α·prior) in the scale where equally frequent classes give Dir(α, …, α).
    concentration = alpha * len(left) * left / len(y)
    proportions = rng.dirichlet(concentration, size=agents)
    taken = np.empty((agents, len(left)), dtype=np.int64)
    for agent, size in enumerate(_sizes(len(y), agents).tolist()):
        taken[agent] = _take(size, proportions[agent], left, rng)
        left -= taken[agent]
    # The records of a class, in random order, go to the agents in turn, as many as each took.
    owner = np.empty(len(y), dtype=np.int64)
    owner[_sorted_by_label(y, rng)] = np.tile(np.arange(agents), taken.shape[1]).repeat(taken.T.ravel())
    return owner


def _take(
    size: int, proportions: NDArray[np.float64], left: NDArray[np.int64], rng: np.random.Generator
) -> NDArray[np.int64]:
    """Return how many records of each class an agent of ``size`` takes from the ``left`` ones."""
    taken = np.minimum(rng.multinomial(size, proportions), left)
    while (short := size - int(taken.sum())) > 0:
        still = left - taken
        weights = np.where(still > 0, proportions, 0.0)
        if weights.sum() < 1e-12:  # the agent's own classes are gone
            weights = still.astype(np.float64)
        taken += np.minimum(rng.multinomial(short, weights / weights.sum()), still)
    return taken


# Who takes part in which round, and how often at most.
#
# An agent's ε grows with its own number of participations, so a plan is calibrated to a bound on that number that holds
# for every agent. Both rules below keep to it by construction, and neither looks at any data: the schedule is public.
#
# - ``balanced`` deals agents out like cards from a shuffled deck, reshuffled when it is used up. Each deck deals each
# agent once, so T rounds of |W| agents give no agent more than ⌈T·|W|/n⌉ participations.
# - ``uniform`` is Fed-SPA's own (Hu, Gong and Guo 2021, Algorithm 1, line 3): a uniform subset of |W| each round.
# Without a cap an unlucky agent may be drawn every round. With one, the subset is drawn from the agents still below it;
# once fewer than |W| are left, rounds have fewer agents, in the end none.
#
# A cap tighter than ⌈T·|W|/n⌉ works the same way under ``balanced``: after that many decks nobody is left.

Rule = Literal["balanced", "uniform"]

# Keeps the public draws of this file apart from others made with the same seed.
_SCHEDULE_STREAM = (0x726F756E,)


def cap_for(rule: Rule, agents: int, per_round: int, rounds: int, cap: int | None = None) -> int:
    """Return the participations to plan for: no agent takes part more often in ``schedule`` of the same arguments."""
    most = -(-rounds * per_round // agents) if rule == "balanced" else rounds
    return most if cap is None else min(cap, most)


def schedule(
    rule: Rule, agents: int, per_round: int, rounds: int, cap: int | None = None, *, seed: int
) -> Iterator[list[int]]:
    """Yield the agents of each round, ``rounds`` times, none twice in a round.

    A round costs time in proportion to its own agents, plus for ``balanced`` one shuffle of all of them a deck.
    """
    most = cap_for(rule, agents, per_round, rounds, cap)
    rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=_SCHEDULE_STREAM))
    draw_rounds = _balanced if rule == "balanced" else _uniform
    return draw_rounds(agents, per_round, rounds, most, rng)


def _balanced(agents: int, per_round: int, rounds: int, cap: int, rng: np.random.Generator) -> Iterator[list[int]]:
    deck: list[int] = []
    decks = 0
    for _ in range(rounds):
        chosen = deck[-per_round:]
        del deck[-per_round:]
        if len(chosen) < per_round and decks < cap:
            # The next deck passes over those already in this round; their turn comes later in the same deck.
            decks += 1
            shuffled: list[int] = rng.permutation(agents).tolist()
            here = set(chosen)
            fresh = list(islice((agent for agent in shuffled if agent not in here), per_round - len(chosen)))
            chosen += fresh
            gone = set(fresh)
            deck = [agent for agent in shuffled if agent not in gone]
        yield chosen


def _uniform(agents: int, per_round: int, rounds: int, cap: int, rng: np.random.Generator) -> Iterator[list[int]]:
    below_cap = list(range(agents))
    participations = [0] * agents
    for _ in range(rounds):
        size = min(per_round, len(below_cap))
        # Without shuffling: a round is a set. numpy draws it in time and memory of its size, not of the federation's.
        places: list[int] = rng.choice(len(below_cap), size, replace=False, shuffle=False).tolist() if size else []
        chosen = [below_cap[place] for place in places]
        yield chosen
        for place in sorted(
            places, reverse=True
        ):  # from the back, so that filling a gap moves nobody yet to be visited
            agent = below_cap[place]
            participations[agent] += 1
            if participations[agent] == cap:
                below_cap[place] = below_cap[-1]
                below_cap.pop()
