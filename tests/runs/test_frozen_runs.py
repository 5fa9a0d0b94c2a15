"""Whole runs of modules with a frozen body: as those without a split but for rounding, and faster engines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from frozen_nets import Residual, chain
from small_runs import ALGORITHMS, small
from torch import Tensor, nn

import fedspa
from fedspa.examples import Examples
from fedspa.learning.backbone import Split, split
from fedspa.learning.features import Features
from fedspa.learning.tasks import Classification
from fedspa.running import RunResult
from fedspa.running import run as simulate
from fedspa.runs import setup

AUTO = {"run": {"engine": "auto"}}


def run(out: Path, module: nn.Module, records: Any = None, **sections: dict[str, Any]) -> RunResult:
    given = {} if records is None else {"data": records}
    config = small(out, **{"data": {"name": "digits"}, **AUTO, **sections})
    return simulate(config, module=module, **given)


def unsplit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup, "split", lambda *given: "it is not asked for")


def trained(result: RunResult) -> Tensor:
    return torch.cat([p.detach().flatten() for p in result.module.parameters() if p.requires_grad])


def frozen_of(module: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in module.parameters() if not p.requires_grad]


@pytest.mark.parametrize("name", ["fedspa", "cpsgd"])
def test_a_linear_head_on_a_frozen_body_runs_natively(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = chain()
    before, first = frozen_of(module), module[-1].weight.detach().clone()
    made = run(tmp_path / "split", module, **ALGORITHMS[name])
    assert made.summary["engine"] == "native"
    assert "the frozen body" in made.summary["engine_reason"]
    assert made.module is module
    assert all(map(torch.equal, before, frozen_of(module)))
    assert not torch.equal(module[-1].weight, first)
    assert made.summary["dimension"] == 1450
    unsplit(monkeypatch)
    whole = run(tmp_path / "whole", chain(), **ALGORITHMS[name])
    assert whole.summary["engine"] != "native"
    assert "computed in every step: it is not asked for" in whole.summary["engine_reason"]
    # cpSGD rounds to whole numbers at random: a last bit may turn one.
    tolerance = 0.05 if name == "cpsgd" else 1e-3
    torch.testing.assert_close(trained(made), trained(whole), rtol=tolerance, atol=tolerance)
    assert made.metrics[-1].loss == pytest.approx(whole.metrics[-1].loss, rel=1e-2)
    assert [metrics.epsilon for metrics in made.metrics] == [metrics.epsilon for metrics in whole.metrics]
    assert [metrics.agents for metrics in made.metrics] == [metrics.agents for metrics in whole.metrics]


def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[bytes]:
    """How often the features of each record are made."""
    seen: Counter[bytes] = Counter()
    plain = Split.features

    def counting(self: Split, x: Tensor) -> Any:
        assert len(x) == 1
        if x is not self.tried:
            seen[x.numpy().tobytes()] += 1
        return plain(self, x)

    monkeypatch.setattr(Split, "features", counting)
    return seen


def test_a_record_goes_through_the_body_once_in_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(300, 1, 8, 8, generator=torch.Generator().manual_seed(4))
    y = torch.arange(300) % 10
    data = fedspa.from_arrays(x[:240], y[:240], x[240:], y[240:], name="mine")
    seen = counted(monkeypatch)
    federation = {"agents": 6, "rounds": 4, "per_round": 2}
    made = run(tmp_path / "run", chain(), data, federation=federation)
    assert made.summary["engine"] == "native"
    assert set(seen.values()) == {1}
    assert {row.numpy().tobytes() for row in x[240:]} <= seen.keys()
    assert len(seen) <= 300


@pytest.mark.gpu
@pytest.mark.parametrize("noise", ["seeded", "exact"])
@pytest.mark.parametrize("make", [chain, lambda: Residual(0.3)], ids=["chain", "dropout behind the body"])
def test_on_a_gpu(tmp_path: Path, make: Callable[[], nn.Module], noise: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sections = {"run": {"engine": "auto", "device": "cuda"}, "privacy": {"noise": noise}}
    made = run(tmp_path / "split", make(), **sections)
    assert "the frozen body" in made.summary["engine_reason"]
    again = run(tmp_path / "again", make(), **sections)
    unsplit(monkeypatch)
    whole = run(tmp_path / "whole", make(), **sections)
    assert "the frozen body" not in whole.summary["engine_reason"]
    if noise == "seeded":
        torch.testing.assert_close(trained(made), trained(again), rtol=1e-3, atol=1e-4)


class HalfBody(nn.Module):
    """A frozen body in 16 bits below a head in 32, as a large model is loaded."""

    def __init__(self, kind: torch.dtype) -> None:
        super().__init__()
        layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 96), nn.LayerNorm(96), nn.Tanh())
        self.body, self.head, self.kind = layers.to(kind).requires_grad_(False), nn.Linear(96, 10), kind

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x.to(self.kind)).float())


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_a_frozen_body_of_half_precision_keeps_its_type_and_a_record_its_features(
    tmp_path: Path, kind: torch.dtype
) -> None:
    """Features are made one record at a time, so that 16 bits round no record by the others of a batch."""
    torch.manual_seed(0)
    module = HalfBody(kind)
    before = frozen_of(module)
    made = run(tmp_path / "run", module)
    assert "the frozen body" in made.summary["engine_reason"]
    assert all(map(torch.equal, before, frozen_of(module)))
    assert {values.dtype for values in frozen_of(module)} == {kind}
    assert made.summary["dimension"] == 970
    again = RunResult.load(made.folder, HalfBody(kind)).module
    assert all(map(torch.equal, module.parameters(), again.parameters()))
    x, y = torch.rand(40, 1, 8, 8), torch.zeros(40, dtype=torch.int64)
    cut = split(module, Examples(x[:1], y[:1]), Classification(classes=10))
    assert isinstance(cut, Split)
    whole = Features(cut, x, strict=True).of()
    alone = [Features(cut, x[row : row + 1], strict=True).of() for row in range(40)]
    assert torch.equal(whole, torch.cat(alone))
