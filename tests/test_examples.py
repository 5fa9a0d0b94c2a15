"""Each example runs as its README says, in a copy of its folder; the long ones in a short form."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
# ε rounded up, and never without its terms: examples are what others copy.
WHOLE = re.compile(
    r"\(ε = (3\.9\d\d|4\.000), δ = \S+\) for each record of each agent, against .*: add-remove, poisson sampling"
)


def played(name: str, words: list[str], tmp_path: Path) -> str:
    """Standard output of `python words` in a copy of the example."""
    folder = tmp_path / name
    shutil.copytree(
        EXAMPLES / name, folder, ignore=shutil.ignore_patterns("runs", "__pycache__", "*.png", "*.csv", "study.json")
    )
    return on(folder, words)


def on(folder: Path, words: list[str]) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run([sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.slow
def test_tabular(tmp_path: Path) -> None:
    summary = json.loads(
        played("tabular", ["-c", "from fedspa.cli import main; main()", "run", "config.toml", "--json"], tmp_path)
    )
    assert summary["accuracy_last"] > 0.9
    assert summary["epsilon"] <= 2
    assert summary["dimension"] == 62


RUN = ["-c", "from fedspa.cli import main; main()"]


@pytest.mark.slow
def test_an_algorithm_of_ones_own(tmp_path: Path) -> None:
    short = ["--set", "federation.rounds=6", "--set", "privacy.noise=seeded", "--json"]
    sparse = json.loads(played("own-algorithm", [*RUN, "run", "config.toml", *short, "--set", "run.out=a"], tmp_path))
    folder = tmp_path / "own-algorithm"
    whole = json.loads(
        on(folder, [*RUN, "run", "config.toml", *short, "--set", "run.out=b", "--set", "algorithm.options.keep=1.0"])
    )
    assert sparse["algorithm"] == "topk:TOP_K"
    assert sparse["epsilon"] == whole["epsilon"] <= 8
    assert sparse["payload_bytes"] < 0.97 * whole["payload_bytes"]
    assert "topk:TOP_K" in (folder / "a" / "report.html").read_text("utf-8")
    lines = (EXAMPLES / "own-algorithm" / "topk.py").read_text("utf-8").splitlines()
    assert len(lines) <= 60


@pytest.mark.slow
def test_diabetes_in_the_units_of_its_table(tmp_path: Path) -> None:
    played("diabetes", ["table.py"], tmp_path)
    folder = tmp_path / "diabetes"
    checked = on(folder, [*RUN, "data", "check", "diabetes.csv", "--schema", "config.toml", "--json"])
    assert json.loads(checked)["sound"]
    seeded = ["--set", "privacy.noise=seeded", "--set", "run.out=out"]
    summary = json.loads(on(folder, [*RUN, "run", "config.toml", "--json", *seeded]))
    assert summary["task"] == "regression"
    assert summary["epsilon"] <= 2
    assert summary["baseline"] == pytest.approx(76.0, abs=0.1)  # of numbers from 25 to 346
    assert 50 < summary["scores"]["rmse"] < 60
    assert summary["scores"]["r2"] > 0.4
    page = (folder / "out" / "report.html").read_text("utf-8")
    assert "rmse" in page.lower()


@pytest.mark.slow
def test_visits_protect_each_person(tmp_path: Path) -> None:
    played("visits", ["table.py"], tmp_path)
    folder = tmp_path / "visits"
    said = on(folder, [*RUN, "run", "config.toml", "--set", "run.out=out"])
    assert "for each person" in " ".join(said.split())
    summary = json.loads((folder / "out" / "summary.json").read_text("utf-8"))
    assert summary["unit"] == "person"
    assert summary["epsilon"] <= 2
    assert summary["agents"] == 4
    assert summary["accuracy_last"] > 0.7 > 0.6 > summary["baseline"]
    assert "person" in (folder / "out" / "report.html").read_text("utf-8")


@pytest.mark.slow
def test_own_module(tmp_path: Path) -> None:
    out = played("own-module", ["train.py", "--rounds", "2"], tmp_path)
    assert "1372 parameters on the traced engine" in out
    assert WHOLE.search(out)
    assert "(1, 10)" in out


@pytest.mark.slow
def test_batchnorm(tmp_path: Path) -> None:
    out = played("batchnorm", ["train.py", "--rounds", "1"], tmp_path)
    assert out.count("(BatchNorm2d) mixes the examples of a batch") == 3
    assert out.count("became GroupNorm(2, 8)") == 3
    assert WHOLE.search(out)
    assert list((tmp_path / "batchnorm" / "runs").glob("*/report.html"))


@pytest.mark.slow
def test_patients(tmp_path: Path) -> None:
    out = played("patients", ["train.py", "--rounds", "6"], tmp_path)
    assert "6886 visits of 1600 patients, up to 20 of one of them" in out
    assert "δ = 0.0001) for each person of each agent" in out
    assert float(out.partition("accuracy ")[2].partition("%")[0]) > 70
    assert list((tmp_path / "patients" / "runs").glob("*/report.html"))


@pytest.mark.slow
def test_adapters(tmp_path: Path) -> None:
    out = played("adapters", ["train.py", "--rounds", "1", "--pretrain", "20"], tmp_path)
    assert "1408 of 15904 parameters were trained" in out
    assert WHOLE.search(out)
    assert list((tmp_path / "adapters" / "runs").glob("*/report.html"))


@pytest.mark.slow
def test_non_iid_study(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    played("non-iid", ["study.py", "--quick"], tmp_path)
    rows = json.loads((tmp_path / "non-iid" / "study.json").read_text("utf-8"))
    by_method = {
        method: [row["accuracy"] for row in rows if row["method"] == method] for method in {r["method"] for r in rows}
    }
    assert len(by_method) == 3
    assert all(skewed < even for skewed, even in by_method.values())
    assert (tmp_path / "non-iid" / "study.png").stat().st_size > 1000


def test_the_study_of_the_readme_is_the_kept_one() -> None:
    text = (EXAMPLES / "non-iid" / "README.md").read_text("utf-8")
    rows = json.loads((EXAMPLES / "non-iid" / "study.json").read_text("utf-8"))
    ends = {(row["method"], row["alpha"]): row["accuracy"] for row in rows}
    methods = list(dict.fromkeys(row["method"] for row in rows))
    assert len(methods) == 3
    for method in methods:
        assert f"{ends[method, 100.0]:.1f} to {ends[method, 0.03]:.1f} %" in text
    lost = [ends[method, 100.0] - ends[method, 0.03] for method in methods]
    assert f"{lost[1]:.0f} points against {lost[0]:.0f}" in text


@pytest.mark.slow
def test_the_notebook_executes(tmp_path: Path) -> None:
    """Its cells are plain Python, so one program is what a kernel would run."""
    pytest.importorskip("matplotlib")
    notebook = json.loads((EXAMPLES / "tradeoff" / "tradeoff.ipynb").read_text("utf-8"))
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    program = "\n\n".join(["import matplotlib; matplotlib.use('agg')", *cells])
    out = played("tradeoff", ["-c", program], tmp_path)
    kept = [
        "".join(output["text"])
        for cell in notebook["cells"]
        for output in cell.get("outputs", [])
        if output["output_type"] == "stream"
    ]
    # The settings of each line are the same everywhere; accuracies depend on the CPU's last bits.
    assert [line[:10] for line in out.splitlines()] == [line[:10] for text in kept for line in text.splitlines()]
