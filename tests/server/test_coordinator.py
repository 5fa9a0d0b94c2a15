"""The server's half of a run, whatever agents say."""

from __future__ import annotations

import numpy as np
import pytest

from fedspa.mechanisms.base import LARGEST_CLIP, SMALLEST_CLIP
from fedspa.runs import config
from fedspa.runs.setup import prepare
from fedspa.server.coordinator import Coordinator
from fedspa.wire.payload import Update, encode

QUANTILE = {
    "privacy.epsilon": "none",
    "privacy.noise_multiplier": "1.0",
    "privacy.clip_rule": "quantile",
    "algorithm.coding": "f32",
    "algorithm.local_steps": "100",
    "run.engine": "generic",
}


@pytest.mark.parametrize(("told", "end"), [(0.0, SMALLEST_CLIP), (3e38, LARGEST_CLIP)])
def test_agents_that_lie_about_their_clip_leave_terms_for_the_next_round(told: float, end: float) -> None:
    """Each round it moves as far as an honest one could at most. Beyond the last clip value that a plan may have there
    were no terms, and the run was over for all, in every resume."""
    server = Coordinator(prepare(config.load(None, [f"{key}={value}" for key, value in QUANTILE.items()])).server)
    for _ in range(30):
        terms, seed = server.terms(), server.mask_seed(server.terms(), 0)
        values = np.zeros(terms.active, np.float32)
        intake = server.intake(terms, 1)
        intake.take(encode(Update(terms.round, terms.dimension, seed, values, told), "f32"), seed=seed)
        server.close_round(intake)
    assert server.clip_value == end
