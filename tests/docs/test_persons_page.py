"""docs/persons.md does what it says."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from fedspa.agent.policy import Policy
from fedspa.runs.config import load

PAGE = (Path(__file__).parents[2] / "docs" / "persons.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def test_its_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (example,) = blocks("python")
    exec(compile(example, "persons.md", "exec"), {})


def test_its_config_and_its_policy_are_such() -> None:
    config, policy = blocks("toml")
    assert load({**tomllib.loads(config), "privacy": {"epsilon": 1.0}}).data.person == "patient"
    limits = (Path(__file__).parents[2] / "docs" / "ledger.md").read_text(encoding="utf-8")
    (every,) = re.findall(r"```toml\n(.*?)```", limits, re.DOTALL)
    assert Policy.parse(every + policy).unit == "person"
