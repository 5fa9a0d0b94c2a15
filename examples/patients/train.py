"""Patients with several visits: the patient is protected, and not each visit.

python train.py
"""

from __future__ import annotations

import argparse

import numpy as np

import fedspa
from fedspa.runs.guarantee import statement

HOSPITALS, PATIENTS, READINGS = 4, 1600, 6


def visits(patients: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Readings, whether the patient has the condition, and whose visit it was: one to twenty of each patient, who
    differ from each other far more than their visits do."""
    ill = rng.integers(0, 2, patients)
    level = rng.normal(size=(patients, READINGS)) + 0.8 * ill[:, None]
    whose = np.repeat(np.arange(patients), np.minimum(1 + rng.geometric(0.3, patients), 20))
    readings = level[whose] + 0.5 * rng.normal(size=(len(whose), READINGS))
    return readings, ill[whose], whose


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    rounds = parser.parse_args().rounds
    rng = np.random.default_rng(0)
    x, y, whose = visits(PATIENTS, rng)
    test_x, test_y, _ = visits(500, rng)  # other people
    print(f"{len(x)} visits of {PATIENTS} patients, up to {np.bincount(whose).max()} of one of them")

    result = fedspa.run(
        {
            "federation": {"agents": HOSPITALS, "per_round": HOSPITALS, "rounds": rounds},
            "data": {"person_records": 4},
            "algorithm": {"local_steps": 4, "batch": 40, "local_lr": 0.5, "server": "average"},
            "privacy": {"epsilon": 2.0, "delta": 1e-4, "clip_value": 0.5},
        },
        data=fedspa.from_arrays(x, y, test_x, test_y, name="visits", persons=whose),
    )
    print(f"accuracy {result.summary['accuracy_last']:.1%} on visits of other patients")
    print("guarantee:", statement(result.summary))
    print("report:", result.folder / "report.html")


if __name__ == "__main__":
    main()
