"""The README's Python runs as it stands, and its commands exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

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
