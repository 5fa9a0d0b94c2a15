"""Tables of the pages that the accountants compute: cpSGD's ε, and the noise of sums."""

from __future__ import annotations

import math
import re
from dataclasses import replace

from pages import section

from fedspa.algorithms.cpsgd.plan import BinomialEvent, trials_for_compression
from fedspa.mechanisms.base import Cohort, PlanRequest
from fedspa.mechanisms.discrete_gaussian.plan import FINE, SIGMA, calibrated, stretch
from fedspa.mechanisms.gaussian.plan import noise_multiplier
from fedspa.privacy import accounting
from fedspa.privacy.event import shown
from fedspa.secagg.session import Session
from reproduction.cpsgd_theorem import published_epsilon

NOISE_SHARES = section("secagg.md", "Noise shares")
SIZES = {"batch": 600, "records": 600, "steps": 1}


def table(name: str) -> list[str]:
    found = re.search(rf"<!-- computed: {name} -->\n(.*?)<!-- end -->", NOISE_SHARES, flags=re.S)
    return found.group(1).splitlines()[2:]


def test_the_stretch() -> None:
    rows = [(honest, SIGMA * math.sqrt(honest), stretch(honest)) for honest in (1, 2, 8, 80, 400)]
    floor = {1: " (the worst case)"}
    assert table("stretch") == [f"| {n}{floor.get(n, '')} | {s:.2f} | {kappa:.5f} |" for n, s, kappa in rows]


def test_the_noise_of_sums_beside_one_gaussians() -> None:
    found = []
    for participations in (5, 50):
        gaussian = noise_multiplier(
            1.0, 1e-3, sampling="poisson", participations=participations, neighbours="add-remove", **SIZES
        )
        for members, colluders in ((10, 2), (100, 20)):
            asked = PlanRequest(
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
                epsilon=1.0,
                options={"privacy.noise_multiplier": None},
                cohort=Cohort(members, members, colluders),
            )
            plan = calibrated(asked)
            floor = accounting.epsilon({plan.worst_case_event: participations}, 1e-3, neighbours="add-remove")
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
    assert f"{FINE:,} steps of the grid are one **unit**" in NOISE_SHARES
    assert f"**σ = {SIGMA}**" in NOISE_SHARES


def cpsgd_table() -> str:
    lines = ["| p | b | trials m | ε | as printed | only under secure aggregation: ε |"]
    lines.append("|---|---|---|---|---|---|")
    for compression in (0.1, 0.2, 0.3, 0.4, 0.5):
        for bits in (1, 4):
            if 2 ** (32 * compression) < 2**bits + 1:
                continue
            trials = trials_for_compression(compression, bits)
            local = BinomialEvent(10, 600, 1, 21840, bits, trials)
            summed = replace(local, members=100)
            costs = [
                accounting.epsilon({local: 45}, 1e-3, neighbours="replace-one"),
                published_epsilon(local, 45, 1e-3),
                accounting.epsilon({summed: 45}, 1e-3, neighbours="replace-one"),
            ]
            lines.append(f"| {compression} | {bits} | {trials:,} | {' | '.join(map(shown, costs))} |")
    return "\n".join(lines) + "\n"


def test_the_table_of_cpsgd_is_what_the_accountant_says() -> None:
    marked = section("how-it-works.md").split("<!-- computed: cpsgd -->\n")[1]
    found = marked.split("<!-- end -->")[0]
    assert found == cpsgd_table(), f"write this into how-it-works.md:\n{cpsgd_table()}"
