"""report.html from run folders: whole, unfinished, damaged, edited and hostile ones."""

from __future__ import annotations

import json
import re
import shutil
import sqlite3
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from small_runs import ALGORITHMS, small
from typer.testing import CliRunner

from fedspa.agent.ledger.ledger import Ledger
from fedspa.cli import app
from fedspa.errors import ConfigError, FedspaError
from fedspa.mechanisms.gaussian.event import GaussianEvent
from fedspa.mechanisms.gaussian.plan import GaussianPlan
from fedspa.privacy.accounting import epsilon
from fedspa.report import render, tables, write
from fedspa.report.record import promise, read
from fedspa.running import simulate
from fedspa.runs.config import load
from fedspa.runs.setup import prepare
from fedspa.runs.statement import shown

HOSTILE = "</script><img src=x onerror=alert(1)>'\"&{{ 7*7 }}"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Small finished runs, by name. Tests that change one copy it first."""
    root = tmp_path_factory.mktemp("runs")
    uneven = {"agents": 6, "rounds": 4, "per_round": 2, "participation": "uniform", "cap": 3}
    settings: dict[str, dict[str, dict[str, Any]]] = {
        "plain": {},
        "uneven": {"federation": uneven},
        "fedavg": ALGORITHMS["fedavg"],
        "cpsgd": ALGORITHMS["cpsgd"],
    }
    for name, sections in settings.items():
        simulate(small(root / name, **sections))
    return {name: root / name for name in settings}


@pytest.fixture
def copy(runs: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(runs["plain"], tmp_path / "copy"))


class _Page(HTMLParser):
    """Tags, attributes and text as a browser would see them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def page(*folders: Path) -> _Page:
    return _Page(render([read(folder) for folder in folders]))


def problems_of(folder: Path) -> list[str]:
    run = read(folder)
    promise(run)
    return run.problems


def test_a_run_leaves_its_report(runs: dict[str, Path]) -> None:
    summary = json.loads((runs["plain"] / "summary.json").read_text("utf-8"))
    text = _Page((runs["plain"] / "report.html").read_text("utf-8")).text
    assert f"ε = {shown(summary['epsilon'])}" in text
    assert f"ε = {shown(summary['epsilon_replace_one'])} under replace-one" in text
    assert f"{summary['accuracy_last']:.2%}" in text
    assert "add-remove, poisson sampling, accountant pld" in text
    assert "Who is protected." in text
    assert "What is not covered." in text
    assert "hash chain verified" in text


def test_warnings_come_first(runs: dict[str, Path]) -> None:
    text = page(runs["plain"]).text
    assert text.index("Read this first") < text.index("seeded noise") < text.index("Guarantee")


def test_fedavg_claims_nothing(runs: dict[str, Path]) -> None:
    text = page(runs["fedavg"]).text
    assert "Guarantee none" in text
    assert "Nothing is promised." in text
    assert "ε =" not in text


def test_the_plan_says_how_gradients_were_computed(copy: Path) -> None:
    assert "gradients float32 how they are computed" in page(copy).text
    summary = json.loads((copy / "summary.json").read_text("utf-8"))
    (copy / "summary.json").write_text(json.dumps(summary | {"tf32": True}), "utf-8")
    assert "gradients float32, matrix products in TF32 how" in page(copy).text


def test_why_an_engine_was_taken_and_what_would_be_faster(copy: Path) -> None:
    summary = json.loads((copy / "summary.json").read_text("utf-8"))
    told = f"why this engine {summary['engine_reason']}"
    assert told in page(copy).text
    hinted = summary | {"engine_hints": ["for native: replace <b>Odd</b> ('1')"]}
    (copy / "summary.json").write_text(json.dumps(hinted), "utf-8")
    assert "faster for native: replace <b>Odd</b> ('1')" in page(copy).text


def test_accuracy_by_class_is_the_servers(copy: Path) -> None:
    summary = json.loads((copy / "summary.json").read_text("utf-8"))
    assert len(summary["accuracy_by_class"]) == 10
    text = page(copy).text
    row = " ".join(f"{value:.1%}" for value in summary["accuracy_by_class"])
    assert f"class 0 1 2 3 4 5 6 7 8 9 accuracy {row}" in text
    (copy / "summary.json").write_text(json.dumps(summary | {"accuracy_by_class": [0.5, None]}), "utf-8")
    assert "class 0 1 accuracy 50.0% –" in page(copy).text


def test_seeded_noise_qualifies_against_whom(runs: dict[str, Path], tmp_path: Path) -> None:
    simulate(small(tmp_path / "run", privacy={"noise_multiplier": 2.0, "noise": "secure"}))
    words = "Nothing is promised: THE NOISE OF THIS RUN WAS SEEDED."
    secure, seeded = page(tmp_path / "run").text, page(runs["plain"]).text
    assert words not in secure
    assert "nobody else has to be honest" in secure
    assert seeded.index(words) < seeded.index("Against whom.") < seeded.index("What would be promised.")
    assert "What is promised." not in seeded
    assert "Reviewed as A SIMULATION, of which nothing is private," in seeded


def test_shares_by_layer_give_the_plan_that_was_run(tmp_path: Path) -> None:
    """k, and with it sensitivity and σ, is not the compression key's, which stays at 1."""
    shares = {"mask": "fixed", "layer_shares": [0.1, 1.0], "compression": 1.0}
    config = small(tmp_path / "run", algorithm=shares, privacy={"clip": "coordinate"})
    simulate(config)
    planned = prepare(load(config)).plan
    run = read(tmp_path / "run")
    held = promise(run)
    assert held is not None
    assert isinstance(planned, GaussianPlan)
    assert planned.active == 64 + 10
    assert held.plan == planned
    assert run.problems == []
    assert f"σ {planned.sigma:.4g}" in page(tmp_path / "run").text

    summary = json.loads((tmp_path / "run" / "summary.json").read_text("utf-8"))
    (tmp_path / "run" / "summary.json").unlink()
    text = page(tmp_path / "run").text
    assert f"ε = {shown(summary['epsilon'])}" in text
    assert "k – active coordinates, by algorithm.layer_shares" in text
    assert "noise on each coordinate of the mean gradient" not in text


def test_cpsgd_says_against_whom(runs: dict[str, Path], tmp_path: Path) -> None:
    summary = json.loads((runs["cpsgd"] / "summary.json").read_text("utf-8"))
    text = page(runs["cpsgd"]).text
    assert f"ε = {shown(summary['epsilon'])}" in text
    assert "accountant binomial" in text
    assert "9,000 of the Binomial noise" in text
    settings = ALGORITHMS["cpsgd"]
    changes: tuple[tuple[str, dict[str, Any]], ...] = (
        ("sum", {"adversary": "secure-aggregation", "members": 5, "colluders": 1}),
        ("few", {"noise": "seeded"}),
    )
    for name, changed in changes:
        private = {**settings["privacy"], "noise": "secure", **changed}
        options = {"rotation": True, "trials": 2 if name == "few" else 9000}
        algorithm = {**settings["algorithm"], "options": options}
        simulate(small(tmp_path / name, **{**settings, "algorithm": algorithm, "privacy": private}))
    text = page(tmp_path / "sum").text
    summary = json.loads((tmp_path / "sum/summary.json").read_text("utf-8"))
    floor, whom = shown(summary["epsilon_floor"]), "the server with up to 1 of the 5 agents or more whose sums it sees"
    assert f"Guarantee for each record ε = {shown(summary['epsilon'])}" in text
    assert f"against {whom}; floor ε = {floor} against all others together" in text
    assert f"floor {floor} replace-one fixed binomial against all others together" in text
    assert "The floor. Should all other agents be with the server, or the masks be broken" in text
    assert text.index("What is promised.") < text.index("The floor.") < text.index("What is not covered.")
    assert "members 5 added up at least, of whom up to 1 may collude" in text
    assert "Floor, against all others together" in text
    assert read(tmp_path / "sum").problems == []
    agents = tables.ledger(read(tmp_path / "sum"), promise(read(tmp_path / "sum")), ["agent-0"])
    assert ("ε floor, against all others together", floor) in agents[0]["facts"]
    compared = page(tmp_path / "sum", runs["cpsgd"]).text
    assert f"{shown(summary['epsilon'])}, floor {floor}" in compared
    (tmp_path / "sum/summary.json").write_text(json.dumps({**summary, "epsilon_floor": summary["epsilon"]}))
    assert any("summary.json says epsilon_floor" in line for line in problems_of(tmp_path / "sum"))
    (tmp_path / "sum/summary.json").unlink()
    assert f"Guarantee so far for each record ε = {shown(summary['epsilon'])}" in page(tmp_path / "sum").text
    text = page(tmp_path / "few").text
    assert "Guarantee none" in text
    assert "too small for any ε" in text


def test_every_agent_is_priced_by_its_own_count(runs: dict[str, Path]) -> None:
    run = read(runs["uneven"])
    held = promise(run)
    assert held is not None
    assert run.participations.event is not None
    assert len(set(held.counts.values())) > 1
    for count in set(held.counts.values()):
        verified = held.verified(count)
        assert verified == epsilon({run.participations.event: count}, 1e-3, neighbours="add-remove")
    assert held.epsilon_cap == epsilon({run.participations.event: 3}, 1e-3, neighbours="add-remove")


def test_an_unfinished_run_states_what_its_ledger_gives(copy: Path) -> None:
    summary = json.loads((copy / "summary.json").read_text("utf-8"))
    (copy / "summary.json").unlink()
    text = page(copy).text
    assert "this run is not finished: 4 of 4 rounds are done" in text
    assert f"ε = {shown(summary['epsilon'])}" in text
    assert "seeded noise" in text


def test_a_run_that_ends_early_is_told_the_price_of_its_whole_plan(runs: dict[str, Path], tmp_path: Path) -> None:
    """Whoever stops by what was released has chosen a length that no accountant was told beforehand."""
    copy = tmp_path / "stopped"
    shutil.copytree(runs["uneven"], copy)
    (copy / "summary.json").unlink()
    held = promise(read(copy))
    assert held is not None
    assert held.epsilon_cap is not None
    stated = f"if it is ended here because of its results, ε of the whole plan holds: {shown(held.epsilon_cap)}"
    assert stated in page(copy).text
    assert "whole plan" not in page(runs["uneven"]).text


def test_a_round_in_progress_is_priced_too(copy: Path) -> None:
    """Killed after the ledger and before the metrics were written: what is spent is spent."""
    (copy / "summary.json").unlink()
    lines = (copy / "metrics.jsonl").read_text("utf-8").splitlines(keepends=True)
    (copy / "metrics.jsonl").write_text("".join(lines[:1]), "utf-8")
    run = read(copy)
    held = promise(run)
    assert held is not None
    assert run.participations.event is not None
    assert (
        held.verified(2)
        == held.facts["epsilon"]
        == epsilon({run.participations.event: 2}, 1e-3, neighbours="add-remove")
    )
    assert sum(attributes.get("class") == "bar" for _, attributes in page(copy).tags) == 6


def test_a_run_that_has_only_begun(copy: Path) -> None:
    for name in ("summary.json", "metrics.jsonl", "ledger.sqlite", "model.safetensors"):
        (copy / name).unlink()
    text = page(copy).text
    assert "0 of 4 rounds" in text
    assert "Too little of this run is left" in text


def test_an_edited_epsilon_is_found(copy: Path) -> None:
    summary = json.loads((copy / "summary.json").read_text("utf-8"))
    true = shown(summary["epsilon"])
    summary["epsilon"] /= 2
    (copy / "summary.json").write_text(json.dumps(summary), "utf-8")
    found = page(copy)
    assert "do not rely on either" in found.text
    assert f"ε = {true}" in found.text


def test_an_edited_ledger_is_found(copy: Path) -> None:
    with sqlite3.connect(copy / "ledger.sqlite") as ledger:
        ledger.execute("UPDATE entry SET reserved_at = '2020-01-01T00:00:00' WHERE sequence = 2")
    text = page(copy).text
    assert "the ledger is damaged" in text
    assert "HASH CHAIN BROKEN" in text


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("summary.json", b"{"),
        ("summary.json", b"[]"),
        ("metrics.jsonl", b'{"round": 0}\n'),
        ("metrics.jsonl", b"\xff\n"),
        ("config.toml", b"[privacy"),
        ("config.toml", b"[privacy]\nepsilonn = 1\n"),
    ],
)
def test_a_damaged_file_is_one_line(copy: Path, name: str, content: bytes) -> None:
    (copy / name).write_bytes(content)
    with pytest.raises(ConfigError, match=r"damaged|not TOML|unknown key"):
        read(copy)


def test_a_ledger_that_cannot_be_read_is_a_problem_of_the_page(copy: Path) -> None:
    for log in copy.glob("ledger.sqlite*"):
        log.unlink()
    (copy / "ledger.sqlite").write_bytes(b"no database")
    text = page(copy).text
    assert "ledger cannot be read" in text
    assert "The plan" not in text


def test_a_torn_last_line_is_a_round_in_progress(copy: Path) -> None:
    with (copy / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"round": 4, "accu')
    assert not any("metrics" in problem for problem in read(copy).problems)


def test_a_folder_without_a_run_is_one_line(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "missing"):
        with pytest.raises(ConfigError, match="holds no run"):
            write([folder], tmp_path / "report.html")


def test_hostile_names_and_values_stay_text(runs: dict[str, Path], copy: Path) -> None:
    """The folder's name, config values, summary texts and agents' names are others' words."""
    folder = copy.rename(copy.with_name(HOSTILE.replace("/", "\\")))
    config = (folder / "config.toml").read_text("utf-8")
    (folder / "config.toml").write_text(config.replace('dir = "data"', f"dir = {json.dumps(HOSTILE)}"), "utf-8")
    summary = json.loads((folder / "summary.json").read_text("utf-8"))
    summary["warnings"] = [HOSTILE]
    summary["engine"] = HOSTILE
    (folder / "summary.json").write_text(json.dumps(summary), "utf-8")
    for log in folder.glob("ledger.sqlite*"):
        log.unlink()
    with Ledger.open(folder / "ledger.sqlite") as ledger:
        for t in range(4):
            ledger.reserve(HOSTILE, GaussianEvent("poisson", 10, 143, 2, 2.0), HOSTILE, f"round-{t}")
    found = page(folder, runs["plain"])
    assert "dir" in found.text
    assert HOSTILE in found.text
    assert not any(tag == "img" for tag, _ in found.tags)
    assert not any(key.startswith("on") for _, attributes in found.tags for key in attributes)
    assert [attributes.get("type") for tag, attributes in found.tags if tag == "script"].count(None) == 1


def test_the_page_asks_for_nothing(runs: dict[str, Path]) -> None:
    text = render([read(folder) for folder in runs.values()])
    assert not re.findall(r"https?://[^\s\"'<>]+", text)
    assert not re.search(r"<(link|iframe|object|embed|img)|@import|url\(|style=|src=", text)
    assert "default-src 'none'" in text


def test_several_runs_are_compared(runs: dict[str, Path], tmp_path: Path) -> None:
    write(list(runs.values()), tmp_path / "report.html")
    found = _Page((tmp_path / "report.html").read_text("utf-8"))
    assert "4 runs compared" in found.text
    assert "algorithm.name" in found.text
    assert "run.out" not in found.text[: found.text.index("All keys")]
    for name in runs:
        assert name in found.text


def test_two_runs_of_one_name_are_told_apart(runs: dict[str, Path], copy: Path) -> None:
    twin = copy.rename(copy.with_name("plain"))
    text = page(runs["plain"], twin).text
    assert "plain (1)" in text
    assert "plain (2)" in text


def test_each_attempt_at_a_round_counts(copy: Path) -> None:
    for file in copy.glob("ledger.sqlite*"):
        file.unlink()
    lines = ['{"round": 0, "agents": [0, 1, 2]}', '{"round": 0, "agents": [0, 2], "attempt": 2}'] * 2
    (copy / "asked.jsonl").write_text("\n".join(lines) + "\n", "utf-8")
    found = read(copy).participations.entries
    assert sorted(entry.agent for entry in found) == ["agent-0", "agent-0", "agent-1", "agent-2", "agent-2"]


def test_a_deployments_server_knows_whom_it_asked(copy: Path) -> None:
    """It has no ledger: counts are from asked.jsonl, where a round that is asked again is no new participation."""
    entries = read(copy).participations.entries
    for log in copy.glob("ledger.sqlite*"):
        log.unlink()
    rounds: dict[int, list[int]] = {}
    for entry in entries:
        rounds.setdefault(entry.round, []).append(int(entry.agent.removeprefix("agent-")))
    lines = [json.dumps({"round": t, "agents": agents}) for t, agents in rounds.items()]
    (copy / "asked.jsonl").write_text("\n".join([*lines, lines[-1]]) + "\n", "utf-8")
    found = page(copy)
    assert f"{len(entries)} requests to agents" in found.text
    assert "Each agent keeps its own ledger" in found.text
    assert sum(attributes.get("class") == "bar" for _, attributes in found.tags) == 6


def test_a_ledger_elsewhere_is_named(tmp_path: Path) -> None:
    simulate(small(tmp_path / "run", run={"engine": "generic", "threads": 1, "ledger": str(tmp_path / "kept.sqlite")}))
    text = page(tmp_path / "run").text
    assert "outside of its folder" in text
    assert "With all earlier runs in the same ledger" in text


def test_the_command_writes_beside_the_run_or_where_it_is_told(
    runs: dict[str, Path], copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (copy / "report.html").unlink()
    for words, path in (
        ([str(copy)], copy / "report.html"),
        ([str(copy), str(runs["plain"])], Path("report.html")),
        ([str(copy), "--out", "other.html"], Path("other.html")),
    ):
        done = CliRunner().invoke(app, ["report", *words])
        assert (done.exit_code, done.stdout) == (0, f"{path}\n")
        assert path.read_text("utf-8").startswith("<!doctype html>")


def test_a_page_that_cannot_be_written_is_one_line(runs: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(FedspaError, match="name another file"):
        write([runs["plain"]], tmp_path / "nowhere" / "report.html")
