"""What one record at a site holds never shows in what another adds, to the bit, nor in whether the site answers."""

from __future__ import annotations

import pytest

pytest.importorskip("flwr", reason="needs the extra: pip install 'fedspa[flower]'")

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedspa.engine.generic import GenericEngine
from fedspa.examples import taken
from fedspa.flower import records


def load(monkeypatch: pytest.MonkeyPatch, made: Any, classes: int | None = None, **how: bool) -> records.Records:
    monkeypatch.setattr(records, "_users", lambda *_: made)
    return records.load({"data": "a:b"}, classes, **how)


def test_a_bad_image_leaves_the_others_their_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Images are often turned from channels last, and where one is bad all are copied."""
    images, y = np.random.default_rng(0).normal(size=(6, 8, 8, 3)).astype(np.float32), np.arange(6) % 4
    spoilt = images.copy()
    spoilt[5, 0, 0, 0] = np.nan
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 8, 3), nn.Flatten(), nn.Linear(128, 4))
    theta = nn.utils.parameters_to_vector(module.parameters()).detach()
    rows: list[Tensor] = []
    for some in (images, spoilt):
        own = load(monkeypatch, (some.transpose(0, 3, 1, 2), y), 4)
        x, labels = (taken(tree, torch.tensor([0, 3])) for tree in (own.x, own.y))
        rows.append(torch.cat(list(GenericEngine(module).rows(theta, x, labels, None))))
    assert rows[0].isfinite().all()
    assert torch.equal(*rows)
