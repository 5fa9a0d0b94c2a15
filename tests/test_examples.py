"""Each example runs as its README says, in a copy of its folder; the long ones in a short form."""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fedspa.algorithms import Agent, Terms
from fedspa.engine.per_example import PerExampleEngine
from fedspa.mechanisms.gaussian.plan import GaussianPlan

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
    prox = ["algorithm.name=fedprox:FED_PROX", "algorithm.compression=1.0", "run.out=c"]
    found = {}
    for mu in (0.0, 5.0):  # at 5 each step begins anew at half the way
        sets = [word for each in (*prox, f"algorithm.options={{mu = {mu}}}") for word in ("--set", each)]
        found[mu] = json.loads(on(folder, [*RUN, "run", "config.toml", *short, *sets]))
        shutil.rmtree(folder / "c")
    assert found[0.0]["epsilon"] == found[5.0]["epsilon"] == sparse["epsilon"]  # the events are Fed-SPA's
    assert found[0.0]["score_last"] != found[5.0]["score_last"]
    for name in ("topk.py", "fedprox.py"):
        lines = (EXAMPLES / "own-algorithm" / name).read_text("utf-8").splitlines()
        assert len(lines) <= 60
        imported = [line for line in lines if line.startswith(("from fedspa", "import fedspa"))]
        assert [line.partition(" import ")[0] for line in imported] == ["from fedspa.algorithms"]


def test_a_pull_of_zero_adds_up_the_steps_and_a_full_one_keeps_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step has noise of its own: the sum over τ steps of pure noise is √τ times that of one."""
    monkeypatch.syspath_prepend(str(EXAMPLES / "own-algorithm"))
    fedprox = importlib.import_module("fedprox")
    plan = GaussianPlan(400, 400, "l2", 1.0, "poisson", 8, 16, 9, 1, 1.0, "add-remove", 1e-3)
    engine = PerExampleEngine(torch.nn.Linear(199, 2))
    for mu, steps in ((0.0, 9), (10.0, 1)):
        terms = Terms(0, "shared", b"m" * 16, 0.1, plan, options={"mu": mu})
        agent = Agent(0, torch.zeros(16, 199), torch.zeros(16, dtype=torch.int64), b"m" * 16, b"k" * 32)
        [update] = fedprox.respond(torch.zeros(400), terms, [agent], engine)
        assert float(update.values[:-2].std()) == pytest.approx(0.1 * plan.sigma * steps**0.5, rel=0.2)


@pytest.mark.long
def test_diabetes_in_the_units_of_its_table(tmp_path: Path) -> None:
    played("diabetes", ["table.py"], tmp_path)
    folder = tmp_path / "diabetes"
    checked = on(folder, [*RUN, "data", "check", "diabetes.csv", "--schema", "config.toml", "--json"])
    assert json.loads(checked)["valid"]
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
def test_hospital_tables_from_five_files_to_a_page_that_is_signed(tmp_path: Path) -> None:
    played("hospital-tables", ["make_tables.py"], tmp_path)
    folder = tmp_path / "hospital-tables"
    for table in sorted((folder / "sites").glob("*.csv")):
        assert json.loads(on(folder, [*RUN, "data", "check", str(table), "--schema", "config.toml", "--json"]))["valid"]
    numbers = ["--epsilon", "0.5", "--out", "runs/numbers", "--write-config", "standardised.toml", "--json"]
    found = json.loads(on(folder, [*RUN, "stats", "config.toml", *numbers]))
    assert {each["site"] for each in found["estimates"]} == {"", "aachen", "bergen", "ghent", "porto", "turku"}
    summary = json.loads(on(folder, [*RUN, "tune", "standardised.toml", "--out", "runs/trained", "--json"]))
    pooled = float(on(folder, ["pooled.py"]).split()[1])
    assert summary["score"] == "auc"
    assert summary["score_last"] > pooled - 0.03
    assert summary["epsilon"] <= 3
    scores = ["evaluate", "runs/trained", "--epsilon", "0.5", "--out", "runs/scores", "--json"]
    assert {each["statistic"] for each in json.loads(on(folder, [*RUN, *scores]))["estimates"]} >= {"auc", "accuracy"}
    on(folder, [*RUN, "report", "runs/trained"])
    page = (folder / "runs/trained/report.html").read_text("utf-8")
    assert "with 2 other runs in the ledger" in page
    assert "For the controller" in page
    on(folder, [*RUN, "report", "runs/trained", "--dpia"])
    assert "aachen, bergen, ghent, porto, turku" in (folder / "runs/trained/dpia.md").read_text("utf-8")
    total = json.loads((folder / "runs/scores/summary.json").read_text("utf-8"))["epsilon_total"]
    assert 3 < total <= 4


@pytest.mark.slow
def test_a_consortium_from_statistics_to_a_report(tmp_path: Path) -> None:
    shutil.copytree(EXAMPLES / "hospital-tables", tmp_path / "hospital-tables", ignore=shutil.ignore_patterns("runs"))
    said = played("consortium", ["study.py", "--short"], tmp_path)
    assert [line.split()[:2] for line in said.splitlines()[1:4]] == [["mean", "age"]] * 3
    assert 3 < float(re.findall(r"ε +([0-9.]+) for each patient", said)[0]) < 4.5
    folder = tmp_path / "consortium"
    assert "entries 1 to 3 of" in (folder / "schema.toml").read_text("utf-8")
    page = (folder / "runs/trained/report.html").read_text("utf-8")
    for words in ("with 2 other runs in the ledger", "AUC at the agents", "Settings that nobody named", "bergen"):
        assert words in page


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
def test_finetune(tmp_path: Path) -> None:
    out = played("finetune", ["finetune.py", "--rounds", "2"], tmp_path)
    assert re.search(r"\(ε = (7\.9\d\d|8\.000), δ = 1e-05\) for each record of each agent", out)
    assert float(out.partition("accuracy ")[2].partition("%")[0]) > 70  # by the words that its body knows
    folder = tmp_path / "finetune"
    written = {path.name for path in (folder / "adapter").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json", "README.md"} <= written
    assert list((folder / "runs").glob("*/report.html"))
    load = "import peft; peft.AutoPeftModelForSequenceClassification.from_pretrained('adapter')"
    on(folder, ["-c", load])  # as its last line says
    summary = json.loads(on(folder, [*RUN, "run", "config.toml", "--set", "federation.rounds=1", "--json"]))
    assert summary["agent_names"] == [f"site-{number:02}" for number in range(10)]
    assert summary["epsilon"] <= 8


@pytest.mark.long
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


@pytest.mark.long
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
