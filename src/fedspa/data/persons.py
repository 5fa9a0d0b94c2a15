"""A person's records as one example, so that the person is what is protected.

At most `most` of a person's records count, a public number. Which ones is random, and costs no privacy: who counts with
what is drawn for each person apart, so that with one person more or less all others keep theirs, in law where the
draws are secret. Hence the draws must not come from a public seed: read in order, they would give everyone behind that
person other records.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedspa.errors import DataError
from fedspa.examples import Examples, Tree, mapped, taken

Numbers = NDArray[np.int64]


def id_array(ids: Any) -> NDArray[Any]:
    """Ids as an array, in which a missing one is still seen: numpy alone makes the text "nan" of one among texts, and
    forgets a mask."""
    ids = ids.detach().cpu() if isinstance(ids, torch.Tensor) else ids
    if isinstance(ids, np.ma.MaskedArray):
        cells = np.asarray(ids).astype(object)
        cells[np.ma.getmaskarray(ids)] = None
        return cells
    return np.asarray(ids) if hasattr(ids, "dtype") else np.array(list(ids), dtype=object)


def grouped(x: Tree, y: Tree, persons: Numbers, most: int, draws: NDArray[np.uint64]) -> Examples:
    """An example per person, by their numbers: inputs {"records": [persons, c, …], "count": [persons]} and targets
    [persons, c, …], of which the first `count` are the person's and all others repeat the first.

    `persons` says whom each record belongs to. `draws` are private random numbers, one per record: a person's records
    with the smallest ones count, `most` of them, in their own order.
    """
    of = numbered(persons)
    held = np.bincount(of)
    kept = np.minimum(held, most)
    places = np.arange(kept.max())
    counts = places < kept[:, None]
    shuffled = np.lexsort((draws, of))  # person by person
    starts = np.cumsum(held) - held
    # Beyond every record, so that sorting leaves the empty places behind.
    index = np.where(counts, shuffled[starts[:, None] + np.where(counts, places, 0)], len(of))
    index.sort(axis=1)
    chosen = torch.from_numpy(np.where(counts, index, index[:, :1]))
    return Examples({"records": taken(x, chosen), "count": torch.from_numpy(kept)}, taken(y, chosen))


def blank_person(like: Examples, most: int) -> Examples:
    """A person made of zeros, whose records are made as the one that is given."""
    x, y = (mapped(lambda leaf: leaf[:, None].expand(1, most, *leaf.shape[1:]).clone(), tree) for tree in like)
    return Examples({"records": x, "count": torch.full((1,), most)}, y)


def numbered(persons: Numbers) -> Numbers:
    """The same persons by numbers from 0 on, none left out, in the same order."""
    return np.unique(persons, return_inverse=True)[1].astype(np.int64)


def labels_of(persons: Numbers, labels: Numbers) -> Numbers:
    """Each person's commonest label, the smallest of several, by which persons are dealt out."""
    of, (names, place) = numbered(persons), np.unique(labels, return_inverse=True)
    often = np.zeros((int(of.max()) + 1, len(names)), dtype=np.int64)
    np.add.at(often, (of, place), 1)
    return np.asarray(names[often.argmax(axis=1)], dtype=np.int64)


def owners_of(persons: Numbers, owners: Numbers) -> Numbers:
    """Each person's agent. A person at two agents is a DataError: each of them promises ε for what it holds, and what
    the person pays is both together, which nobody counts."""
    of = numbered(persons)
    agents = np.empty(int(of.max()) + 1, dtype=np.int64)
    agents[of] = owners
    strays = np.flatnonzero(agents[of] != owners)
    if len(strays):
        row = strays[0]
        raise DataError(
            f"person {persons[row]} has records at agents {min(owners[row], agents[of[row]])} and "
            f"{max(owners[row], agents[of[row]])}: each would promise its own ε, and their sum is promised by nobody; "
            "give the records of a person to one agent, or number persons anew at each agent to protect them per agent"
        )
    return agents
