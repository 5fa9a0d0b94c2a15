"""The table that runs give: figures side by side, costs by the paper's formula and as sent, and honest notes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import small_table
from click import UsageError
from typer.testing import CliRunner

from fedspa.errors import ConfigError, DataError
from fedspa.runs.config import load
from intervals import shown_spread
from reproduction import cells, rows, table
from reproduction.__main__ import app, sweeping
from reproduction.sweep import Outcome
from reproduction.theorem1 import published_noise


def call(*words: str) -> str:
    result = CliRunner().invoke(app, ["table", *words, "--device", "cpu"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("table")
    path = small_table.write(folder)
    found = json.loads(call(str(path), "--seeds", "2", "--out", str(folder / "out"), "--json"))
    return path, folder / "out", found


def test_every_row_and_setting_is_there(small: tuple[Path, Path, dict[str, Any]]) -> None:
    _, out, found = small
    assert json.loads((out / "table.json").read_text("utf-8")) == found
    cells_of = {row["algorithm"]: {"published", "verified"} & row.keys() for row in found["rows"]}
    assert cells_of == {"fedspa": {"published", "verified"}, "dp-fed": {"verified"}, "fedavg": {"published"}}
    sparse, dense, plain = found["rows"]
    assert (sparse["published"]["sound"], sparse["verified"]["sound"]) == (False, True)
    sizes = {"batch": 10, "records": 240, "steps": 2, "participations": sparse["published"]["participations_max"]}
    noise = published_noise(sparse["published"]["epsilon_published"], 1e-3, **sizes)
    assert noise == pytest.approx(6.0)
    assert sparse["verified"]["epsilon"] <= 4.0
    assert plain["published"]["epsilon"] is None
    assert plain["published"]["sound"] is False
    for cell in (sparse["published"], sparse["verified"], dense["verified"], plain["published"]):
        best, last = cell["accuracy_best"], cell["accuracy_last"]
        assert len(best["values"]) == cell["seeds"] == 2
        assert all(one >= other for one, other in zip(best["values"], last["values"]))
    assert found["command"].endswith("small.toml --seeds 2")
    assert found["hardware"]


def test_costs(small: tuple[Path, Path, dict[str, Any]]) -> None:
    """2 rounds of 3 in 6 agents: an agent uploads once on average. d = 650 values of 4 bytes."""
    sparse, dense, plain = small[2]["rows"]
    assert dense["cost"] == pytest.approx(650 * 4 / 1e6)
    assert sparse["cost"] == pytest.approx(0.2 * dense["cost"])
    for row, setting in ((sparse, "verified"), (dense, "verified"), (plain, "published")):
        assert row[setting]["uplink_bytes"] == pytest.approx(row[setting]["payload_bytes"])
    assert plain["published"]["payload_bytes"] == 2648
    lines = {line[0]: line for line in table.cost_lines(small[2])}
    assert lines["FedAvg"][2:] == ["0.3931", "0.0026", "0.002648", "2,648", "1.0", "–"]
    assert float(lines["Fed-SPA"][-2]) > 10


def test_markdown_has_all_three_figures_side_by_side(small: tuple[Path, Path, dict[str, Any]]) -> None:
    _, out, found = small
    text = (out / "table.md").read_text("utf-8")
    assert table.markdown(found) in text
    (line,) = [line for line in text.splitlines() if line.startswith("| Fed-SPA | 0.2 | 92.65 ")]
    for setting in ("published", "verified"):
        assert shown_spread(found["rows"][0][setting]["accuracy_best"]) in line
    (line,) = [line for line in text.splitlines() if line.startswith("| DP-Fed | 1 | diverged | – | – | ")]
    widths = [len(line.split("|")) - 2 for line in text.splitlines() if line.startswith("|")]
    columns = (table.ACCURACY_COLUMNS, table.EPSILON_COLUMNS, table.COST_COLUMNS)
    assert widths == [len(names) for names in columns for _ in range(5)]


def test_on_the_screen(small: tuple[Path, Path, dict[str, Any]]) -> None:
    path, out, _ = small
    text = call(str(path), "--seeds", "2", "--out", str(out))
    assert max(len(line) for line in text.splitlines() if "Files:" not in line) <= 80
    assert "not private" in text
    assert "Quick" not in text
    assert text.count("Fed-SPA") == 3  # two settings, and the uploads


def test_one_row_more_seeds(small: tuple[Path, Path, dict[str, Any]]) -> None:
    """What is there is used: the same two seeds, and a third beside them."""
    path, out, found = small
    more = json.loads(call(str(path), "--seeds", "3", "--rows", "fedavg", "--out", str(out), "--json"))
    (row,) = more["rows"]
    values = row["published"]["accuracy_last"]["values"]
    assert values[:2] == found["rows"][2]["published"]["accuracy_last"]["values"]
    assert len(values) == 3


def test_what_is_compared_runs_with_more_seeds(tmp_path: Path) -> None:
    """Table 2's sound rows have three at least; --seeds asks for more, and quick rows stay quick."""
    path = rows.find_table("cifar10")
    spec = rows.read(path)
    chosen = rows.select(spec, "fedspa-0.1,fedavg")

    def counts(seeds: int, quick: bool) -> dict[str, int]:
        planned = table.plan(path, spec, chosen, seeds, tmp_path, quick, [])
        return {key: len(runs) for key, runs in planned.items()}

    names = [f"fedspa-0.1-{setting}" for setting in ("published", "verified", "tuned")] + ["fedavg-1-published"]
    assert counts(1, False) == dict(zip(names, (1, 3, 3, 1)))
    assert counts(5, False) == dict.fromkeys(names, 5)
    assert counts(1, True) == dict.fromkeys(names, 1)


def outcome(**summary: Any) -> Outcome:
    told = {"accuracy_best": 0.9, "accuracy_last": 0.8, "payload_bytes": 1, "uplink_bytes": 1, "seconds": 1}
    told |= {"private": True, "epsilon": 1.0, "epsilon_replace_one": 2.0, "participations_max": 5}
    return Outcome("done", "", {**told, **summary})


def test_a_cell_states_what_the_worst_of_its_seeds_paid() -> None:
    config = load({"privacy": {"epsilon": 1.0}})
    paid = outcome(epsilon=1.5, epsilon_replace_one=2.5, epsilon_published=3.0, participations_max=6, private=False)
    found = cells.cell(config, [outcome(epsilon_published=2.0), paid], 2)
    assert (found["epsilon"], found["epsilon_replace_one"], found["epsilon_published"]) == (1.5, 2.5, 3.0)
    assert (found["participations_max"], found["private"], found["sound"]) == (6, False, False)


def test_a_cell_with_a_seed_that_has_no_epsilon_has_none() -> None:
    """The largest of those that have one would be no bound of the other."""
    config = load({"privacy": {"epsilon": 1.0}})
    found = cells.cell(config, [outcome(), outcome(epsilon=None, epsilon_replace_one=None)], 2)
    assert found["epsilon"] is None
    assert found["epsilon_replace_one"] is None


def test_other_settings_are_tried_with_seeds_that_no_result_has() -> None:
    """A table with --set is a trial: were it on the seeds that are printed, these would have chosen the settings."""
    log = (Path(__file__).parents[2] / "reproduction" / "log.md").read_text("utf-8")
    assert "800 to 999" in log
    assert sweeping.first_seed(None) == rows.FIRST_SEED
    assert sweeping.first_seed(["run.tf32=true", "data.dir=elsewhere"]) == rows.FIRST_SEED
    for word in ("algorithm.server_lr=3", "privacy.epsilon=2", "data.features=aligned", " federation.rounds = 2"):
        assert sweeping.first_seed(["run.threads=1", word]) == rows.TRIED_SEED
    with pytest.raises(ConfigError, match="leave it out"):
        sweeping.first_seed(["run.seed=7"])


def test_a_tried_table_runs_with_those_seeds(small: tuple[Path, Path, dict[str, Any]], tmp_path: Path) -> None:
    words = ["--rows", "fedavg", "--set", "algorithm.server_lr=0.5", "--out", str(tmp_path), "--json"]
    (row,) = json.loads(call(str(small[0]), *words))["rows"]
    assert row["published"]["first_seed"] == rows.TRIED_SEED
    assert small[2]["rows"][2]["published"]["first_seed"] == rows.FIRST_SEED


def test_quick_is_quick_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = small_table.write(tmp_path)
    text = call(str(path), "--quick", "--rows", "fedavg")
    assert "Nothing follows" in text
    found = json.loads((tmp_path / "runs" / "table-small-quick" / "table.json").read_text("utf-8"))
    assert (found["quick"], found["rows"][0]["published"]["rounds"]) == (True, 1)


@pytest.mark.parametrize("name", ["mnist", "cifar10"])
def test_without_files_it_says_where_to_put_them(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FEDSPA_DATA", raising=False)
    monkeypatch.chdir(tmp_path)
    words = ["table", name]
    with pytest.raises(DataError, match=r"missing .* in 'data.*'.*get them from https://.*--data or FEDSPA_DATA"):
        CliRunner().invoke(app, words, catch_exceptions=False)
    with pytest.raises(DataError, match=r"missing .* in 'elsewhere"):
        CliRunner().invoke(app, [*words, "--data", "elsewhere"], catch_exceptions=False)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long  # .ci/run makes both quick tables
def test_quick_needs_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FEDSPA_DATA", raising=False)
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["table", "mnist", "--quick", "--json"], catch_exceptions=False)
    assert "no files of mnist in data: stand-in records serve" in result.stderr
    found = json.loads(result.stdout)
    assert found["data"] == "reproduction.stand_in:mnist"
    for row in found["rows"]:
        for setting in rows.TRIAL_KINDS:
            if (cell := row.get(setting)) is not None:
                assert cell["status"] == "done", (row["algorithm"], cell["reason"])
    payloads = {
        row["compression"]: row["verified"]["payload_bytes"]
        for row in found["rows"]
        if "fedspa" in row.values() and row["adversary"] == "local"
    }
    assert payloads[0.05] < payloads[0.1] < payloads[0.4] < payloads[1.0]


@pytest.mark.parametrize("words", [["--seeds", "0"], ["--jobs", "0"], ["--set", "algorithm.compression=2"]])
def test_bad_options_are_refused_by_name(tmp_path: Path, words: list[str]) -> None:
    with pytest.raises((ConfigError, UsageError), match=words[-1].partition("=")[0]):
        app(["table", str(small_table.write(tmp_path)), *words], standalone_mode=False)


def test_a_cell_whose_runs_failed() -> None:
    config = load()
    wild = Outcome("diverged", "its loss is no longer finite, round 3")
    assert cells.cell(config, [wild], 2)["status"] == "diverged"
    assert cells.cell(config, [], 2)["status"] == "running"
    row = {
        "algorithm": "cpsgd",
        "compression": 0.1,
        "adversary": "local",
        "printed": rows.Printed(diverged=True).model_dump(),
        "cost": None,
        "verified": cells.cell(config, [Outcome("refused", "outside the theorem")], 1),
        "published": cells.cell(config, [], 1),
    }
    found = {"rows": [row], "quick": False, "seeds": 1}
    assert table.accuracy_lines(found)[0] == ["cpSGD", "0.1", "diverged", *["not run"] * 2, "refused", *["–"] * 3]
    assert table.epsilon_lines(found)[0] == ["cpSGD", "0.1", "–", "–", "–", "–", "–"]
    assert "cpSGD, p = 0.1, verified: refused: outside the theorem" in table.notes(found)


@pytest.mark.parametrize(
    ("seeds", "told"),
    [
        ([{}, {"verified": 0}], "From no run that is done yet. "),
        ([{"published": 1}, {"published": 1, "verified": 1, "tuned": 0}], "From one seed. "),
        ([{"published": 3, "tuned": 3}, {"verified": 3}], "From 3 seeds; ± is half"),
        (
            [{"published": 1, "verified": 3, "tuned": 5}, {"published": 1, "verified": 1}],
            "From these numbers of seeds: 1 at the published noise, 1 or 3 in sound cells, 5 in tuned ones; where",
        ),
    ],
)
def test_the_note_says_how_many_seeds_each_kind_of_cell_has(seeds: list[dict[str, int]], told: str) -> None:
    """--seeds may be fewer than a table's file asks for."""
    lines = [
        {"algorithm": "fedspa", "compression": 0.1, "adversary": "local"}
        | {kind: {"seeds": count, "status": "done", "reason": ""} for kind, count in row.items()}
        for row in seeds
    ]
    (note,) = [line for line in table.notes({"rows": lines, "quick": False, "seeds": 1}) if line.startswith("best: ")]
    assert told in note


def test_spread() -> None:
    assert cells.spread([1.0, 2.0, 3.0]) == {"mean": 2.0, "std": 1.0, "values": [1.0, 2.0, 3.0]}
    assert shown_spread(cells.spread([97.5])) == "97.50"
    assert shown_spread(cells.spread([90.0, 92.0])) == "91.00 ± 12.71"
