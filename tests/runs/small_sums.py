"""Small runs under secure aggregation, one for each algorithm that has sums."""

from __future__ import annotations

from typing import Any

from small_runs import ALGORITHMS

SUMMED: dict[str, Any] = {"adversary": "secure-aggregation", "members": 3, "colluders": 1}
# Six agents hold 240 records each: a step is on all of them.
STEP: dict[str, Any] = {"local_steps": 1, "batch": 240, "local_lr": 0.5}
SUMS: dict[str, dict[str, dict[str, Any]]] = {
    "fedspa": {"algorithm": {**STEP, "mask": "shared"}, "privacy": SUMMED},
    "fedspa fixed": {"algorithm": {**STEP, "mask": "fixed"}, "privacy": SUMMED},
    "dp-fed": {"algorithm": {**STEP, "name": "dp-fed", "compression": 1.0}, "privacy": SUMMED},
    "cpsgd": {**ALGORITHMS["cpsgd"], "privacy": {**ALGORITHMS["cpsgd"]["privacy"], **SUMMED}},
    "cpsgd plain": {
        **ALGORITHMS["cpsgd"],
        "algorithm": {**ALGORITHMS["cpsgd"]["algorithm"], "options": {"trials": 9000}},
        "privacy": {**ALGORITHMS["cpsgd"]["privacy"], **SUMMED},
    },
}
