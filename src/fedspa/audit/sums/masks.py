"""Single uploads, as the server gets them: words that look drawn at random, whatever was sent, and no mask twice."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from fedspa.audit.questions import law_question
from fedspa.audit.result import Question, certain
from fedspa.audit.setting import Setting
from fedspa.audit.sums.cohort import Cohort, Heard, Summed, worst_pair
from fedspa.secagg.message import decode
from fedspa.secagg.pads import reduced

RUNS = ("one run", "another run")
ROUNDS, ATTEMPTS = 4, 2
Uploads = dict[str, NDArray[Any]]


def upload_questions(setting: Setting, target: Summed) -> list[Question]:
    """Uploads of pairs, each of which has one mask: over runs, rounds and attempts."""
    plan: Any = target.plan
    pair = replace(target, plan=replace(plan, members=2, colluders=0))
    heard = list(_attempts(setting, pair))
    bits = heard[0].session.bits
    uploads: list[Uploads] = [
        {name: decode(payload, one.session) for name, payload in one.payloads.items()} for one in heard
    ]
    uniform = stats.randint(0, 2**bits)
    words = np.stack([list(upload.values()) for upload in uploads])
    # One member's two messages under one mask differ by what was sent, and their last words not at all.
    apart = [reduced(one[name] - other[name], bits) for one, other in combinations(uploads, 2) for name in uploads[0]]
    same = sum(not difference[pair.aggregation.count :].any() for difference in apart)
    return [
        law_question(
            "upload: words", uniform, [words], f"distance from uniform words of {bits} bits; {words.size} of them"
        ),
        law_question(
            "upload: differences", uniform, apart, f"distance from uniform; {len(apart)} pairs of a member's uploads"
        ),
        # But for a chance of 2⁻⁶⁴ for each pair.
        certain("upload: masks", "count", 0.0, float(same), f"of {len(apart)} pairs of uploads that share a mask"),
    ]


def _attempts(setting: Setting, target: Summed) -> Iterator[Heard]:
    """With a record that is not null in every other attempt."""
    loud, _ = worst_pair(target.plan)
    for run in RUNS:
        cohort = Cohort(setting, target, run)
        for t in range(ROUNDS):
            for attempt in range(1, ATTEMPTS + 1):
                yield cohort.heard(t, attempt, loud if (t + attempt) % 2 else None)
