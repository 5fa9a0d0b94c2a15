"""Who takes part in which round, and how often at most.

An agent's ε grows with its own number of participations, so a plan is calibrated to a bound on that number that holds
for every agent. Both rules below keep to it by construction, and neither looks at any data: the schedule is public.

- ``balanced`` deals agents out like cards from a shuffled deck, reshuffled when it is used up. Each deck deals each
  agent once, so T rounds of |W| agents give no agent more than ⌈T·|W|/n⌉ participations.
- ``uniform`` is Fed-SPA's own (Hu, Gong and Guo 2021, Algorithm 1, line 3): a uniform subset of |W| each round. Without
  a cap an unlucky agent may be drawn every round. With one, the subset is drawn from the agents still below it; once
  fewer than |W| are left, rounds have fewer agents, in the end none.

A cap tighter than ⌈T·|W|/n⌉ works the same way under ``balanced``: after that many decks nobody is left.
"""

from collections.abc import Iterator
from itertools import islice
from typing import Literal

import numpy as np

Rule = Literal["balanced", "uniform"]

# Keeps the public draws of this file apart from others made with the same seed.
_STREAM = (0x726F756E,)


def cap_for(rule: Rule, agents: int, per_round: int, rounds: int, cap: int | None = None) -> int:
    """The participations to plan for: no agent takes part more often in ``schedule`` of the same arguments."""
    most = -(-rounds * per_round // agents) if rule == "balanced" else rounds
    return most if cap is None else min(cap, most)


def schedule(
    rule: Rule, agents: int, per_round: int, rounds: int, cap: int | None = None, *, seed: int
) -> Iterator[list[int]]:
    """The agents of each round, ``rounds`` times, none twice in a round.

    A round costs time in proportion to its own agents, plus for ``balanced`` one shuffle of all of them a deck.
    """
    most = cap_for(rule, agents, per_round, rounds, cap)
    rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=_STREAM))
    deal = _balanced if rule == "balanced" else _uniform
    return deal(agents, per_round, rounds, most, rng)


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
