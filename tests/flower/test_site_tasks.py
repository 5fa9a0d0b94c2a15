"""A site names its own task: its targets are read by it, and a run of another one is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedspa.agent.ledger.ledger import Ledger
from fedspa.agent.participate import Refusal
from fedspa.errors import ConfigError, DataError
from fedspa.flower.agent import participate
from fedspa.flower.site import read_site

from .local_grid import POLICY
from .test_terms import GIVEN, TERMS

ASKED = replace(GIVEN, terms=replace(TERMS, round=0))
THETA = torch.zeros(650)  # 64 inputs, 10 outputs
RNG = np.random.default_rng(0)
NUMBERS, BITS = RNG.normal(size=(200, 10)), RNG.integers(0, 2, size=(200, 10))


def node(folder: Path, y: Any, **keys: Any) -> dict[str, Any]:
    np.savez(folder / "records.npz", x=np.random.default_rng(1).normal(size=(200, 1, 8, 8)), y=y)
    (folder / "policy.toml").write_text(POLICY.format(epsilon=8.0))
    Ledger.open(folder / "ledger.sqlite").close()
    files = {"data": "records.npz", "policy": "policy.toml", "ledger": "ledger.sqlite"}
    return {"agent": "clinic", **{key: str(folder / name) for key, name in files.items()}, **keys}


@pytest.mark.parametrize(
    ("y", "keys", "words"),
    [
        (NUMBERS, {"task": "regression"}, "regression"),
        (NUMBERS, {"task": "regression", "loss": "mae"}, 'regression {"loss": "mae"}'),
        (BITS, {"task": "multi-label"}, "multi-label"),
        (NUMBERS[:, 0].round() > 0, {"classes": 10, "weights": str([1.0] * 9 + [2])}, None),
    ],
)
def test_it_takes_part_in_runs_of_its_task_alone(tmp_path: Path, y: Any, keys: dict[str, Any], words: str) -> None:
    site = read_site(node(tmp_path, y, **keys), {})
    asked = replace(ASKED, task=site.task.words, classes=10)
    assert words is None or site.task.words == words
    for other in ("classification", "regression huber", "own", ""):
        with pytest.raises(Refusal, match="the run's task is") as caught:
            participate(site, replace(asked, task=other), THETA)
        assert caught.value.code == "terms"
    assert participate(site, asked, THETA).startswith(b"FSPA")


@pytest.mark.parametrize(
    ("y", "task", "bad"), [(NUMBERS, "regression", np.nan), (NUMBERS, "regression", 1e60), (BITS, "multi-label", 3)]
)
def test_a_bad_target_is_no_refusal(tmp_path: Path, y: Any, task: str, bad: float) -> None:
    spoilt = y.astype(float)
    spoilt[7, 3] = bad
    site = read_site(node(tmp_path, spoilt, task=task), {})
    assert site.own_records().bad == (7,)
    x, targets = site.records(0)
    assert isinstance(x, torch.Tensor)
    assert isinstance(targets, torch.Tensor)
    assert x[7].isnan().all()
    assert targets.isfinite().all()
    assert participate(site, replace(ASKED, task=task), THETA).startswith(b"FSPA")


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({}, "classes is missing"),
        ({"task": "next-token"}, "a site's records are one array of numbers each"),
        ({"task": "regression", "loss": "mape"}, "loss is 'mape'"),
        ({"task": "regression", "weights": "[1]"}, "task.weights is for classification"),
        ({"task": "multi-label", "weights": "heavy"}, "must be the text of a list"),
        ({"task": "regression", "classes": 1}, "classes is 1"),
        ({"task": 3}, "name is 3"),
    ],
)
def test_what_a_node_config_may_get_wrong(tmp_path: Path, keys: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_site(node(tmp_path, NUMBERS, **keys), {})
    assert said in str(caught.value)


def test_rows_are_for_tasks_without_classes(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"y of shape \(200, 10\)"):
        read_site(node(tmp_path, BITS, classes=2), {}).records(0)
