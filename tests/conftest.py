"""Shared by all tests: one torch thread (the suite runs tests in parallel processes), and small agents."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)

# Deterministic in CI: a failure there is a failure everywhere.
settings.register_profile("ci", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("dev", deadline=None)
settings.load_profile("ci" if os.environ.get("CI") else "dev")


@pytest.fixture
def rng() -> torch.Generator:
    return torch.Generator().manual_seed(0)
