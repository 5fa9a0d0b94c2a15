"""A module as ONNX: the same outputs in another runtime, for batches of any size, with its card beside it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_records import Tagger, tokens
from small_runs import small
from torch import nn
from typer.testing import CliRunner

import fedspa
from fedspa.cli import app
from fedspa.errors import ConfigError, FedspaError

needs_onnx = pytest.mark.skipif(
    importlib.util.find_spec("onnxscript") is None, reason="needs the extra: pip install 'fedspa[onnx]'"
)


def outputs(path: Path, **inputs: Any) -> Any:
    runtime = pytest.importorskip("onnxruntime", reason="needs onnxruntime to compare outputs")
    session = runtime.InferenceSession(path, providers=["CPUExecutionProvider"])
    assert [each.name for each in session.get_inputs()] == list(inputs)
    [found] = session.run(None, inputs)
    return found


@needs_onnx
def test_another_runtime_gives_the_same_outputs(tmp_path: Path) -> None:
    result = fedspa.run(small(tmp_path / "run", model={"name": "mlp"}))
    file = result.export_onnx(tmp_path / "model.onnx")
    assert file == tmp_path / "model.onnx"
    assert (tmp_path / "model.onnx.md").read_text("utf-8") == result.card()
    for records in (1, 7):
        x = torch.rand(records, 1, 8, 8, generator=torch.Generator().manual_seed(records))
        with torch.no_grad():
            np.testing.assert_allclose(outputs(file, x=x.numpy()), result.module(x).numpy(), rtol=1e-5, atol=1e-3)
    before = file.read_bytes()
    assert str(Path(torch.__file__).parent).encode() not in before  # no path of the machine that wrote it
    ended = CliRunner().invoke(app, ["export", str(tmp_path / "run"), str(file)])  # replaces its own
    assert (ended.exit_code, ended.output) == (0, f"{file}\n")
    assert len(file.read_bytes()) == len(before)


@needs_onnx
def test_modules_that_take_keywords_and_are_not_in_eval_mode(tmp_path: Path) -> None:
    data = tokens()
    module = Tagger()
    module.embedding = nn.Sequential(module.embedding, nn.Dropout(0.5))  # type: ignore[assignment]
    result = fedspa.run(small(tmp_path / "run"), data=data, module=module, task="next-token")
    result.module.train()
    file = result.export_onnx(str(tmp_path / "model.onnx"))
    assert result.module.training
    ids = data.test_x["input_ids"][:3]  # type: ignore[index]
    with torch.no_grad():
        wanted = result.module.eval()(ids)["logits"].numpy()
    np.testing.assert_allclose(outputs(file, input_ids=ids.numpy()), wanted, rtol=1e-5, atol=1e-3)


@needs_onnx
def test_a_module_that_was_changed_after_the_run_gets_no_card(tmp_path: Path) -> None:
    result = fedspa.run(small(tmp_path / "run"))
    with torch.no_grad():
        next(result.module.parameters()).add_(1e-3)
    with pytest.raises(ConfigError, match=r"other parameters than the run"):
        result.export_onnx(tmp_path / "model.onnx")
    assert not list(tmp_path.glob("model.onnx*"))


@needs_onnx
def test_what_cannot_be_written_as_onnx_is_said_in_a_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    class Strange(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(64, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(x.flatten(1)) * (1.0 if float(x.sum()) > 0.5 else 2.0)

    result = fedspa.run(small(tmp_path / "run"), module=Strange())
    capfd.readouterr()
    with pytest.raises(FedspaError, match="torch cannot write this Strange as ONNX") as caught:
        result.export_onnx(tmp_path / "model.onnx")
    assert capfd.readouterr() == ("", "")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "model.onnx").exists()
