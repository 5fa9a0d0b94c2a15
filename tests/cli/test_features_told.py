"""The first pass through a frozen body says how far it is."""

from __future__ import annotations

import logging

import pytest
import torch
from frozen_nets import chain

from fedspa.examples import blank
from fedspa.learning import features
from fedspa.learning.backbone import Split, split
from fedspa.learning.features import Features
from fedspa.learning.tasks import Classification
from fedspa.progress import _features_told


def test_it_says_how_many_features_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features, "_SAID_EVERY", -1.0)
    found = split(chain(), blank((1, 8, 8)), Classification(10))
    assert isinstance(found, Split)
    said: list[str] = []
    with _features_told(said.append):
        Features(found, torch.randn(40, 1, 8, 8), strict=False).of()
    assert [line.partition(";")[0] for line in said] == [
        f"features of {done} of 40 records are made" for done in (16, 32, 40)
    ]
    assert logging.getLogger(features.__name__).level == logging.NOTSET
