"""The model card says what the report says, and says first that nothing is private where nothing is."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from small_runs import ALGORITHMS, small
from typer.testing import CliRunner

import fedspa
from fedspa.cli import app
from fedspa.report import card
from fedspa.report.parts import describe
from fedspa.report.record import read

SECURE = {"privacy": {"noise_multiplier": 2.0, "clip_value": 0.3, "noise": "secure"}}
RUNS = {"private": SECURE, "seeded": {}, "fedavg": ALGORITHMS["fedavg"], "cpsgd": ALGORITHMS["cpsgd"]}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("cards")
    for name, sections in RUNS.items():
        fedspa.run(small(root / name, **sections))
    return {name: root / name for name in RUNS}


def plain(text: str) -> str:
    """Markdown without its escapes."""
    return re.sub(r"\\([\\`<|\[\]])", r"\1", text)


@pytest.mark.parametrize("name", RUNS)
def test_every_word_of_the_report_on_the_guarantee_is_in_it(runs: dict[str, Path], name: str) -> None:
    text = plain(card(runs[name]))
    stated = describe(read(runs[name]))
    for head, sentences in stated.statement:
        assert f"**{head}** {sentences}\n".replace("\u00a0", " ") in text
    for each in stated.cards:
        assert each.label in text
        assert each.value in text
        assert each.detail.replace("\u00a0", " ") in text
    for row in [*stated.plan, *stated.trained]:
        assert f"| {' | '.join(row)} |" in text
    for note in stated.warnings:
        assert f"- {note}\n" in text
    for section, values in stated.config:
        for key, value in values:
            assert f"| {section}.{key} | {value} |" in text


@pytest.mark.parametrize("name", RUNS)
def test_what_is_not_private_is_said_first(runs: dict[str, Path], name: str) -> None:
    first = card(runs[name]).splitlines()[2]
    assert first.startswith("> **NOT PRIVATE.** ") == (name != "private")
    if name == "private":
        summary = json.loads((runs[name] / "summary.json").read_text("utf-8"))
        assert first.startswith("**Guarantee for each record: ε")
        assert f"{summary['delta']:g}" in first
    if name == "seeded":
        assert "THE NOISE WAS SEEDED: nothing is private" in first


def test_names_are_no_markup(tmp_path: Path) -> None:
    folder = tmp_path / "<img src=x onerror=alert(1)>[a](b)|`"
    fedspa.run(small(folder))
    text = card(folder)
    title = text.splitlines()[0]
    assert title == r"# Model card: \<img src=x onerror=alert(1)>\[a\](b)\|\`"
    assert not re.search(r"(?<!\\)<", text)


def test_the_command_writes_it(runs: dict[str, Path], tmp_path: Path) -> None:
    run, out = str(runs["private"]), tmp_path / "card.md"
    for _ in range(2):  # a card is written again
        assert CliRunner().invoke(app, ["report", run, "--card", "--out", str(out)]).output == f"{out}\n"
        assert out.read_text("utf-8") == card(runs["private"]) == fedspa.RunResult.load(run).card()
