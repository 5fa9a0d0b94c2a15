"""The examples of the guard run as their READMEs say, and its page's Python as it stands."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fedspa.agent.ledger.report import verify

ROOT = Path(__file__).parents[2]


def run_example(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "FLWR_TELEMETRY_ENABLED": "0"}
    return subprocess.run([sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True)


def copied(name: str, tmp_path: Path) -> Path:
    return Path(shutil.copytree(ROOT / "examples" / name, tmp_path / name, ignore=shutil.ignore_patterns("*.sqlite*")))


def test_a_stock_opacus_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process: it takes seconds to load Opacus."""
    pytest.importorskip("opacus")
    monkeypatch.chdir(tmp_path)
    folder = ROOT / "examples" / "guard-opacus"

    def run(*words: str) -> str:
        monkeypatch.setattr(sys, "argv", ["train.py", *words])
        runpy.run_path(str(folder / "train.py"), run_name="__main__")
        return capsys.readouterr().out

    totals = []
    for _ in range(2):
        said = run()
        assert "epoch 5: accuracy" in said
        assert "THE NOISE WAS SEEDED" in said
        totals += re.findall(r"ε = ([\d.]+) of 2.5 spent", said)
    once, twice = (f"{float(total):.2f}" for total in totals)
    page = " ".join((folder / "README.md").read_text("utf-8").split())
    assert f"five epochs cost ε = {once}, ten in two runs {twice}" in page
    with pytest.raises(SystemExit, match="refused: agent 'digits' has ε = "):
        run()
    assert "epoch 1" not in capsys.readouterr().out
    assert "epoch 5" in run("--noise", "5")
    assert verify("ledger.sqlite") == []


@pytest.mark.slow
def test_a_stock_flower_app(tmp_path: Path) -> None:
    pytest.importorskip("flwr")
    folder = copied("guard-flower", tmp_path)
    run = run_example(folder, "play.py")
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    assert lines.count("north train: answered") == lines.count("south train: answered") == 5
    assert lines.count("west train: answered") == 2
    assert sum(line.startswith("west train: fedspa (budget): this site's privacy budget") for line in lines) == 3
    assert not any("evaluate: answered" in line for line in lines)
    weights = re.search(r"weights \[ *([-\d.]+) +([-\d.]+) ", run.stdout)
    assert float(weights[1]) > 0.2 > -0.6 > float(weights[2])  # of 1 and −2
    assert re.search(r"agent 'west': ε = (\S+) of 1.1 spent in 2 entries", run.stdout)
    for name in ("north", "south", "west"):
        assert verify(folder / f"{name}.sqlite") == []


def test_the_page_runs_as_it_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    block, *_ = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "guard.md").read_text("utf-8"), flags=re.S)
    trained: list[bool] = []
    exec(block, {"train": lambda: trained.append(True)})
    assert trained == [True]
    assert verify("ledger.sqlite") == []
