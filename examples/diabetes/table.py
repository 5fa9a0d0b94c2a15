"""Write scikit-learn's diabetes table as a CSV file, every fifth row for testing.

python table.py
"""

from __future__ import annotations

import csv
from pathlib import Path

from sklearn.datasets import load_diabetes

NAMES = (
    "age",
    "sex",
    "bmi",
    "pressure",
    "cholesterol",
    "ldl",
    "hdl",
    "cholesterol_by_hdl",
    "log_triglycerides",
    "glucose",
)


def main(fifth: int = 0) -> None:
    table = load_diabetes(scaled=False)
    with Path("diabetes.csv").open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow([*NAMES, "progression", "part"])
        for number, (x, y) in enumerate(zip(table.data.tolist(), table.target.tolist())):
            rows.writerow([*(f"{value:g}" for value in x), f"{y:g}", "test" if number % 5 == fifth else "train"])


if __name__ == "__main__":
    main()
