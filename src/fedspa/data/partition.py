"""Who holds which training records: iid, Dirichlet(α) or label shards.

Every scheme gives each record to exactly one agent, so nothing is left over, and agents' sizes differ by at most one.
Equal sizes matter to privacy: the plan's sampling rate is B/m with one m for all.

- ``iid``: a shuffled, equal split.
- ``dirichlet``: Hsu, Qi and Brown (2019, arXiv:1909.06335) with agents of equal size. Agent by agent, class proportions
  are drawn from a Dirichlet distribution and records are taken from the classes without replacement; a class that has
  run out is struck and the proportions of the others are renormalised. The agents that come last therefore share what
  is left, and their mix strays from Dir(α).
- ``shards``: McMahan et al. (2017, arXiv:1602.05629). Records sorted by label are cut into two shards an agent, dealt
  at random.
"""

from contextlib import suppress
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
    """The indices of each agent's records, sorted. ``alpha`` is the concentration that only ``dirichlet`` reads.
    ``held`` is what an error calls them.

    The split is an experiment's stand-in for data that agents would hold anyway; it looks at labels and is not private.
    """
    y = np.asarray(labels, dtype=np.int64)
    if agents > len(y):
        raise ConfigError(f"federation.agents = {agents} is more than the {len(y)} training {held}: each needs one")
    rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=_STREAM))
    match scheme:
        case "iid":
            owner = _iid(len(y), agents, rng)
        case "dirichlet":
            owner = _dirichlet(y, agents, alpha, rng)
        case "shards":
            owner = _shards(y, agents, rng)
    by_owner = np.argsort(owner, kind="stable")
    return np.split(by_owner, np.cumsum(_sizes(len(y), agents))[:-1])


def _sizes(records: int, agents: int) -> NDArray[np.int64]:
    """How many records each agent gets: equal up to one, the first agents the larger."""
    return records // agents + (np.arange(agents) < records % agents).astype(np.int64)


def _iid(records: int, agents: int, rng: np.random.Generator) -> NDArray[np.int64]:
    owner = np.repeat(np.arange(agents), _sizes(records, agents))
    return rng.permutation(owner)


def _shards(y: NDArray[np.int64], agents: int, rng: np.random.Generator) -> NDArray[np.int64]:
    # An agent's size, not the shard's, is what must be equal: an odd size is one shard larger by a record.
    sizes = _sizes(len(y), agents)
    shard_sizes = np.concatenate([(sizes + 1) // 2, sizes // 2])
    dealt = rng.permutation(2 * agents)
    owner = np.empty(len(y), dtype=np.int64)
    owner[_sorted_by_label(y, rng)] = np.repeat(dealt % agents, shard_sizes[dealt])
    return owner


def _sorted_by_label(y: NDArray[np.int64], rng: np.random.Generator) -> NDArray[np.int64]:
    """Indices in order of label, and at random within a label."""
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
    """How many records of each class an agent of ``size`` takes from the ``left`` ones."""
    taken = np.minimum(rng.multinomial(size, proportions), left)
    while (short := size - int(taken.sum())) > 0:
        still = left - taken
        weights = np.where(still > 0, proportions, 0.0)
        if weights.sum() < 1e-12:  # the agent's own classes are gone
            weights = still.astype(np.float64)
        taken += np.minimum(rng.multinomial(short, weights / weights.sum()), still)
    return taken
