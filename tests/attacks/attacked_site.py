"""A deployed agent to attack: records and policy as given, and terms that a malicious server may choose freely."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedspa.agent.ledger.ledger import Ledger
from fedspa.algorithms import Terms
from fedspa.flower.site import Site, read_site
from fedspa.flower.terms import Announcement
from fedspa.mechanisms.gaussian.plan import GaussianPlan
from fedspa.runs.sections import Task

RUN = "0123456789abcdef" * 2
# One bias of a logistic model of 8 × 8 images and ten classes: a server may cut θ into "layers" as it likes.
ONE_BIAS = ((640, 0), (1, 1), (9, 0))
POLICY = """
epsilon = 20.0
delta = 1e-5
neighbours = "add-remove"
min_noise_multiplier = 0.8
max_local_steps = 50
max_rounds = 10
max_compression = 1.0
clippings = ["l2"]
"""


def site(home: Path, x: Any, y: Any, **more: Any) -> Site:
    """An agent with these records, a ledger of its own and nothing spent."""
    home.mkdir(parents=True, exist_ok=True)
    np.savez(home / "records.npz", x=x, y=y)
    (home / "policy.toml").write_text(POLICY)
    Ledger.open(home / "ledger.sqlite").close()
    files = {key: str(home / name) for key, name in (("data", "records.npz"), ("policy", "policy.toml"))}
    return read_site({"agent": "clinic", "classes": 10, "ledger": str(home / "ledger.sqlite"), **files, **more}, {})


def target(home: Path, present: bool) -> Site:
    """Two hundred records of the classes 0 and 2; with `present`, one of class 0 is of class 1: it is looked for."""
    x, y = np.zeros((200, 1, 8, 8)), np.zeros(200, dtype=np.int64)
    x[100:, 0, 0, 0], y[100:] = 1, 2
    y[17] = present
    return site(home, x, y)


def sure_of_the_others() -> torch.Tensor:
    """A θ at which the other records have no gradient and that one has a large one, on the bias of class 0."""
    theta = torch.zeros(650)
    theta[2 * 64] = 100.0
    theta[640] = 50.0
    return theta


def question(local_lr: float, **changes: Any) -> Announcement:
    """What asks for that bias alone, of nearly all records, at the least noise that the policy allows."""
    plan = GaussianPlan(650, 1, "l2", 1.0, "poisson", 99, 100, 1, 3, 0.8, "add-remove", 1e-5)
    terms = Terms(0, "fixed", bytes(16), local_lr, plan, ONE_BIAS)
    asked = Announcement(RUN, 0, "fedspa", "logistic", Task(), 10, "", "f32", bytes(16), "secure", terms)
    return Announcement(**{field: changes.get(field, getattr(asked, field)) for field in asked.__slots__})
