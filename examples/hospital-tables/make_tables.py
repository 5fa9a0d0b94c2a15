"""Write five hospitals' tables of synthetic stays into sites/: some patients come once, others eight times.

python make_tables.py
"""

from __future__ import annotations

import csv
import math
from pathlib import Path
from random import Random

HOSPITALS = {"aachen": 2000, "bergen": 1700, "ghent": 1500, "porto": 1200, "turku": 800}  # patients of each
# What each adds to the risk.
DEPARTMENTS = {"surgery": 0.0, "cardiology": 0.5, "oncology": 0.9, "orthopaedics": -0.6}
COLUMNS = [
    *("patient", "age", "sex", "department", "emergency", "previous_stays"),
    *("days", "creatinine", "haemoglobin", "readmitted"),
]


def main(hospitals: dict[str, int] = HOSPITALS) -> None:
    folder = Path("sites")
    folder.mkdir(exist_ok=True)
    for number, (hospital, patients) in enumerate(hospitals.items()):
        chance = Random(number)
        with (folder / f"{hospital}.csv").open("w", newline="", encoding="utf-8") as file:
            rows = csv.writer(file, lineterminator="\n")
            rows.writerow(COLUMNS)
            for patient in range(patients):
                rows.writerows([f"{hospital}-{patient:04}", *stay] for stay in stays(chance, number))


def stays(chance: Random, hospital: int) -> list[list[object]]:
    """Return the stays of one patient. Each hospital has a somewhat different population."""
    age, sex = min(99, max(18, int(chance.gauss(58 + 3 * hospital, 17)))), chance.choice("fm")
    creatinine = chance.gauss(0.95 + 0.004 * (age - 60), 0.25)
    haemoglobin = chance.gauss(14.2 - 1.1 * (sex == "f"), 1.3)
    frailty = chance.gauss(0, 0.7)
    found: list[list[object]] = []
    for previous in range(min(8, 1 + int(chance.expovariate(1.1)))):
        department, emergency = chance.choice(list(DEPARTMENTS)), chance.random() < 0.35 + 0.1 * previous
        days = min(60, 1 + int(chance.expovariate(1 / (3 + 4 * emergency))))
        measured = chance.random() < 0.85
        value = max(0.3, chance.gauss(creatinine + 0.15 * frailty, 0.1))
        blood = max(5.0, chance.gauss(haemoglobin - 0.4 * frailty, 0.4))
        risk = (
            -3.1
            + 0.03 * (age - 60)
            + DEPARTMENTS[department]
            + 0.8 * emergency
            + 0.45 * previous
            + 0.06 * min(days, 20)
            + 1.6 * (value - 1)
            - 0.25 * (blood - 13.5)
            + frailty
        )
        readmitted = chance.random() < 1 / (1 + math.exp(-risk))
        words = ["yes" if flag else "no" for flag in (emergency, readmitted)]
        creatinine_text = f"{value:.2f}" if measured else ""
        found.append([age, sex, department, words[0], previous, days, creatinine_text, f"{blood:.1f}", words[1]])
    return found


if __name__ == "__main__":
    main()
