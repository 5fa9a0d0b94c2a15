"""Private statistics: what is released, what it costs, and what the intervals hold."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dp_accounting import dp_event
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import fedspa
from fedspa.agent.ledger.ledger import Ledger
from fedspa.analytics.statistics import expected, release_config
from fedspa.cli import app
from fedspa.data.columns import checked
from fedspa.errors import ConfigError, FedspaError
from fedspa.learning.tasks.totals import Layout
from fedspa.mechanisms.gaussian.plan import GaussianEvent
from fedspa.runs.config import STATISTICS, Config, to_toml

COLUMNS = {
    "age": {"kind": "number", "range": [0, 100]},
    "weight": {"kind": "number", "range": [0, 200], "missing": "indicator"},
    "ward": {"kind": "category", "categories": ["a", "b", "c"], "missing": "indicator"},
    "smoker": {"kind": "flag"},
    "ill": {"kind": "category", "categories": ["no", "yes"], "target": True},
}
SITES = (40, 160, 400)  # unequal on purpose


def rows() -> list[dict[str, Any]]:
    rng = np.random.default_rng(5)
    found = []
    for number, records in enumerate(SITES):
        for _ in range(records):
            age = float(np.clip(rng.normal(45 + 5 * number, 15), 0, 100).round(1))
            found.append(
                {
                    "age": age,
                    "weight": "" if rng.random() < 0.1 else float(np.clip(rng.normal(75, 12), 0, 200).round(1)),
                    "ward": ["a", "b", "c", ""][rng.choice(4, p=[0.5, 0.3, 0.1, 0.1])],
                    "smoker": bool(rng.random() < 0.3),
                    "ill": "yes" if rng.random() < age / 200 else "no",
                    "site": f"site {number}",
                    "part": "train",
                }
            )
    return [*found, {**found[0], "part": "test"}]


@pytest.fixture(scope="module")
def table() -> Any:
    pandas = pytest.importorskip("pandas", reason="needs pandas, of the extra dev")
    return pandas.DataFrame(rows())


@pytest.fixture
def config(tmp_path: Path, table: Any) -> Callable[..., fedspa.Config]:
    table.to_csv(tmp_path / "table.csv", index=False)

    def make(columns: dict[str, Any] = COLUMNS, **sections: dict[str, Any]) -> fedspa.Config:
        values = {
            "federation": {"agents": len(SITES), "per_round": 2, "rounds": 7},
            "data": {
                "name": "table.csv",
                "dir": str(tmp_path),
                "table": {"agent": "site", "split": "part", "columns": columns},
            },
            "algorithm": {"local_steps": 1, "compression": 0.5, "mask": "shared"},
            "privacy": {"epsilon": 2.0, "delta": 1e-4},
        }
        return fedspa.load({key: {**values.get(key, {}), **sections.get(key, {})} for key in (*values, *sections)})

    return make


def almost_exact(config: fedspa.Config, **options: Any) -> fedspa.Statistics:
    """With so little noise that the numbers are the records' own."""
    values = config.model_dump(exclude_none=True)
    values["privacy"] |= {"noise_multiplier": 1e-3, "noise": "seeded"}  # other noise must have a finite ε
    values["privacy"].pop("epsilon")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return fedspa.statistics(fedspa.load(values), **options)


def test_numbers_are_those_of_the_records(config, table, tmp_path: Path) -> None:
    table = table[table["part"] == "train"]
    found = almost_exact(config(), out=tmp_path / "run", bins=50)
    weight = np.array([float(each) for each in table["weight"] if each != ""])
    assert found.value("records") == pytest.approx(600, abs=0.1)
    assert found.value("mean", "age") == pytest.approx(table["age"].mean(), abs=0.01)
    assert found.value("standard deviation", "age") == pytest.approx(table["age"].std(ddof=0), abs=0.01)
    assert found.value("mean", "weight") == pytest.approx(weight.mean(), abs=0.05)
    assert found.value("count of missing", "weight") == pytest.approx(600 - len(weight), abs=0.1)
    assert found.value("count of b", "ward") == pytest.approx((table["ward"] == "b").sum(), abs=0.1)
    assert found.value("share of missing", "ward") == pytest.approx((table["ward"] == "").mean(), abs=1e-3)
    assert found.value("count of true", "smoker") == pytest.approx(table["smoker"].sum(), abs=0.1)
    assert found.value("share of yes", "ill") == pytest.approx((table["ill"] == "yes").mean(), abs=1e-3)
    assert found.value("quantile 50%", "age") == pytest.approx(table["age"].median(), abs=2)
    inside = ((table["age"] >= 40) & (table["age"] < 42)).sum()
    assert found.value("count in [40, 42)", "age") == pytest.approx(inside, abs=0.1)
    for number, records in enumerate(SITES):
        own = table[table["site"] == f"site {number}"]
        assert found.value("records", site=found.sites[number]) == pytest.approx(records, abs=0.1)
        assert found.value("mean", "age", site=found.sites[number]) == pytest.approx(own["age"].mean(), abs=0.05)


def test_balanced_weights_come_from_released_frequencies(config, tmp_path: Path) -> None:
    found = fedspa.statistics(config(), epsilon=4.0, out=tmp_path / "run")
    balanced = {"name": "classification", "options": {"weights": "balanced"}}
    weights = found.standardised(config(task=balanced)).task.options["weights"]
    counts = [found.value(f"count of {word}", "ill") for word in ("no", "yes")]
    assert weights == pytest.approx([sum(counts) / 2 / count for count in counts], rel=0.01)
    assert "weights" not in found.standardised(config()).task.options
    few = fedspa.statistics(config(), epsilon=4.0, columns=["age"], out=tmp_path / "few")
    assert few.standardised(config(task=balanced)).task.options["weights"] == "balanced"
    noisy = fedspa.statistics(config(), epsilon=0.01, out=tmp_path / "noisy")
    with pytest.raises(ConfigError, match="too few records of class"):
        noisy.standardised(config(task=balanced))


def test_shares_add_up_to_one_and_fit_their_counts(config, tmp_path: Path) -> None:
    found = fedspa.statistics(config(), epsilon=0.5, out=tmp_path / "run")
    for column, words in (("ward", ["a", "b", "c", "missing"]), ("ill", ["no", "yes"])):
        shares = [found.value(f"share of {word}", column) for word in words]
        counts = [found.value(f"count of {word}", column) for word in words]
        assert sum(shares) == pytest.approx(1)
        assert min(shares) >= 0
        assert counts == pytest.approx([found.value("records") * share for share in shares])


def test_statistics_of_each_class(config, table, tmp_path: Path) -> None:
    table = table[table["part"] == "train"]
    found = almost_exact(config(), out=tmp_path / "run", columns=["age", "ward"], by_class=True)
    for group, own in table.groupby("ill"):
        assert found.value("records", group=group) == pytest.approx(len(own), abs=0.1)
        assert found.value("mean", "age", group=group) == pytest.approx(own["age"].mean(), abs=0.05)
        assert found.value("count of a", "ward", group=group) == pytest.approx((own["ward"] == "a").sum(), abs=0.1)


def test_a_target_that_is_a_number_and_a_standardised_column(config, table, tmp_path: Path) -> None:
    """Columns that are standardised by an earlier release have the same statistics, in their own unit."""
    columns = {
        "age": {**COLUMNS["age"], "mean": 50.0, "deviation": 10.0},
        "weight": {**COLUMNS["weight"], "mean": 80.0, "deviation": 11.0},
        "ward": COLUMNS["ward"],
        "smoker": {"kind": "ignore"},
        "ill": {"kind": "ignore"},
    }
    columns["age"] |= {"target": True}
    del columns["age"]["mean"], columns["age"]["deviation"]
    found = almost_exact(config(columns), out=tmp_path / "run")
    table = table[table["part"] == "train"]
    weight = np.array([float(each) for each in table["weight"] if each != ""])
    assert found.value("mean", "age") == pytest.approx(table["age"].mean(), abs=0.05)
    assert found.value("mean", "weight") == pytest.approx(weight.mean(), abs=0.05)
    assert found.value("standard deviation", "weight") == pytest.approx(weight.std(), abs=0.05)


def test_each_person_counts_once(config, table, tmp_path: Path) -> None:
    """A person with many records contributes their mean: shares are of persons, and so is the number of records."""
    rows = table[table["part"] == "train"].copy()
    rows["who"] = [f"{site}/{max(0, number - 20)}" for number, site in enumerate(rows["site"])]  # one with 21 records
    test = table[table["part"] == "test"].assign(who="nobody")
    import pandas

    pandas.concat([rows, test]).to_csv(tmp_path / "table.csv", index=False)
    asked = config(data={"person": "who", "name": "table.csv", "dir": str(tmp_path), "person_records": 30,
                         "table": {"agent": "site", "split": "part", "columns": COLUMNS}})  # fmt: skip
    found = almost_exact(asked, out=tmp_path / "run")
    persons = rows.groupby("who")
    assert found.summary["unit"] == "person"
    assert found.value("persons") == pytest.approx(len(persons), abs=0.1)
    assert found.value("mean", "age") == pytest.approx(persons["age"].mean().mean(), abs=0.05)


def test_one_release_is_one_entry_of_each_agent_and_adds_to_training(config, tmp_path: Path) -> None:
    ledger = tmp_path / "shared.sqlite"
    Ledger.open(ledger).close()
    asked = config(run={"ledger": str(ledger)}, federation={"agents": 3, "per_round": 3, "rounds": 2})
    found = fedspa.statistics(asked, epsilon=0.5, out=tmp_path / "stats")
    assert 0.49 < found.summary["epsilon"] <= 0.5
    with Ledger.open(ledger, create=False) as opened:
        for number in range(3):
            (event,) = opened.spent(f"site {number}")
            assert isinstance(event, GaussianEvent)
            assert (event.steps, event.rate) == (1, 1.0)
    trained = fedspa.run(
        fedspa.load(to_toml_values(asked), ["algorithm.batch=20", f'run.out="{tmp_path / "trained"}"'])
    )
    assert trained.summary["epsilon_total"] > trained.summary["epsilon"]
    with Ledger.open(ledger, create=False) as opened:
        spent = opened.spent("site 0")
    # Chosen one after the other, they are composed by a filter on Rényi divergences: a bound that PLD is below.
    assert len(spent) == 2
    pld, rdp = (composed_by_dp_accounting(spent, accountant) for accountant in (PLDAccountant, RdpAccountant))
    assert pld < trained.summary["epsilon_total"] <= 1.1 * rdp


def to_toml_values(config: fedspa.Config) -> dict[str, Any]:
    return config.model_dump(exclude_none=True)


def composed_by_dp_accounting(spent: Any, kind: Any) -> float:
    """The same entries, composed by another library, at the δ of these tests."""
    accountant = kind()
    for event, times in spent.items():
        one = dp_event.PoissonSampledDpEvent(event.rate, dp_event.GaussianDpEvent(event.noise_multiplier))
        if event.rate == 1:
            one = dp_event.GaussianDpEvent(event.noise_multiplier)
        accountant.compose(dp_event.SelfComposedDpEvent(one, event.steps * times))
    return float(accountant.get_epsilon(1e-4))


@pytest.mark.parametrize("adversary", ["local", "secure-aggregation"])
@pytest.mark.parametrize("noise", ["seeded", "exact"])
def test_intervals_hold_the_truth(config, table, tmp_path: Path, adversary: str, noise: str) -> None:
    """Of some 60 intervals a release, in 8 releases: about 95 in 100 hold the records' own number."""
    table = table[table["part"] == "train"]
    weight = np.array([float(each) for each in table["weight"] if each != ""])
    truth = {
        ("", "records"): 600,
        ("age", "mean"): table["age"].mean(),
        ("age", "standard deviation"): table["age"].std(ddof=0),
        ("weight", "mean"): weight.mean(),
        ("weight", "count of missing"): 600 - len(weight),
        ("smoker", "count of true"): table["smoker"].sum(),
        **{("ward", f"count of {each}"): (table["ward"] == each).sum() for each in "abc"},
        **{("ill", f"share of {each}"): (table["ill"] == each).mean() for each in ("no", "yes")},
        **{
            ("age", f"count in [{low}, {low + 10}{']' if low == 90 else ')'}"): (
                (table["age"] >= low) & ((table["age"] < low + 10) | (low == 90))
            ).sum()
            for low in range(0, 100, 10)
        },
    }
    held = []
    releases = 8 if noise == "seeded" else 3
    for seed in range(releases):
        asked = config(run={"seed": 100 + seed}, privacy={"noise": noise, "adversary": adversary})
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = fedspa.statistics(asked, epsilon=1.0, bins=10, out=tmp_path / f"run-{seed}")
        held += [
            each.low <= truth[each.column, each.statistic] <= each.high
            for each in found.estimates
            if not each.site and (each.column, each.statistic) in truth
        ]
    expected_misses = 0.05 * len(held)
    assert len(held) == releases * len(truth)
    assert len(held) - sum(held) <= expected_misses + 4 * math.sqrt(expected_misses)  # numbers of a release are related
    assert (sum(held) < len(held)) or noise == "exact"  # intervals that are too wide would hold it always


def test_the_errors_to_expect_are_those_that_come(config, tmp_path: Path) -> None:
    planned = expected(release_config(config(), {}, 1.0, None))
    assert not (tmp_path / "runs").exists()
    found = fedspa.statistics(config(), epsilon=1.0, out=tmp_path / "run")
    of_plan = {(each.column, each.statistic): each.error for each in planned.estimates if not each.site}
    for each in found.estimates:
        whole = each.low > 0  # an interval that is cut at zero is shorter
        if not each.site and each.statistic in ("records", "count of missing") and whole:
            assert of_plan[each.column, each.statistic] == pytest.approx(each.error, rel=0.01)
    assert planned.summary["epsilon"] == pytest.approx(found.summary["epsilon"], rel=1e-3)


def test_a_share_of_four_halves_the_error_of_a_column(config) -> None:
    plain, weighted = (
        expected(release_config(config(), {"columns": ["age", "ward"], "shares": shares}, 1.0, None))
        for shares in ({}, {"age": 4.0})
    )
    error = [
        next(each.error for each in found.estimates if each.column == "age" and each.statistic.startswith("count in"))
        for found in (plain, weighted)
    ]
    # The squared norm is shared among 1 + 2 + 1 blocks, then among 1 + 8 + 1.
    assert error[1] / error[0] == pytest.approx(math.sqrt((10 / 4) / 4), rel=1e-3)


VALUES = st.floats(allow_nan=True, allow_infinity=True, width=32)


@given(st.data())
def test_no_record_has_a_longer_vector_than_one(data) -> None:
    """Whatever a record holds, NaN aside, which costs it its vector: the clip would cut more, and bias the rest."""
    schema = checked({"columns": COLUMNS})
    weights = st.dictionaries(st.sampled_from(list(COLUMNS)), st.floats(0.01, 100))
    options = {
        "bins": data.draw(st.integers(2, 30)),
        "by_class": data.draw(st.booleans()),
        "shares": data.draw(weights),
    }
    layout = Layout.of(schema, options)
    numbers = torch.tensor([data.draw(VALUES), data.draw(VALUES)])
    ward = torch.nn.functional.one_hot(torch.tensor(data.draw(st.integers(0, 3))), 4)
    missing = data.draw(st.integers(0, 1))
    record = torch.cat([numbers, torch.tensor([missing]), ward, torch.tensor([data.draw(st.integers(0, 1))])])
    vector = layout.vectors(record[None], torch.tensor([data.draw(st.integers(-1, 3))]))[0]
    assert vector.shape == (layout.width,)
    if not vector.isnan().any():
        assert float(vector.norm()) <= 1 + 1e-5
    assert Layout.parse(layout.text()) == layout


def test_a_record_that_cannot_be_read_counts_as_nothing(config, tmp_path: Path) -> None:
    x = torch.tensor([[0.5, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0], [math.nan, *[0.0] * 7]])
    layout = Layout.of(checked({"columns": COLUMNS}), {})
    vectors = layout.vectors(x, torch.tensor([0, 1]))
    assert vectors[0].isfinite().all()
    assert not vectors[1].isfinite().all()  # so that the engine counts its gradient as zero


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"columns": ["agee"]}, "names the column 'agee', which the schema has no use for.*did you mean 'age'"),
        ({"columns": ["age"], "shares": {"ward": 2.0}}, "shares names 'ward', which task.options.columns leaves out"),
        ({"bins": 1}, "task.options.bins"),
        ({"shares": {"age": 0.0}}, "task.options.shares"),
        ({"layout": "nonsense"}, "layout stands alone"),
    ],
)
def test_bad_options_are_refused_in_one_line(config, options: dict[str, Any], said: str) -> None:
    with pytest.raises(FedspaError, match=said):
        fedspa.run(release_config(config(), {"bins": 20, **options}, 1.0, None))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("federation.rounds", 2),
        ("model.name", "logistic"),
        ("algorithm.local_steps", 3),
        ("algorithm.compression", 0.5),
        ("algorithm.server", "adam"),
        ("privacy.clip", "coordinate"),
        ("privacy.clip_value", 2.0),
        ("privacy.sampling", "fixed"),
    ],
)
def test_a_release_is_what_it_says(config, key: str, value: object) -> None:
    """Any other setting of a release would sample, or scale, or release more than once."""
    asked = release_config(config(), {}, 1.0, None).model_dump(exclude_none=True)
    with pytest.raises(ConfigError, match=f"{key} is .*; for task.name 'statistics' it must be"):
        fedspa.load(asked, [f"{key}={json.dumps(value)}"])


def test_the_budget_of_the_training_is_not_spent_unasked(config, tmp_path: Path) -> None:
    """The config's ε is what training may cost: a release says its own."""
    with pytest.raises(ConfigError, match=r"epsilon is missing: what the release may cost .* the training's"):
        fedspa.statistics(config(), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


class TestCommand:
    def test_plan_release_and_show(self, config, tmp_path: Path, monkeypatch) -> None:
        monkeypatch.chdir(tmp_path)
        Path("config.toml").write_text(to_toml(config()))
        runner = CliRunner()
        planned = runner.invoke(app, ["stats", "config.toml", "--plan", "--epsilon", "0.5"])
        assert planned.exit_code == 0
        assert "nothing was spent" in planned.output
        assert not Path("runs").exists()
        wanted = ["--out", "run", "--write-schema", "schema.toml", "--write-config", "next.toml"]
        done = runner.invoke(app, ["stats", "config.toml", "--epsilon", "0.5", *wanted])
        assert done.exit_code == 0, done.output
        assert "mean" in done.output
        assert "(ε = 0.500, δ = 0.0001)" in done.output
        assert len(json.loads(runner.invoke(app, ["stats", "run", "--json"]).output)["estimates"]) > 100
        again = runner.invoke(app, ["stats", "run", "--json"])
        found = json.loads(again.output)
        assert found["epsilon"] == pytest.approx(0.5, rel=1e-2)
        following = fedspa.load("next.toml")
        age = following.data.table.columns["age"]
        assert age.mean is not None
        assert 0 < age.deviation < 50
        for file in ("schema.toml", "next.toml"):
            paid = Path(file).read_text()
            assert "mean and deviation were released by the run in run, entries 1 to 3 of " in paid
            assert "ledger.sqlite: (ε = 0.500" in paid
        audited = runner.invoke(app, ["audit", "--config", "run/config.toml", "--draws", "100"])
        assert audited.exit_code == 0, audited.output
        assert "one record's part" in audited.output


def test_a_release_that_was_interrupted_resumes_and_pays_once(config, tmp_path: Path) -> None:
    asked = release_config(config(), {}, 1.0, tmp_path / "run")
    fedspa.run(asked)
    before = fedspa.Statistics.load(tmp_path / "run")
    fedspa.run(resume=tmp_path / "run")
    after = fedspa.Statistics.load(tmp_path / "run")
    assert before.estimates == after.estimates
    with Ledger.open(tmp_path / "ledger.sqlite", create=False) as ledger:
        assert sum(ledger.spent("site 0").values()) == 1


def test_every_key_of_an_algorithm_is_settled_for_a_release() -> None:
    """A key that changes what an upload is would change the numbers and not their intervals. Whoever adds one says here
    that it does not, or settles it in STATISTICS."""
    harmless = {"batch", "mask", "options", "coding", "local_options", "server_options"}
    settled = {key.removeprefix("algorithm.") for key in STATISTICS if key.startswith("algorithm.")}
    assert settled | harmless == set(Config.model_fields["algorithm"].annotation.model_fields)  # type: ignore[union-attr]
    assert not settled & harmless
