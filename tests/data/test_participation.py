import itertools
from collections import Counter
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedspa.data.partition import Rule, cap_for, schedule

RULES: tuple[Rule, ...] = get_args(Rule)

federations = st.integers(1, 30).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n), st.integers(1, 40)))
caps = st.none() | st.integers(1, 50)


@given(rule=st.sampled_from(RULES), federation=federations, cap=caps, seed=st.integers(0, 2**64))
def test_nobody_passes_the_planned_cap_or_comes_twice_in_a_round(
    rule: Rule, federation: tuple[int, int, int], cap: int | None, seed: int
) -> None:
    agents, per_round, rounds = federation
    rounds_of = list(schedule(rule, agents, per_round, rounds, cap, seed=seed))
    planned = cap_for(rule, agents, per_round, rounds, cap)
    assert planned <= rounds
    assert len(rounds_of) == rounds
    assert all(len(set(some)) == len(some) <= per_round for some in rounds_of)
    assert all(type(agent) is int and 0 <= agent < agents for some in rounds_of for agent in some)
    assert max(Counter(itertools.chain.from_iterable(rounds_of)).values()) <= planned
    assert rounds_of == list(schedule(rule, agents, per_round, rounds, cap, seed=seed))


@given(federation=federations, seed=st.integers(0, 2**32))
def test_balanced_is_full_and_even(federation: tuple[int, int, int], seed: int) -> None:
    agents, per_round, rounds = federation
    counts = Counter(dict.fromkeys(range(agents), 0))
    for some in schedule("balanced", agents, per_round, rounds, seed=seed):
        assert len(some) == per_round
        counts.update(some)
        # After every round, not only at the end: a run that stops early is as even.
        assert max(counts.values()) - min(counts.values()) <= 1
    assert max(counts.values()) == -(-rounds * per_round // agents)


@given(federation=federations, cap=st.integers(1, 5), seed=st.integers(0, 2**32))
def test_rounds_shrink_only_when_candidates_run_out(federation: tuple[int, int, int], cap: int, seed: int) -> None:
    agents, per_round, rounds = federation
    counts = Counter(dict.fromkeys(range(agents), 0))
    for some in schedule("uniform", agents, per_round, rounds, cap, seed=seed):
        candidates = [agent for agent in counts if counts[agent] < cap]
        assert len(some) == min(per_round, len(candidates))
        assert set(some) <= set(candidates)
        counts.update(some)


@pytest.mark.parametrize("rule", RULES)
def test_rounds_are_uniform(rule: Rule) -> None:
    # First round of 2,000 schedules, 3 of 10 agents: each agent's count is binomial(2000, 0.3), standard deviation 21;
    # each pair's binomial(2000, 1/15), standard deviation 11.2. Five of them over 55 counts: a false alarm in 30,000 if
    # the seeds were not fixed.
    singles, pairs = Counter[int](), Counter[tuple[int, ...]]()
    for seed in range(2000):
        first = sorted(next(schedule(rule, 10, 3, 5, seed=seed)))
        singles.update(first)
        pairs.update(itertools.combinations(first, 2))
    assert len(singles) == 10
    assert len(pairs) == 45
    assert all(abs(count - 600) < 5 * 20.5 for count in singles.values())
    assert all(abs(count - 2000 / 15) < 5 * 11.2 for count in pairs.values())


def test_planned_caps() -> None:
    assert cap_for("balanced", 100, 10, 45) == 5
    assert cap_for("balanced", 100, 10, 50) == 5
    assert cap_for("balanced", 100, 10, 51) == 6
    assert cap_for("balanced", 7, 7, 9) == 9
    assert cap_for("balanced", 100, 10, 50, cap=2) == 2
    assert cap_for("uniform", 100, 10, 45) == 45
    assert cap_for("uniform", 100, 10, 45, cap=10) == 10
    assert cap_for("uniform", 100, 10, 45, cap=90) == 45


def test_a_tight_cap_ends_a_balanced_schedule_early() -> None:
    rounds_of = list(schedule("balanced", 10, 4, 6, cap=1, seed=0))
    assert [len(some) for some in rounds_of] == [4, 4, 2, 0, 0, 0]
