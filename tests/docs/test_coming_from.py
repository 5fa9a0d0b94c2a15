"""The pages for those who come from Opacus and from Flower: their code runs, and their names exist."""

from __future__ import annotations

import re
import runpy
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fedspa.flower.settings import read_config
from fedspa.runs.config import Config

Printed = Callable[[str], list[float]]
DOCS = Path(__file__).parents[2] / "docs"
TITLED = re.compile(r"^```\w+ title=\"([^\"]+)\"\n(.*?)^```$", flags=re.M | re.S)


def files(page: str, folder: Path) -> dict[str, str]:
    found = dict(TITLED.findall((DOCS / page).read_text("utf-8")))
    for name, text in found.items():
        (folder / name).write_text(text, "utf-8")
    return found


@pytest.fixture
def printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Printed:
    """The numbers that a script of `tmp_path` prints, run there and in this process, which has torch at hand."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))

    def run(script: str) -> list[float]:
        with torch.random.fork_rng(devices=[]):
            runpy.run_path(script)
        return [float(number) for number in capsys.readouterr().out.split()]

    return run


def test_opacus_and_fedspa_agree(tmp_path: Path, printed: Printed) -> None:
    pytest.importorskip("opacus")
    files("from-opacus.md", tmp_path)
    theirs, ours = (printed(f"with_{name}.py") for name in ("opacus", "fedspa"))
    del sys.modules["records"]
    assert min(theirs[0], ours[0]) > 0.85
    assert ours[1:] == pytest.approx(theirs[1:], rel=0.03)
    assert max(theirs[1], ours[1]) <= 2.0


def test_partitions_train(tmp_path: Path, printed: Printed) -> None:
    files("from-flower.md", tmp_path)
    accuracy, epsilon = printed("simulate.py")
    del sys.modules["task"]
    assert accuracy > 0.8
    assert epsilon <= 4


def test_the_run_config_is_one(tmp_path: Path) -> None:
    app = tomllib.loads(files("from-flower.md", tmp_path)["pyproject.toml"])["tool"]["flwr"]["app"]
    flat = {f"{section}.{key}": value for section, keys in app["config"].items() for key, value in keys.items()}
    config, settings = read_config(flat)
    assert (config.federation.rounds, config.privacy.epsilon, settings.records) == (20, 4.0, 300)
    for component in app["components"].values():
        module, _, name = component.partition(":")
        assert hasattr(__import__(module, fromlist=[name]), name)


@pytest.mark.parametrize("page", ["from-opacus.md", "from-flower.md"])
def test_every_key_that_a_table_names_exists(page: str) -> None:
    known = {f"{section}.{key}" for section, of in Config.model_fields.items() for key in of.annotation.model_fields}  # type: ignore[union-attr]
    rows = re.findall(r"^\|.*\|(.*)\|$", (DOCS / page).read_text("utf-8"), flags=re.M)
    named = re.findall(r"`((?:federation|algorithm|privacy)\.\w+)", " ".join(rows))
    assert len(named) >= 5
    assert set(named) <= known
