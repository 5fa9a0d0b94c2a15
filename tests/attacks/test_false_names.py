"""The attack: publish a run of `fedspa.run(config, data=…, module=…)` under names that it did not train.

config.toml and the report used to say `data.name = "digits"` and `model.name = "logistic"`, above the line where a
reviewer signs. `--resume` failed with a riddle, and `fedspa audit --config` audited the mechanism of another model.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import fedspa
from fedspa.cli import app
from fedspa.errors import FedspaError
from fedspa.running import run as simulate
from fedspa.runs.config import load
from fedspa.runs.rundir import Stopped

SMALL: dict[str, dict[str, Any]] = {
    "federation": {"agents": 4, "rounds": 3, "per_round": 2},
    "algorithm": {"compression": 0.5, "local_steps": 2, "batch": 10},
    "privacy": {"noise_multiplier": 2.0, "noise": "seeded"},
    "run": {"engine": "generic", "threads": 1},
}


def config(out: Path) -> dict[str, Any]:
    return SMALL | {"run": SMALL["run"] | {"out": str(out)}}


def ours(name: str = "ward 7") -> fedspa.Dataset:
    chance = torch.Generator().manual_seed(0)
    x, y = torch.randn(200, 1, 8, 8, generator=chance), torch.arange(200) % 10  # the digits' shape and classes
    return fedspa.from_arrays(x[:160], y[:160], x[160:], y[160:], name=name)


class Dense(nn.Sequential):
    pass


def dense() -> nn.Module:
    return Dense(nn.Flatten(), nn.Linear(64, 10))


GIVEN = [
    ({"data": ours()}, {"data": "given:ward 7", "model": "logistic"}),
    ({"module": dense()}, {"data": "digits", "model": "given:Dense"}),
    ({"data": ours(), "module": dense()}, {"data": "given:ward 7", "model": "given:Dense"}),
    ({"data": ours("digits")}, {"data": "given:digits", "model": "logistic"}),
    ({"data": ours("ours.npz")}, {"data": "given:ours.npz", "model": "logistic"}),
]


@pytest.mark.parametrize(("given", "names"), GIVEN, ids=[" ".join(names.values()) for _, names in GIVEN])
def test_every_file_says_what_was_trained(tmp_path: Path, given: dict[str, Any], names: dict[str, str]) -> None:
    result = fedspa.run(config(tmp_path / "run"), **given)
    written = load(tmp_path / "run" / "config.toml")
    assert {"data": written.data.name, "model": written.model.name} == names
    told = json.loads((tmp_path / "run" / "summary.json").read_text())["provenance"]
    assert told == result.summary["provenance"]
    assert {key: told[key] for key in names} == names
    kind = type(result.module)
    assert told["class of the module"] == f"{kind.__module__}.{kind.__qualname__}"
    assert (told["number of parameters"], told["shape of a record"]) == (650, "(1, 8, 8) float32")
    assert told["fedspa version"] == fedspa.__version__
    assert told["torch version"] == torch.__version__
    page = (tmp_path / "run" / "report.html").read_text("utf-8")
    subtitle = re.search(r'<p class="subtitle">(.*?)</p>', page)
    assert f"on {names['data']}, model {names['model']}, 650 parameters" in subtitle[1]
    for value in (*names.values(), told["digest of the module"], told["class of the module"]):
        assert value in page[: page.index('<section class="approval"')]


def test_a_run_by_names_keeps_them(tmp_path: Path) -> None:
    summary = fedspa.run(config(tmp_path / "run")).summary
    assert (summary["provenance"]["data"], summary["provenance"]["model"]) == ("digits", "logistic")


@pytest.mark.parametrize(("given", "names"), GIVEN, ids=[" ".join(names.values()) for _, names in GIVEN])
def test_no_command_takes_it_for_something_else(
    tmp_path: Path, given: dict[str, Any], names: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = ", ".join(f"{key}=…" for key in given)
    words = f"fedspa.run(resume='run', {arguments})"
    with pytest.raises(Stopped) as stopped:
        simulate(config(Path("run")), **given, stop=lambda: True)
    assert str(stopped.value).endswith(f"to resume: {words}")
    commands = (
        (["run", "--resume", "run"], words),
        (["run", "run/config.toml", "--out", "second"], "says that a run got its"),
        (["audit", "--config", "run/config.toml", "--draws", "100"], "from Python" if "data" in given else "in Python"),
    )
    for command, line in commands:
        ended = CliRunner().invoke(app, command)
        assert isinstance(ended.exception, FedspaError), command  # what `main` prints as one line
        assert line in str(ended.exception)
        assert "\n" not in str(ended.exception)
    assert os.listdir() == ["run"]
    assert simulate(resume="run", **given).summary["rounds"] == 3


def test_records_given_to_a_run_that_named_its_own(tmp_path: Path) -> None:
    with pytest.raises(Stopped):
        simulate(config(tmp_path / "run"), stop=lambda: True)
    with pytest.raises(FedspaError, match=r"data\.name was 'digits' and is 'given:digits'"):
        simulate(resume=tmp_path / "run", data=ours("digits"))
