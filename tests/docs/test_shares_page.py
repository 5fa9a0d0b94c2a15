"""docs/shares.md: its tables are what the code finds."""

from __future__ import annotations

import math
import re
from pathlib import Path

from fedspa.mechanisms.base import Asked, Cohort
from fedspa.mechanisms.discrete_gaussian.event import FINE, SIGMA
from fedspa.mechanisms.discrete_gaussian.plan import calibrated
from fedspa.mechanisms.discrete_gaussian.price import stretch
from fedspa.mechanisms.gaussian.calibrate import noise_multiplier
from fedspa.privacy import accounting
from fedspa.secagg.session import Session

PAGE = (Path(__file__).parents[2] / "docs" / "shares.md").read_text("utf-8")
SIZES = {"batch": 600, "records": 600, "steps": 1}


def table(name: str) -> list[str]:
    found = re.search(rf"<!-- table: {name} -->\n(.*?)<!-- end -->", PAGE, flags=re.S)
    assert found is not None
    return found.group(1).splitlines()[2:]


def test_the_stretch() -> None:
    rows = [(honest, SIGMA * math.sqrt(honest), stretch(honest)) for honest in (1, 2, 8, 80, 400)]
    floor = {1: " (the floor)"}
    assert table("stretch") == [f"| {n}{floor.get(n, '')} | {s:.2f} | {kappa:.5f} |" for n, s, kappa in rows]


def test_the_noise_of_sums_beside_one_gaussians() -> None:
    found = []
    for participations in (5, 50):
        gaussian = noise_multiplier(
            1.0, 1e-3, sampling="poisson", participations=participations, neighbours="add-remove", **SIZES
        )
        for members, colluders in ((10, 2), (100, 20)):
            asked = Asked(
                dimension=10_000,
                active=10_000,
                agents=members,
                participations=participations,
                sampling="poisson",
                batch=600,
                records=600,
                local_steps=1,
                neighbours=None,
                delta=1e-3,
                clip="l2",
                clip_value=0.1,
                clip_rule="given",
                epsilon=1.0,
                options={"privacy.noise_multiplier": None},
                cohort=Cohort(members, members, colluders),
            )
            plan = calibrated(asked)
            floor = accounting.epsilon({plan.floor_event: participations}, 1e-3, neighbours="add-remove")
            total = plan.aggregation
            keys = {f"m{i}": i.to_bytes(32, "big") for i in (1, 2)}
            session = Session("run", 1, 1, keys, bytes(32), total.low, total.high, total.count)
            own, honest = plan.noise_multiplier, plan.noise_multiplier * math.sqrt(members - colluders)
            found.append(
                f"| {participations} | {members}, {colluders} | {own:#.4g} | {honest:#.4g} | {gaussian:#.4g} | "
                f"{floor:.2f} | {session.bits} |"
            )
    assert table("noise") == found


def test_the_grid_is_the_codes() -> None:
    assert f"{FINE:,} steps of the grid are one **unit**" in PAGE
    assert f"**σ = {SIGMA}**" in PAGE
