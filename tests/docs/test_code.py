"""The Python of the guides runs as it stands and does what the text beside it says."""

from __future__ import annotations

import re
import runpy
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pages import blocks, section, titled, write_files
from typer.testing import CliRunner

import fedspa
from fedspa.agent.policy import Policy
from fedspa.cli import app
from fedspa.data.columns import load_schema
from fedspa.flower.settings import read_config
from fedspa.learning.flat import FlatModel
from fedspa.learning.options import OPTIONS
from fedspa.learning.tasks.named import NAMES
from fedspa.runs.config import load

Printed = Callable[[str], list[float]]
API = section("api.md")
TASKS = section("models.md", "Tasks")
FINE_TUNING = blocks(section("fine-tuning.md"), "python")
DATA = section("data.md")
PERSONS = section("privacy.md", "Person-level privacy")
FROM_OPACUS, FROM_FLOWER = (section("guard.md", f"Coming from {name}") for name in ("Opacus", "Flower"))


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_every_public_name_is_in_the_python_reference() -> None:
    assert sorted(re.findall(r"^::: fedspa\.(\w+)$", API, flags=re.M)) == sorted(fedspa.__all__)


def test_the_python_reference(capsys: pytest.CaptureFixture[str]) -> None:
    [code] = blocks(API, "python")
    exec(code, {})
    first, guarantee, card = capsys.readouterr().out.splitlines()
    assert first.startswith("<RunResult: accuracy ")
    assert guarantee.startswith(" guarantee: (ε = 2.000, δ = 0.001) for each record of each agent, against the server")
    assert card == "# Model card: "


def test_a_model_is_checked_fixed_and_used(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    check, after = blocks(section("models.md").partition("\n## Tasks\n")[0], "python")
    names: dict[str, Any] = {}
    with caplog.at_level("INFO", "fedspa"):
        exec(check, names)
    (found,), (changed,) = capsys.readouterr().out.splitlines(), caplog.messages
    assert found.startswith("the module's layer '1' (BatchNorm2d) mixes the examples of a batch")
    assert changed.startswith("1: BatchNorm2d(16) became GroupNorm(4, 16)")
    exec(after, names)
    assert torch.equal(names["module"][1].weight, names["result"].module[1].weight)
    assert names["again"].summary == names["result"].summary


def test_every_task_and_option_is_listed() -> None:
    assert re.findall(r"^\| `([\w-]+)` \|", TASKS, flags=re.M) == list(NAMES)
    for option in {option for options in OPTIONS.values() for option in options.model_fields}:
        assert f"`{option}`" in TASKS or f'"{option}"' in TASKS, option


def test_the_tasks(capsys: pytest.CaptureFixture[str]) -> None:
    exec("".join(blocks(TASKS, "python")), {})
    first, second, third = capsys.readouterr().out.splitlines()
    score, baseline = (float(number) for number in re.findall(r"\d+\.\d+", first))
    assert first.startswith("rmse ")
    assert score < baseline
    assert "perplexity" in second
    assert "top_3" in third


def test_a_frozen_backbone_runs_once(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    exec(FINE_TUNING[0], names)
    assert "native because the fastest that can run this model here; the frozen body" in capsys.readouterr().out
    assert names["result"].module is names["module"]


def test_lora_with_one_factor_frozen() -> None:
    pytest.importorskip("peft", reason="peft is not installed: pip install fedspa[dev]")
    names: dict[str, Any] = {}
    exec(FINE_TUNING[1], names)
    trained = [name for name, parameter in names["module"].named_parameters() if parameter.requires_grad]
    assert sum("lora_B" in name for name in trained) == 2
    assert not any("lora_A" in name for name in trained)
    assert FlatModel(names["module"]).dimension == 2 * 4 * 32 + 32 * 3 + 3


def test_person_level_privacy() -> None:
    (example,) = blocks(PERSONS, "python")
    exec(compile(example, "privacy.md", "exec"), {})
    config, policy = blocks(PERSONS, "toml")
    assert load({**tomllib.loads(config), "privacy": {"epsilon": 1.0}}).data.person == "patient"
    (every_limit,) = blocks(section("ledger.md"), "toml")
    assert Policy.parse(every_limit + policy).unit == "person"


def test_a_table_is_checked_by_its_schema(tmp_path: Path) -> None:
    files = write_files(DATA, tmp_path)
    (command,) = blocks(DATA, "sh")
    ended = CliRunner().invoke(app, command.split()[1:])
    assert ended.exit_code == 0
    assert ended.output == files["printed"]
    config = load(tmp_path / "run.toml")
    assert config.task.name == "regression"
    assert config.data.schema_of_table == load_schema(tmp_path / "schema.toml")


def test_data_in_python(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_files(DATA, tmp_path)
    exec("\n".join(blocks(DATA, "python")), {})
    assert capsys.readouterr().out.splitlines() == [
        "torch.Size([6, 6]) [0 0 0 1 1 2] [0 0 1 2 3 4]",
        "(200.0,) (200.0,)",
        "torch.Size([50, 8]) 20 labels",
        "torch.float32",
    ]


@pytest.fixture
def printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Printed:
    """The numbers that a script of `tmp_path` prints, run in this process, which has imported torch already."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def run(name: str) -> list[float]:
        with torch.random.fork_rng(devices=[]):
            runpy.run_path(name)
        return [float(number) for number in capsys.readouterr().out.split()]

    return run


def test_opacus_and_fedspa_agree(tmp_path: Path, printed: Printed) -> None:
    pytest.importorskip("opacus")
    write_files(FROM_OPACUS, tmp_path)
    theirs, ours = (printed(f"with_{name}.py") for name in ("opacus", "fedspa"))
    del sys.modules["records"]
    assert min(theirs[0], ours[0]) > 0.85
    assert ours[1:] == pytest.approx(theirs[1:], rel=0.03)
    assert max(theirs[1], ours[1]) <= 2.0


def test_partitions_of_flower_train(tmp_path: Path, printed: Printed) -> None:
    write_files(FROM_FLOWER, tmp_path)
    accuracy, epsilon = printed("simulate.py")
    del sys.modules["task"]
    assert accuracy > 0.8
    assert epsilon <= 4


def test_the_run_config_of_the_flower_app() -> None:
    flower = tomllib.loads(titled(FROM_FLOWER)["pyproject.toml"])["tool"]["flwr"]["app"]
    flat = {f"{section}.{key}": value for section, keys in flower["config"].items() for key, value in keys.items()}
    config, settings = read_config(flat)
    assert (config.federation.rounds, config.privacy.epsilon, settings.records) == (20, 4.0, 300)
    for component in flower["components"].values():
        module, _, name = component.partition(":")
        assert hasattr(__import__(module, fromlist=[name]), name)


def test_the_script_for_trackers_reads_a_run(tmp_path: Path) -> None:
    names: dict[str, Any] = {"__name__": "track"}
    exec(titled(section("audit.md", "Trackers"))["track.py"], names)
    for noise in ("secure", "seeded"):
        result = fedspa.run({"federation": {"rounds": 2}, "privacy": {"epsilon": 2.0, "noise": noise}}, progress=False)
        found = list(names["figures"](result.folder))
        assert [step for step, name, _ in found if name == "accuracy"] == [1, 2]
        assert {name for _, name, _ in found if "epsilon" in name} == {
            "epsilon" if noise == "secure" else "epsilon_not_private"
        }
