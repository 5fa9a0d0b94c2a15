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
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import attacked_site
import numpy as np
import torch

from fedspa.flower import agent, records
from fedspa.flower.agent import participate
from fedspa.flower.site import Site, read_site
from fedspa.privacy.binomial_plan import BinomialPlan

RECORD = 17
CLEAN_X = np.random.default_rng(0).normal(size=(200, 1, 8, 8))
CLEAN_Y = np.random.default_rng(1).integers(0, 10, 200)


def with_feature(value: float) -> Callable[[], tuple[Any, Any]]:
    def made() -> tuple[Any, Any]:
        x = CLEAN_X.copy()
        x[RECORD, 0, 3, 4] = value
        return x, CLEAN_Y

    return made


def with_label(value: float) -> Callable[[], tuple[Any, Any]]:
    def made() -> tuple[Any, Any]:
        y = CLEAN_Y.astype(np.float64) if value != int(value if math.isfinite(value) else 0) else CLEAN_Y.copy()
        y = y.astype(np.float64) if isinstance(value, float) else y
        y[RECORD] = value
        return CLEAN_X, y

    return made


def as_text(cell: str) -> Callable[[], tuple[Any, Any]]:
    def made() -> tuple[Any, Any]:
        y = CLEAN_Y.astype(str).astype("U20")
        y[RECORD] = cell
        return CLEAN_X, y

    return made


def objects() -> tuple[Any, Any]:
    y: list[Any] = CLEAN_Y.tolist()
    y[RECORD] = None
    return CLEAN_X, y


BAD: dict[str, Callable[[], tuple[Any, Any]]] = {
    **{f"feature {value}": with_feature(value) for value in (math.nan, math.inf, -math.inf, 1e300, -1e39)},
    **{f"label {value}": with_label(value) for value in (10, 11, -1, 2**31, 2**62, -(2**63), 999)},
    **{f"label {value!r}": with_label(value) for value in (1.5, math.nan, math.inf, -math.inf, 1e300, 10.0)},
    "label as text": as_text("malignant"),
    "label as empty text": as_text(""),
    "label None": objects,
}
# Strange and right: these are trained on as they are.
ODD: dict[str, Callable[[], tuple[Any, Any]]] = {
    "clean": lambda: (CLEAN_X, CLEAN_Y),
    **{f"feature {value}": with_feature(value) for value in (3.4e38, 1e-40, -1e30, 0.0)},
    "one class": lambda: (CLEAN_X, np.zeros(200)),
    "labels as text": as_text("7"),
}
ASKED = attacked_site.question(0.1)
FIXED = replace(ASKED, terms=replace(ASKED.terms, sampling="fixed", batch=20, plan=replace(
    ASKED.terms.plan, sampling="fixed", neighbours="replace-one", batch=20)))  # fmt: skip
CPSGD_PLAN = BinomialPlan(650, "coordinate", 0.1, 4, 9000, False, "local", 4, 20, 100, 3, 1e-5)
CPSGD = replace(ASKED, algorithm="cpsgd", coding="int", terms=replace(
    ASKED.terms, active=650, mask="shared", sampling="fixed", batch=20, layers=None, plan=CPSGD_PLAN))  # fmt: skip
QUESTIONS = {
    "poisson": ASKED,
    "exact": replace(ASKED, noise="exact"),
    "fixed": FIXED,
    "cpsgd": CPSGD,
    "quantile": replace(ASKED, terms=replace(ASKED.terms, plan=replace(ASKED.terms.plan, clip_rule="quantile"))),
}


def holder(home: Path, made: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch, **node: Any) -> Site:
    """An agent whose function returns these records; it agrees to both relations' plans."""
    own = attacked_site.site(home, CLEAN_X, CLEAN_Y)
    monkeypatch.setattr(records, "_users", lambda *_: made)
    site = read_site({**own.node, "data": f"clinic:{home.name}", "features": "orientations"} | node, {})
    if node.get("features", "") is None:
        site = read_site({key: value for key, value in site.node.items() if key != "features"}, {})
    return site


def lax(site: Site, asked: Any) -> Site:
    assert site.policy is not None
    limits: dict[str, Any] = {"min_noise_multiplier": 0.01, "clippings": ("l2", "coordinate"), "epsilon": 1e6}
    if asked.terms.sampling == "fixed":
        limits["neighbours"] = "replace-one"
    return replace(site, policy=replace(site.policy, **limits))


@pytest.mark.parametrize("question", QUESTIONS)
@pytest.mark.parametrize("content", [*(f"bad: {name}" for name in BAD), *(f"odd: {name}" for name in ODD)])
def test_one_record_never_decides_whether_there_is_an_answer(tmp_path, monkeypatch, content, question):
    made = (BAD | {}).get(content.removeprefix("bad: ")) if content.startswith("bad: ") else ODD[content[5:]]
    assert made is not None
    asked = QUESTIONS[question]
    site = lax(holder(tmp_path, made(), monkeypatch, features=None), asked)
    payload = participate(site, asked, torch.zeros(650))
    clean = lax(holder(tmp_path / "clean", (CLEAN_X, CLEAN_Y), monkeypatch, features=None), asked)
    twin = participate(clean, asked, torch.zeros(650))
    assert payload[:6] == twin[:6]  # magic, version, coding
    assert payload[8:36] == twin[8:36]  # round, d, k, seed
    if asked.coding == "f32":
        assert len(payload) == len(twin)


@pytest.mark.parametrize("content", BAD)
def test_a_bad_record_keeps_its_place_and_changes_no_other(tmp_path, monkeypatch, content):
    x, y = holder(tmp_path, BAD[content](), monkeypatch, features=None).records(0)
    others = torch.arange(200) != RECORD
    assert torch.equal(x[others], torch.from_numpy(CLEAN_X).float()[others])
    assert torch.equal(y[others], torch.from_numpy(CLEAN_Y)[others])
    assert x[RECORD].isnan().all()
    assert int(y[RECORD]) == 0


@pytest.mark.parametrize("content", BAD)
def test_nor_where_the_site_makes_features(tmp_path, monkeypatch, content):
    x, _ = holder(tmp_path, BAD[content](), monkeypatch).records(0)
    clean, _ = holder(tmp_path / "clean", (CLEAN_X, CLEAN_Y), monkeypatch).records(0)
    others = torch.arange(200) != RECORD
    assert torch.equal(x[others], clean[others])
    assert x[RECORD].isnan().all()


@pytest.mark.parametrize("content", BAD)
@pytest.mark.parametrize("question", ["poisson", "fixed", "cpsgd", "exact"])
def test_a_bad_record_counts_as_zero(tmp_path, monkeypatch, content, question):
    """The sum without noise: that of the others alone, to the bit, whichever bad thing the record holds."""
    sums = []
    for number, made in enumerate((BAD[content](), with_label(-1)())):
        asked = QUESTIONS[question]
        site = lax(holder(tmp_path / str(number), made, monkeypatch, features=None), asked)
        monkeypatch.setattr(agent, "_root", lambda *_: bytes(32))
        sums.append(participate(site, asked, torch.zeros(650)))
    assert sums[0] == sums[1]


@pytest.mark.parametrize("words", [{"classes": 9}, {"classes": 11}, {"model": "mlp"}, {"features": "aligned"}])
@pytest.mark.parametrize("content", [*BAD, *ODD])
def test_no_words_of_the_server_make_a_refusal_tell(tmp_path, monkeypatch, content, words):
    made = (BAD | ODD)[content]
    site = holder(tmp_path, made(), monkeypatch, features=None)
    with pytest.raises(agent.Refusal) as caught:
        participate(site, replace(ASKED, **words), torch.zeros(650))
    assert caught.value.code == "terms"
