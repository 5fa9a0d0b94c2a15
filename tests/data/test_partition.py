import itertools
from collections import Counter
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from fedspa.data.partition import Rule, Scheme, cap_for, partition, schedule

SCHEMES: tuple[Scheme, ...] = get_args(Scheme)


def labels(records: int, classes: int, seed: int = 0) -> NDArray[np.int64]:
    return np.random.default_rng(seed).integers(0, classes, records)


def largest_share(y: NDArray[np.int64], parts: list[NDArray[np.int64]]) -> float:
    """The share of an agent's most frequent class, averaged over agents."""
    return float(np.mean([np.bincount(y[part]).max() / len(part) for part in parts]))


@given(
    scheme=st.sampled_from(SCHEMES),
    agents=st.integers(1, 40),
    extra=st.integers(0, 200),
    classes=st.integers(1, 12),
    alpha=st.sampled_from([1e-6, 0.01, 0.1, 1.0, 10.0, 1e6]),
    seed=st.integers(0, 2**64),
)
def test_each_record_goes_to_one_agent_and_sizes_are_equal_up_to_one(
    scheme: Scheme, agents: int, extra: int, classes: int, alpha: float, seed: int
) -> None:
    y = labels(agents + extra, classes, seed)
    parts = partition(y, agents, scheme, alpha=alpha, seed=seed)
    assert len(parts) == agents
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(len(y)))
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1
    assert all(part.dtype == np.int64 and np.all(np.diff(part) > 0) for part in parts)
    again = partition(y, agents, scheme, alpha=alpha, seed=seed)
    assert all(np.array_equal(one, two) for one, two in zip(parts, again))


def test_skew_grows_as_alpha_falls() -> None:
    # 100 agents of 200 records. Over 30 seeds the averages are 0.14, 0.31, 0.49 and 0.79 (iid: 0.14), with standard
    # deviations of at most 0.02: each step is more than four of them wide.
    y = labels(20_000, 10)
    for seed in range(3):
        shares = [
            largest_share(y, partition(y, 100, "dirichlet", alpha=alpha, seed=seed)) for alpha in (100, 1, 0.3, 0.05)
        ]
        assert all(more > less + 0.05 for less, more in itertools.pairwise(shares))
        assert shares[0] == pytest.approx(largest_share(y, partition(y, 100, "iid", alpha=1, seed=seed)), abs=0.02)


def test_the_first_agents_have_dirichlet_moments() -> None:
    # For Dir(α, …, α) over C classes a proportion has mean 1/C and variance (C-1)/(C²(Cα+1)); an agent's count of m
    # records adds the multinomial's share, (1-1/C)/C/m · Cα/(Cα+1). The seed is fixed; over seeds the estimate of the
    # variance from 2,000 proportions spreads by 4.5 % (30 seeds), so 30 % is six standard deviations.
    classes, m, alpha, agents = 10, 100, 0.5, 1000
    y = np.repeat(np.arange(classes), m * agents // classes)
    parts = partition(y, agents, "dirichlet", alpha=alpha, seed=3)[:200]
    shares = np.stack([np.bincount(y[part], minlength=classes) / m for part in parts])
    spread = (classes - 1) / classes**2 / (classes * alpha + 1)
    multinomial = (1 - 1 / classes) / classes / m * classes * alpha / (classes * alpha + 1)
    assert shares.mean() == pytest.approx(1 / classes)
    assert shares.var() == pytest.approx(spread + multinomial, rel=0.3)


def test_shards_give_an_agent_few_labels() -> None:
    y = np.repeat(np.arange(10), 600)
    parts = partition(y, 100, "shards", alpha=1.0, seed=0)
    assert {len(part) for part in parts} == {60}
    # 200 shards of 30 and 600 records a class: no shard crosses a class.
    assert max(len(np.unique(y[part])) for part in parts) == 2


def test_iid_ignores_labels() -> None:
    one = partition(np.zeros(100), 7, "iid", alpha=1, seed=4)
    two = partition(np.arange(100), 7, "iid", alpha=1, seed=4)
    assert all(np.array_equal(a, b) for a, b in zip(one, two))


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
