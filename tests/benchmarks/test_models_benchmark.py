"""The benchmark of models that people bring runs, skips who cannot, and its rivals take the steps that are timed."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import models
from brought.rows import ROWS, built_in
from fedspa.learning.models import build
from local_step import ready, rivals
from local_step.cases import LEARNING_RATE, Case, own_engine
from local_step.mechanism import Mechanism, trained
from local_step.ours import Ours
from local_step.processes import Refused, Worker, a_process_a_core

SMALL = Case("small", built_in("mnist-cnn", 6_840, (1, 16, 16), "small"), batch=4, records=20, compression=0.1)
FEW = ["auto-l2", "native-l2", "generic-l2", "auto-plain-sgd", "vmap-l2", "sgd"]


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmarks/models.py", *map(str, arguments)])
    models.main()


def test_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "models.json"
    run(monkeypatch, "--quick", "--rows", "mnist-cnn", "--cores", 1, "--contenders", ",".join(FEW), "--out", out)
    row = json.loads(out.read_text("utf-8"))["rows"]["mnist-cnn"]
    assert row["dimension"] == 21_840
    auto = f"{row['contenders']['auto-l2']['engine']}-l2"
    assert row["skipped"] == {auto: "it is what auto takes"}
    assert list(row["contenders"]) == [name for name in FEW if name != auto]
    for each in row["contenders"].values():
        assert 0 < each["lowest_ms"] <= each["median_ms"] <= each["highest_ms"]
        assert each["steps"] == 1
        assert each["peak_mib"] >= 0
    assert row["ratios"]["wall"].keys() == row["ratios"]["cpu"].keys() >= {"SGD / ours", "ours / our plain step"}
    assert "it is what auto takes" in capsys.readouterr().out


@pytest.mark.long
def test_every_contender_runs_on_a_frozen_body() -> None:
    row = models.measure(ROWS["adapters"], models.CONTENDERS, "cpu", agents=1, cores=1, repeats=1, steps=1)
    assert row["contenders"].keys() | row["skipped"].keys() == set(models.CONTENDERS)
    assert {"auto-l2", "auto-plain-sgd", "vmap-l2", "sgd"} <= row["contenders"].keys()


def test_an_engine_that_cannot_is_skipped_with_its_reason() -> None:
    with pytest.raises(Refused, match=r"^ConfigError: run.engine = 'native' is not possible here"):
        ready.ready("native-l2", Case("", ROWS["adapters"], 4, 20, 0.1), 1, [], 1, 1)


def test_a_worker_tells_why_it_cannot_and_goes_on() -> None:
    worker = Worker(SMALL, 0)
    try:
        # By name where Opacus is there, else for want of it.
        with pytest.raises(Refused, match=r"^\w+Error: .*(unheard|opacus)"):
            a_process_a_core([worker, worker], "opacus-unheard-l2", 1)()
        _, steps = a_process_a_core([worker], "sgd", 2)()
    finally:
        worker.close()
    assert steps == 2


def test_every_engine_but_the_reference_is_a_contender() -> None:
    assert {own_engine(name) for name in models.ENGINES} >= {"native", "stacked", "generic"}
    assert own_engine("opacus-hooks-l2") is own_engine("sgd") is None
    assert own_engine("auto-plain-sgd") == "auto"


def test_ours_takes_the_steps_it_is_asked_for() -> None:
    ours = Ours("generic-l2", SMALL, agents=3, threads=1)
    assert ours(2) == 6
    assert ours.engine.name == "generic"


@pytest.mark.parametrize(
    ("once", "several", "steps"), [(2.0, 0.0, 1), (0.2, 0.0, 2), (0.01, 0.08, 50), (1e-6, 1e-6, 300)]
)
def test_steps_fill_a_turn(once: float, several: float, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ready, "seconds", lambda turn: several)
    assert ready.fitting(lambda: (0.0, 8), 8, once) == steps


def half_frozen() -> nn.Module:
    net = build("mnist-cnn", (1, 16, 16), 10, 0)
    for layer in list(net.children())[:3]:
        layer.requires_grad_(False)
    return net


def stepped(net: nn.Module, step: Callable[[nn.Module, rivals.Batch, Mechanism], rivals.Step]) -> list[Tensor]:
    """All parameters after a step with a batch and noise that are the same for everyone; no mask."""
    batch = torch.randn(5, 1, 16, 16, generator=torch.Generator().manual_seed(1)), torch.arange(5)
    mechanism = Mechanism(net, None, "l2", 1.0, 0.1, LEARNING_RATE, torch.Generator().manual_seed(2))
    assert step(net, lambda: batch, mechanism)() == 1
    return [p.detach() for p in net.parameters()]


MODES: dict[str, Callable[[nn.Module, rivals.Batch, Mechanism], rivals.Step]] = {
    "hooks": lambda *all: rivals.opacus_step(*all, mode="hooks"),
    "functorch": lambda *all: rivals.opacus_step(*all, mode="functorch"),
    "ew": lambda *all: rivals.opacus_step(*all, mode="ew"),
    "ghost": lambda *all: rivals.ghost_step(*all, ghost=True),
    "fast": lambda *all: rivals.ghost_step(*all, ghost=False),
}


@pytest.mark.parametrize("make", [lambda: build("mnist-cnn", (1, 16, 16), 10, 0), half_frozen], ids=["whole", "frozen"])
@pytest.mark.parametrize("mode", MODES)
def test_opacus_takes_the_step_of_vmap(mode: str, make: Callable[[], nn.Module]) -> None:
    pytest.importorskip("opacus")
    expected = stepped(make(), rivals.vmap_step)
    for p, q, before in zip(stepped(make(), MODES[mode]), expected, make().parameters()):
        torch.testing.assert_close(p, q, atol=1e-6, rtol=1e-4)
        assert torch.equal(p, before) != before.requires_grad


def test_frozen_parameters_are_none_of_theta() -> None:
    assert sum(p.numel() for p in trained(half_frozen())) == 6_840 - 260


@pytest.mark.parametrize("change", ["", "commit", "settings"])
def test_rows_measured_apart_are_joined_if_they_belong_together(change: str, tmp_path: Path) -> None:
    parts = []
    for place, name in enumerate(("vit", "resnet20")):
        document: dict[str, Any] = {
            "provenance": {"commit": "a"},
            "settings": {"repeats": 3},
            "rows": {name: {"n": name}},
        }
        if change and place:
            document |= {"settings": {}} if change == "settings" else {"provenance": {"commit": "b"}}
        parts.append(tmp_path / f"{name}.json")
        parts[-1].write_text(json.dumps(document), "utf-8")
    out = tmp_path / "all.json"
    if change:
        with pytest.raises(SystemExit, match=r"resnet20.json comes from another commit or other settings"):
            models.merged(parts, out)
        return
    models.merged(parts, out)
    assert list(json.loads(out.read_text("utf-8"))["rows"]) == ["resnet20", "vit"]
