"""Attack: a server learns of one record by whether an agent answers, or by which code.

Before, a label outside the site's classes, a NaN among the features, records of one class only or a token outside an
Embedding's vocabulary turned payloads into `data` or `internal`: 20 of 20 answers told of one record, without noise.
Now a bad record counts as zero, by a rule that looks at that record and the site's own settings alone, and the server
gets a payload of the same length and header, whatever one record holds.
"""

from __future__ import annotations

import pytest

pytest.importorskip("flwr", reason="needs the extra: pip install 'fedspa[flower]'")

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import attacked_site
import numpy as np
import torch

from fedspa.algorithms import ALGORITHMS
from fedspa.algorithms.cpsgd.plan import BinomialPlan
from fedspa.flower import client_app, site_records
from fedspa.flower.client_app import answer_round
from fedspa.flower.site import Site, read_site
from fedspa.flower.terms import Announcement

RECORD = 17
CLEAN_X = np.random.default_rng(0).normal(size=(200, 1, 8, 8))
CLEAN_Y = np.random.default_rng(1).integers(0, 10, 200)


Made = tuple[Any, Any]


def with_feature(value: float) -> Made:
    x = CLEAN_X.copy()
    x[RECORD, 0, 3, 4] = value
    return x, CLEAN_Y


def with_label(value: float | str) -> Made:
    """In an array that can hold it: one strange label makes floats or texts of all."""
    kind = {int: np.int64, float: np.float64, str: "U20"}[type(value)]
    y = CLEAN_Y.astype(kind)
    y[RECORD] = value
    return CLEAN_X, y


BAD: dict[str, Made] = {
    **{f"feature {value}": with_feature(value) for value in (math.nan, math.inf, -math.inf, 1e300, -1e39)},
    **{f"label {value!r}": with_label(value) for value in (10, 11, -1, 2**31, 2**62, -(2**63), 999)},
    **{f"label {value!r}": with_label(value) for value in (1.5, math.nan, math.inf, -math.inf, 1e300, 10.0)},
    **{f"label {value!r}": with_label(value) for value in ("malignant", "", "10")},
    **{
        f"label {value}": (CLEAN_X, [*CLEAN_Y[:RECORD].tolist(), value, *CLEAN_Y[RECORD + 1 :].tolist()])
        for value in (None, 1j)
    },
}
# Strange and right: these are trained on as they are.
ODD: dict[str, Made] = {
    "clean": (CLEAN_X, CLEAN_Y),
    **{f"feature {value}": with_feature(value) for value in (3.4e38, 1e-40, -1e30, 0.0)},
    "one class": (CLEAN_X, np.zeros(200)),
    "labels as text": with_label("7"),
}
ASKED = attacked_site.question(0.1)
FIXED = replace(ASKED, terms=replace(ASKED.terms, steps=replace(
    ASKED.terms.plan, sampling="fixed", neighbours="replace-one", batch=20)))  # fmt: skip
CPSGD_PLAN = BinomialPlan(650, 0.1, 4, 9000, "local", 4, 20, 100, 3, 1e-5)
CPSGD = replace(ASKED, algorithm="cpsgd", coding="int", terms=replace(
    ASKED.terms, mask="shared", layers=None, steps=CPSGD_PLAN))  # fmt: skip
QUESTIONS = {
    "poisson": ASKED,
    "exact": replace(ASKED, noise="exact"),
    "fixed": FIXED,
    "cpsgd": CPSGD,
}


OTHERS = torch.arange(200) != RECORD


def holder(home: Path, made: Made, monkeypatch: pytest.MonkeyPatch, **node: Any) -> Site:
    """An agent whose function returns these records."""
    own = attacked_site.site(home, CLEAN_X, CLEAN_Y)
    monkeypatch.setattr(site_records, "_call", lambda *_: made)
    return read_site({**own.node, "data": f"clinic:{home}", **node}, {})


def answered(site: Site, asked: Announcement) -> bytes:
    """Under a policy that has nothing against these terms."""
    assert site.policy is not None
    limits: dict[str, Any] = {"min_noise_multiplier": 0.01, "clippings": ("l2", "coordinate"), "epsilon": 1e6}
    if asked.terms.steps.sampling == "fixed":
        limits["neighbours"] = "replace-one"
    return answer_round(replace(site, policy=replace(site.policy, **limits)), asked, torch.zeros(650))


CASES = [("poisson", content) for content in (*BAD, *ODD)] + [
    (question, content) for question in QUESTIONS for content in ("feature nan", "label 10", "feature 3.4e+38")
]


@pytest.mark.parametrize(("question", "content"), dict.fromkeys(CASES))
def test_one_record_never_decides_whether_there_is_an_answer(tmp_path, monkeypatch, content, question):
    asked = QUESTIONS[question]
    payload = answered(holder(tmp_path, (BAD | ODD)[content], monkeypatch), asked)
    update = ALGORITHMS[asked.algorithm].decode(payload, asked.terms, asked.coding, bytes(16), ())
    assert np.isfinite(update.values).all()
    if asked.coding == "f32":
        assert len(payload) == 48 + 4 * asked.terms.active


@pytest.mark.parametrize("features", [{}, {"features": "orientations"}], ids=["plain", "features"])
@pytest.mark.parametrize("content", BAD)
def test_a_bad_record_keeps_its_place_and_changes_no_other(tmp_path, monkeypatch, content, features):
    x, y = holder(tmp_path / "bad", BAD[content], monkeypatch, **features).held(0).examples
    clean_x, clean_y = holder(tmp_path / "clean", ODD["clean"], monkeypatch, **features).held(0).examples
    assert torch.equal(x[OTHERS], clean_x[OTHERS])
    assert torch.equal(y[OTHERS], clean_y[OTHERS])
    assert x[RECORD].isnan().all()
    assert int(y[RECORD]) == torch.iinfo(torch.int64).min  # no model has such a class


@pytest.mark.parametrize("question", QUESTIONS)
def test_bad_records_are_all_alike(tmp_path, monkeypatch, question):
    """With the same randomness, the same bytes leave whichever bad thing the record holds."""
    monkeypatch.setattr(Site, "private_root", lambda *_: bytes(32))
    answers = {
        answered(holder(tmp_path / str(number), BAD[content], monkeypatch), QUESTIONS[question])
        for number, content in enumerate(["feature nan", "feature 1e+300", "label 10", "label 1.5", "label ''"])
    }
    assert len(answers) == 1


@pytest.mark.parametrize("question", ["poisson", "exact"])
def test_a_bad_record_counts_as_zero(tmp_path, monkeypatch, question):
    """The same bytes as from the record whose gradient on this coordinate is exactly 0: the noise covers nothing."""
    monkeypatch.setattr(Site, "private_root", lambda *_: bytes(32))
    asked, theta = QUESTIONS[question], attacked_site.sure_of_the_others()
    x = np.zeros((200, 1, 8, 8))
    answers = []
    for number, label in enumerate((0, -1, 1)):
        y = np.zeros(200, dtype=np.int64)
        y[RECORD] = label
        answers.append(answer_round(holder(tmp_path / str(number), (x, y), monkeypatch), asked, theta))
    assert answers[0] == answers[1] != answers[2]


@pytest.mark.parametrize("words", [{"classes": 9}, {"classes": 11}, {"model": "mlp"}, {"features": "aligned"}])
def test_no_words_of_the_server_make_a_refusal_tell(tmp_path, monkeypatch, words):
    codes = set()
    for number, made in enumerate((BAD | ODD).values()):
        site = holder(tmp_path, made, monkeypatch, data=f"clinic:{tmp_path}/{number}")
        with pytest.raises(client_app.Refusal) as caught:
            answer_round(site, replace(ASKED, **words), torch.zeros(650))
        codes.add(caught.value.code)
    assert codes == {"terms"}
