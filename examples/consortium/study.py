"""Three hospitals in Python: statistics, a schema from them, tuning and training, evaluation at each, a report.

python study.py            # a few minutes; --short takes half a minute and learns less
"""

from __future__ import annotations

import sys
from pathlib import Path

import fedspa
from fedspa.privacy.event import shown

TABLES = Path(__file__).resolve().parents[1] / "hospital-tables"  # whose columns and synthetic patients are used here
sys.path.insert(0, str(TABLES))
import make_tables  # noqa: E402

SITES = {"bergen": 1700, "ghent": 1500, "turku": 800}  # patients of each


def main(short: bool) -> None:
    make_tables.main(SITES)
    rounds = ["federation.rounds=8"] if short else []
    config = fedspa.load(TABLES / "config.toml", ["data.name=sites/*.csv", "data.agent_holdout=0.2", *rounds])

    numbers = fedspa.statistics(config, epsilon=0.5, out="runs/numbers")
    for site in ("", *numbers.sites):
        mean = numbers.value("mean", "age", site)
        print(f"mean age   {site or 'all sites':<10} {'too few patients' if mean is None else f'{mean:.1f}'}")
    numbers.write_schema("schema.toml")

    options = {"proxy": False} if short else {}
    result = fedspa.tune(numbers.standardised(out(config, "runs/trained")), **options)
    print(f"AUC        the server's test patients {result.summary['score_last']:.3f}")

    scores = fedspa.evaluate(result.folder, epsilon=1.0, bins=8, out="runs/scores")  # few bins: few patients
    for site, score in [("", "auc"), *((site, "accuracy") for site in scores.sites)]:
        value = scores.value(score, site=site)
        print(f"{score:<10} {site or 'all sites':<10} {'too few patients' if value is None else f'{value:.3f}'}")
    print(f"ε          {shown(scores.summary['epsilon_total'])} for each patient, for all of it")
    print(f"Report     {result.folder / 'report.html'}")


def out(config: fedspa.Config, folder: str) -> fedspa.Config:
    return fedspa.load(config.model_dump(exclude_none=True, exclude_unset=True), [f"run.out={folder}"])


if __name__ == "__main__":
    main("--short" in sys.argv)
