"""report.html from run folders: whole, unfinished, damaged, edited and hostile ones."""

from __future__ import annotations

import json
import math
import re
import shutil
import sqlite3
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_runs import ALGORITHMS, small
from typer.testing import CliRunner

from fedspa.agent.ledger.ledger import Ledger
from fedspa.cli import app
from fedspa.errors import ConfigError
from fedspa.mechanisms.gaussian.plan import GaussianEvent, GaussianPlan
from fedspa.privacy.accounting import epsilon
from fedspa.privacy.event import shown
from fedspa.report import render
from fedspa.report.charts import HEIGHT, LEFT, RIGHT, TOP, WIDTH, Axis, Line, by_round, nice_step
from fedspa.report.record import promise, read
from fedspa.running import run as simulate
from fedspa.runs.config import load
from fedspa.runs.setup import prepare

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


def page(folder: Path) -> _Page:
    return _Page(render(read(folder)))


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


def test_shares_by_layer_give_the_plan_that_was_run(tmp_path: Path) -> None:
    """k, and with it sensitivity and σ, is not the compression key's, which stays at 1."""
    shares = {"mask": "fixed", "compression": [0.1, 1.0]}
    config = small(tmp_path / "run", algorithm=shares, privacy={"clip": "coordinate"})
    simulate(config)
    planned = prepare(load(config)).plan
    run = read(tmp_path / "run")
    held = promise(run)
    assert isinstance(planned, GaussianPlan)
    assert planned.active == 64 + 10
    assert held.plan == planned
    assert run.problems == []
    assert f"σ {planned.sigma:.4g}" in page(tmp_path / "run").text

    summary = json.loads((tmp_path / "run" / "summary.json").read_text("utf-8"))
    (tmp_path / "run" / "summary.json").unlink()
    text = page(tmp_path / "run").text
    assert f"ε = {shown(summary['epsilon'])}" in text
    assert "k – active coordinates, by algorithm.compression" in text
    assert "noise on each coordinate of the mean gradient" not in text


def test_every_agent_is_priced_by_its_own_count(runs: dict[str, Path]) -> None:
    run = read(runs["uneven"])
    held = promise(run)
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
    """Stopping because of a release chooses a length that the accountant did not know beforehand."""
    copy = tmp_path / "stopped"
    shutil.copytree(runs["uneven"], copy)
    (copy / "summary.json").unlink()
    held = promise(read(copy))
    assert held.epsilon_cap is not None
    stated = f"if it is ended here because of its results, ε of the whole plan holds: {shown(held.epsilon_cap)}"
    assert stated in page(copy).text
    assert "whole plan" not in page(runs["uneven"]).text


def test_what_a_users_code_says_stays_out_of_the_folder(tmp_path: Path) -> None:
    """It may quote a record."""

    def hook(_: object) -> None:
        raise ZeroDivisionError("of my own")

    with pytest.raises(ZeroDivisionError):
        simulate(small(tmp_path / "run"), on_round=hook)
    assert "this run is not finished: 1 of" in page(tmp_path / "run").text
    assert not any(b"of my own" in file.read_bytes() for file in (tmp_path / "run").rglob("*") if file.is_file())


def test_a_round_in_progress_is_priced_too(copy: Path) -> None:
    """Killed after the ledger and before the metrics were written: what is spent is spent."""
    (copy / "summary.json").unlink()
    lines = (copy / "metrics.jsonl").read_text("utf-8").splitlines(keepends=True)
    (copy / "metrics.jsonl").write_text("".join(lines[:1]), "utf-8")
    run = read(copy)
    held = promise(run)
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


def test_hostile_names_and_values_stay_text(copy: Path) -> None:
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
    found = page(folder)
    assert "dir" in found.text
    assert HOSTILE in found.text
    assert not any(tag == "img" for tag, _ in found.tags)
    assert not any(key.startswith("on") for _, attributes in found.tags for key in attributes)
    assert [attributes.get("type") for tag, attributes in found.tags if tag == "script"].count(None) == 1


def test_the_page_asks_for_nothing(runs: dict[str, Path]) -> None:
    text = "".join(render(read(folder)) for folder in runs.values())
    assert not re.findall(r"https?://[^\s\"'<>]+", text)
    assert not re.search(r"<(link|iframe|object|embed|img)|@import|url\(|style=|src=", text)
    assert "default-src 'none'" in text


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


# Figures as geometry: axes hold their values, and ticks are round.

values = st.lists(st.one_of(st.none(), st.floats(0, 1e6)), min_size=1, max_size=40)


@given(st.floats(1e-12, 1e12))
def test_a_nice_step_is_just_large_enough(width: float) -> None:
    step = nice_step(width)
    assert width * (1 - 1e-9) <= step <= 2.5 * width * (1 + 1e-9)
    assert float(f"{step:e}".split("e")[0]) in (1, 2, 5)


@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e6))
def test_ticks_lie_within_the_axis_and_are_evenly_spaced(low: float, span: float) -> None:
    axis = Axis.around([low, low + span], zero=False, height=HEIGHT)
    ticks = axis.ticks()
    assert 2 <= len(ticks) <= 9
    for tick in ticks:
        assert TOP - 0.1 <= axis.at(tick) <= HEIGHT
    gaps = [b - a for a, b in pairwise(ticks)]
    assert all(math.isclose(gap, gaps[0], rel_tol=1e-3) for gap in gaps)


@given(values, st.booleans())
def test_whatever_the_values_are_the_figure_holds_them(line: list[float | None], zero: bool) -> None:
    drawn = by_round("Title", "Caption.", [Line("a", line)], zero=zero)
    usable = [value for value in line if value is not None]
    if not usable:
        assert drawn is None
        return
    (curve,) = drawn.curves
    points = [tuple(map(float, point.split())) for point in re.split("[ML]", curve.path)[1:]]
    assert len(points) == len(usable)
    assert all(TOP - 0.01 <= y <= HEIGHT and LEFT <= x <= WIDTH - RIGHT for x, y in points)


def test_a_long_run_is_thinned_and_keeps_its_last_round() -> None:
    drawn = by_round("Title", "Caption.", [Line("a", [float(t) for t in range(5003)])])
    assert drawn is not None
    places = re.split("[ML]", drawn.curves[0].path)[1:]
    assert len(places) <= 1001
    assert float(places[-1].split()[0]) == WIDTH - RIGHT


# An ε that was measured is shown by `shown` and its kin, which round up. A format in an f-string may round down.

ROOT = Path(__file__).parents[2]


# A figure of a summary, a result or a total with a number of digits; what a user asked for has no such key.
ROUNDED = re.compile(r"""\{[^{}]*\[["']epsilon[a-z_]*["']\]\s*:[^{}]*\}""")


@pytest.mark.parametrize("folder", ["src", "benchmarks", "examples"])
def test_no_figure_of_a_run_is_rounded_to_the_nearest(folder: str) -> None:
    files = [path for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".ipynb")]
    assert files
    found = [f"{path}: {hit}" for path in files for hit in ROUNDED.findall(path.read_text("utf-8").replace('\\"', '"'))]
    assert found == []


def test_what_is_signed_and_the_annex_are_of_the_runs_own_facts(copy: Path) -> None:
    text = page(copy).text
    for words in ("Approval", "Purpose", "Controller", "ε was set by", "For the controller"):
        assert words in text
    path = copy / "dpia.md"
    assert CliRunner().invoke(app, ["report", str(copy), "--dpia"], catch_exceptions=False).exit_code == 0
    annex = path.read_text("utf-8")
    summary = json.loads((copy / "summary.json").read_text("utf-8"))
    for words in ("## 5. Residual risk", "to be filled in by the controller", shown(summary["epsilon"]), "agent-0"):
        assert words in annex
