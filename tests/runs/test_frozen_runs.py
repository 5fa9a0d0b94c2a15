"""Whole runs of modules with a frozen body: as those without a split but for rounding, and faster engines."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from frozen_nets import Residual, TwoInputs, bert, chain
from small_runs import ALGORITHMS, ended, outcome, small, start
from torch import Tensor, nn

import fedspa
from fedspa.errors import DataError
from fedspa.learning import features
from fedspa.learning.backbone import Split
from fedspa.running import RunResult, Stopped, simulate
from fedspa.runs import frozen
from fedspa.runs.checkpoint import CheckpointError

AUTO = {"run": {"engine": "auto"}}


def run(out: Path, module: nn.Module, records: Any = None, **sections: dict[str, Any]) -> RunResult:
    given = {} if records is None else {"data": records}
    config = small(out, **{"data": {"name": "digits"}, **AUTO, **sections})
    return simulate(config, module=module, **given)


def unsplit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frozen, "split", lambda *given: "it is not asked for")


def trained(result: RunResult) -> Tensor:
    return torch.cat([p.detach().flatten() for p in result.module.parameters() if p.requires_grad])


def frozen_of(module: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in module.parameters() if not p.requires_grad]


@pytest.mark.parametrize("name", ALGORITHMS)
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


@pytest.mark.parametrize("make", [chain, lambda: Residual(0.3)], ids=["chain", "dropout behind the body"])
def test_the_generic_engine_trains_the_head(
    tmp_path: Path, make: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dropout draws the same numbers: the body draws none."""
    generic = {"run": {"engine": "generic"}}
    made = run(tmp_path / "split", make(), **generic)
    assert "the frozen body" in made.summary["engine_reason"]
    unsplit(monkeypatch)
    whole = run(tmp_path / "whole", make(), **generic)
    torch.testing.assert_close(trained(made), trained(whole), rtol=1e-5, atol=1e-6)
    assert made.metrics[-1].scores == pytest.approx(whole.metrics[-1].scores)


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


def test_agents_that_take_no_part_cost_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(300, 1, 8, 8, generator=torch.Generator().manual_seed(4))
    y = torch.arange(300) % 10
    data = fedspa.from_arrays(x[:240], y[:240], x[240:], y[240:], name="mine")
    seen = counted(monkeypatch)
    run(tmp_path / "run", chain(), data, federation={"agents": 6, "rounds": 1, "per_round": 2})
    assert len(seen) == 60 + 2 * 40


def test_persons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(360, 1, 8, 8, generator=torch.Generator().manual_seed(4))
    y = torch.arange(360) % 10
    ids = np.arange(300) // 2 % 130  # some have two records, some four
    data = fedspa.from_arrays(x[:300], y[:300], x[300:], y[300:], name="mine", persons=ids)
    sections = {"data": {"person_records": 3}, "federation": {"agents": 5, "rounds": 3, "per_round": 2}}
    made = run(tmp_path / "split", chain(), data, **sections)
    assert "the frozen body" in made.summary["engine_reason"]
    assert made.summary["unit"] == "person"
    unsplit(monkeypatch)
    whole = run(tmp_path / "whole", chain(), data, **sections)
    torch.testing.assert_close(trained(made), trained(whole), rtol=1e-4, atol=1e-5)


def texts(bad: bool) -> fedspa.Dataset:
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(0, 20, (300, 6), generator=generator)
    x = {"input_ids": ids, "attention_mask": torch.ones(300, 6, dtype=torch.int64)}
    y = ids[:, 0] % 3
    if bad:
        ids[5, 2] = 77  # a word that the model does not know
    train, test = ({key: leaf[part] for key, leaf in x.items()} for part in (slice(240), slice(240, None)))
    return fedspa.from_arrays(train, y[:240], test, y[240:], name="texts")


def test_a_record_that_the_body_fails_on_counts_as_zero(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = run(tmp_path / "split", TwoInputs(), texts(bad=True))
    assert made.summary["engine"] == "native"
    unsplit(monkeypatch)
    whole = run(tmp_path / "whole", TwoInputs(), texts(bad=True))
    torch.testing.assert_close(trained(made), trained(whole), rtol=1e-4, atol=1e-5)


def test_a_classifier_on_a_frozen_bert_runs_natively(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="needs pip install transformers")
    module = bert()
    module.bert.requires_grad_(False)
    made = run(tmp_path / "run", module, texts(bad=False))
    assert made.summary["engine"] == "native"
    assert made.summary["dimension"] == 3 * 16 + 3
    assert not torch.equal(module.classifier.weight, bert().classifier.weight)
    with torch.no_grad():
        scores = module(**texts(bad=False).test_x).logits.argmax(dim=1)
    right = (scores == texts(bad=False).test_y).double().mean().item()
    assert right == pytest.approx(made.summary["accuracy_last"], abs=0.02)


def test_where_nothing_is_private_it_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"the model fails on these records \(IndexError: index out of range"):
        run(tmp_path / "run", TwoInputs(), texts(bad=True), **ALGORITHMS["fedavg"])


def test_a_held_out_record_that_the_body_fails_on_is_an_error(tmp_path: Path) -> None:
    data = texts(bad=False)
    data.test_x["input_ids"][3, 1] = 77
    with pytest.raises(DataError, match="fails on"):
        run(tmp_path / "run", TwoInputs(), data)


def test_killed_and_resumed(tmp_path: Path) -> None:
    run(tmp_path / "whole", chain())

    def killed() -> None:
        config = small(tmp_path / "run", data={"name": "digits"}, **AUTO)
        simulate(
            config, module=chain(), on_round=lambda metrics: metrics.round and os.kill(os.getpid(), signal.SIGKILL)
        )

    assert ended(start(killed)) == -signal.SIGKILL
    simulate(resume=tmp_path / "run", module=chain())
    assert outcome(tmp_path / "run") == outcome(tmp_path / "whole")


def test_a_run_goes_on_with_the_split_that_it_began_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = small(tmp_path / "run", data={"name": "digits"}, run={"engine": "generic"})
    with pytest.raises(Stopped):
        simulate(config, module=chain(), stop=lambda: True)
    with monkeypatch.context() as patched:
        unsplit(patched)
        with pytest.raises(CheckpointError, match="the frozen body was"):
            simulate(resume=tmp_path / "run", module=chain())
    monkeypatch.setattr(features, "MEMORY", 1000)  # where features lie decides nothing
    simulate(resume=tmp_path / "run", module=chain())
    simulate(small(tmp_path / "whole", data={"name": "digits"}, run={"engine": "generic"}), module=chain())
    assert outcome(tmp_path / "run") == outcome(tmp_path / "whole")


def test_without_room_the_frozen_part_is_computed_in_every_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frozen, "room_lacking", lambda split, records: f"no room for {records}")
    made = run(tmp_path / "run", chain())
    assert made.summary["engine"] != "native"
    assert "computed in every step: no room for" in made.summary["engine_reason"]


def test_the_reference_computes_all_in_float64(tmp_path: Path) -> None:
    made = run(tmp_path / "run", chain(), run={"engine": "reference"}, federation={"rounds": 1, "per_round": 1})
    assert "the frozen body" not in made.summary["engine_reason"]


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
