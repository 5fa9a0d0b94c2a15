"""Write a table of made-up visits: patients come to one of four clinics, some of them often.

python table.py
"""

from __future__ import annotations

import csv
from pathlib import Path
from random import Random

CLINICS = ("north", "east", "south", "west")
PATIENTS = 600


def main() -> None:
    chance = Random(0)
    with Path("visits.csv").open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(["clinic", "patient", "age", "smoker", "pressure", "complaint", "ill"])
        for patient in range(PATIENTS):
            age, smoker, usual = chance.randint(20, 90), chance.random() < 0.3, chance.gauss(120, 15)
            risk = (age - 55) / 20 + 1.5 * smoker + (usual - 120) / 15
            for _ in range(min(20, 1 + int(chance.expovariate(0.4)))):  # few come often
                pressure = "" if chance.random() < 0.1 else f"{chance.gauss(usual, 5):.0f}"
                complaint = chance.choice(["cough", "headache", "none"])
                ill = risk + (complaint == "cough") + chance.gauss(0, 0.5) > 0.8
                words = ["yes" if flag else "no" for flag in (smoker, ill)]
                rows.writerow([CLINICS[patient % 4], f"p{patient}", age, words[0], pressure, complaint, words[1]])


if __name__ == "__main__":
    main()
