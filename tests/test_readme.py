"""The README's Python runs as it stands, and its commands exist."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text("utf-8")


def test_its_python_runs(tmp_path: Path) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", README, flags=re.S)
    result = subprocess.run([sys.executable, "-c", block], cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    accuracy, epsilon, folder = result.stdout.split()
    assert float(accuracy) > 0.7
    assert float(epsilon) <= 4
    assert (tmp_path / folder / "summary.json").exists()


def test_its_links_lead_somewhere() -> None:
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", README) if "://" not in link]
    assert links
    for link in links:
        assert (ROOT / link).exists(), link


def test_its_commands_exist() -> None:
    from typer.main import get_command

    from fedspa.cli import app

    known = set(get_command(app).commands)  # type: ignore[attr-defined]
    assert set(re.findall(r"fedspa (run|privacy|audit|ledger|\w+) (?:\[|show|\.\.\.)", README)) <= known


def test_its_privacy_table_is_what_the_command_prints() -> None:
    from fedspa.mechanisms.gaussian.compare import rows

    table = rows(batch=10, records=600, local_steps=300, participations=5, delta=1e-3, epsilon=1.0)
    for row in table:
        line = rf"{row.method} +{row.sampling} +{row.neighbours} +{row.accountant} +{row.noise:.4g} +{row.epsilon:.4g} "
        assert re.search(line, README), line


def test_its_results_are_the_kept_ones() -> None:
    rows = _kept("table-mnist")["rows"]
    private = [row for row in rows if row["algorithm"] in ("fedspa", "dp-fed")]
    reached = [row["published"]["accuracy_best"]["mean"] for row in private]
    assert f"[we measure {min(reached):.0f} to {max(reached):.0f} %]" in README
    (dense,) = (row["published"]["payload_bytes"] for row in rows if row["algorithm"] == "fedavg")
    assert f"upload of the paper's CNN is {dense:,.0f} bytes" in README


def test_its_times_on_a_gpu_are_the_kept_ones() -> None:
    jobs = {job["job"]: job["ms"] for job in _kept("engine-gpu")["jobs"]}
    text = " ".join(README.split())
    mnist, cifar = jobs["MNIST p=.05 coordinate"], jobs["CIFAR p=.1 coordinate"]
    ours, plain = ([job[name]["median"] for job in (mnist, cifar)] for name in ("stacked", "plain SGD, agents in turn"))
    assert f"takes {ours[0]:.2g} ms on the MNIST CNN and {ours[1]:.2g} ms on the CIFAR CNN" in text
    assert f"agents in turn, takes {plain[0]:.2g} and {plain[1]:.2g}." in text


def test_the_engine_page_tells_the_second_run() -> None:
    cases = json.loads((ROOT / "benchmarks" / "results" / "engine-again.json").read_text("utf-8"))["cases"]
    (wall, cpu), (cifar, cifar_cpu) = (
        [_median(cases[case]["ratios"][time]["best Opacus / native"]) for time in ("wall", "cpu")]
        for case in ("mnist-p05", "cifar-p10")
    )
    assert (
        f"gave {wall:.1f} by wall and {cpu:.1f} by CPU time (MNIST, p = .05) "
        f"and {cifar:.1f} and {cifar_cpu:.1f} (CIFAR)"
    ) in " ".join((ROOT / "docs" / "engine.md").read_text("utf-8").split())


def test_a_private_cifar_step_takes_less_than_twice_a_plain_ones_memory() -> None:
    for name in ("engine", "engine-again"):
        kept = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text("utf-8"))
        peak = {who: row["peak_mib"] for who, row in kept["cases"]["cifar-p10"]["contenders"].items()}
        for engine in ("native", "generic"):
            assert max(peak[engine], peak[f"{engine}-l2"]) < 2 * peak[f"{engine}-plain-sgd"]
    assert "less than twice the memory of the same engine's plain step" in " ".join(
        (ROOT / "docs" / "engine.md").read_text("utf-8").split()
    )


def _median(ratio: Any) -> float:
    return float(ratio["median"] if isinstance(ratio, dict) else ratio)


def test_its_times_on_a_cpu_are_the_kept_ones() -> None:
    cases = json.loads((ROOT / "benchmarks" / "results" / "engine.json").read_text("utf-8"))["cases"]
    opacus, plain = (
        [cases[case]["ratios"]["wall"][f"best {rival} / native"]["median"] for case in ("mnist-p05", "cifar-p10")]
        for rival in ("Opacus", "plain SGD")
    )
    assert (
        f"on the paper's MNIST CNN {opacus[0]:.2g} times as fast as Opacus's fastest mode and {plain[0]:.2g} times as "
        f"fast as plain *non-private* PyTorch, on its CIFAR CNN {opacus[1]:.2g} and {plain[1]:.2g} times."
    ) in " ".join(README.split())


def _kept(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / "experiments" / "results" / f"{name}.json").read_text("utf-8"))
    return found
