"""What a run leaves in its user's hands: a repr that tells, the module from its folder, answers in one's own words."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from small_records import Tagger, bits, own_loss, parity, tokens
from small_runs import small
from torch import nn

import fedspa
from fedspa.data.datasets import load
from fedspa.errors import ConfigError, DataError
from fedspa.examples import layout, of_layout

WARDS = {"kind": "category", "categories": ["a", "b"], "other": True}
AGE, SMOKER = {"kind": "number", "range": [0, 110]}, {"kind": "flag", "missing": "indicator"}
SCORE = {"kind": "number", "range": [0, 200]}
CLINICS = Path(__file__).with_name("runs") / "clinics.csv"


def on_clinics(out: Path, target: str, **columns: dict[str, Any]) -> dict[str, Any]:
    known = {"age": AGE, "smoker": SMOKER, "ward": WARDS, "score": SCORE, **columns}
    known[target] = {key: value for key, value in known[target].items() if key != "missing"} | {"target": True}
    table = {"columns": known, "agent": "clinic", "split": "part"}
    data = {"name": str(CLINICS), "table": table}
    return small(out, data=data, algorithm={"compression": 1.0, "batch": 5})


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> fedspa.RunResult:
    return fedspa.run(small(tmp_path_factory.mktemp("digits") / "run"))


def same_parameters(one: nn.Module, other: nn.Module) -> bool:
    ours, theirs = one.state_dict(), other.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_folder_gives_the_result_back(digits: fedspa.RunResult) -> None:
    again = fedspa.RunResult.load(str(digits.folder))
    assert again.summary == digits.summary
    assert again.metrics == digits.metrics
    assert same_parameters(again.module, digits.module)
    assert not again.module.training
    assert repr(again) == repr(digits)


@pytest.mark.parametrize("task", ["classification", "binary"])
def test_named_models_are_built_without_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: str) -> None:
    names = {"data": {"name": "small_records:parity"}, "model": {"name": "mlp"}, "task": {"name": task}}
    result = fedspa.run(small(tmp_path / "run", **names))
    monkeypatch.setattr("small_records.parity", lambda: pytest.fail("records were asked for"))
    module = fedspa.load_model(tmp_path / "run")
    assert same_parameters(module, result.module)
    assert module[-1].out_features == (1 if task == "binary" else 2)


def test_a_module_that_was_given_must_be_given_again(tmp_path: Path) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))

    result = fedspa.run(small(tmp_path / "run"), module=build())
    with pytest.raises(
        ConfigError, match=r"given its module in Python \(Sequential\).*load_model\('.*run', module=…\)"
    ):
        fedspa.load_model(tmp_path / "run")
    module = build()
    assert fedspa.load_model(tmp_path / "run", module=module) is module
    assert same_parameters(module, result.module)
    other = nn.Sequential(nn.Flatten(), nn.Linear(64, 9))
    with pytest.raises(
        ConfigError, match=r"are not those of this Sequential \(.*size mismatch.*\); build the module as"
    ):
        fedspa.load_model(tmp_path / "run", module=other)
    with pytest.raises(ConfigError, match=r"module is a str; it must be a torch\.nn\.Module"):
        fedspa.load_model(tmp_path / "run", module="Sequential")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("lost", "words"),
    [
        ("config.toml", "holds no run: there is no config.toml"),
        ("summary.json", "is not finished: there is no summary.json; `fedspa run --resume"),
        ("model.safetensors", "has no model.safetensors"),
    ],
)
def test_what_is_missing_is_named(digits: fedspa.RunResult, tmp_path: Path, lost: str, words: str) -> None:
    copy = Path(shutil.copytree(digits.folder, tmp_path / "copy"))
    (copy / lost).unlink()
    with pytest.raises(ConfigError, match=re.escape(words)):
        fedspa.load_model(copy)


def test_classes_are_predicted_as_they_are_scored(digits: fedspa.RunResult) -> None:
    data = load("digits", None)
    assert isinstance(data.test_x, torch.Tensor)
    assert isinstance(data.test_y, torch.Tensor)
    found = digits.predict(data.test_x)
    assert found.dtype == np.int64
    assert (found == data.test_y.numpy()).mean() == pytest.approx(digits.summary["accuracy_last"])
    for given in (data.test_x.numpy(), data.test_x.double().numpy(), data.test_x.tolist()):
        assert (digits.predict(given) == found).all()
    assert (digits.predict(data.test_x[:1]) == found[:1]).all()


@pytest.mark.parametrize(
    "x", [torch.rand(5, 8, 8), torch.rand(1, 8, 8), torch.rand(5, 64), {"x": torch.rand(5, 1, 8, 8)}]
)
def test_records_of_another_form_are_refused(digits: fedspa.RunResult, x: Any) -> None:
    with pytest.raises(
        DataError, match=r"^x is .* per record, a row each; the model was trained on \(1, 8, 8\) float32$"
    ):
        digits.predict(x)


def test_other_tasks_answer_in_the_form_of_their_targets(tmp_path: Path) -> None:
    odd, four, texts = parity(), bits(), tokens()
    result = fedspa.run(small(tmp_path / "binary"), data=odd, task="binary")
    assert (result.predict(odd.test_x) == odd.test_y.numpy()).mean() == pytest.approx(result.summary["score_last"])
    result = fedspa.run(small(tmp_path / "labels"), data=four, task="multi-label")
    assert result.predict(four.test_x).shape == tuple(four.test_y.shape)
    assert set(np.unique(result.predict(four.test_x))) <= {0, 1}
    result = fedspa.run(small(tmp_path / "tokens"), data=texts, module=Tagger(), task="next-token")
    assert result.predict(texts.test_x).shape == tuple(texts.test_y.shape)
    shorter = {"input_ids": texts.test_x["input_ids"][:, :5]}
    assert result.predict(shorter).shape == (len(texts.test_y), 5)
    with pytest.raises(DataError, match=r"trained on input_ids \(12,\) int64"):
        result.predict({"input_ids": torch.rand(2, 12)})
    result = fedspa.run(small(tmp_path / "own"), task=own_loss)
    assert result.predict(torch.rand(3, 1, 8, 8)).shape == (3, 10)


def test_images_are_given_as_images_where_the_run_made_features(tmp_path: Path) -> None:
    result = fedspa.run(small(tmp_path / "run", data={"features": "orientations"}))
    data = load("digits", None)
    found = fedspa.RunResult.load(tmp_path / "run").predict(data.test_x)
    assert (found == data.test_y.numpy()).mean() == pytest.approx(result.summary["accuracy_last"])
    with pytest.raises(DataError, match="trained on images"):
        result.predict({"x": torch.rand(2, 1, 8, 8)})


def _frame() -> pandas.DataFrame:
    return pandas.read_csv(CLINICS)


def test_numbers_are_predicted_in_their_own_unit(tmp_path: Path) -> None:
    result = fedspa.run(on_clinics(tmp_path / "run", "score"))
    held = _frame().query("part == 'test'")
    found = fedspa.RunResult.load(tmp_path / "run").predict(held.drop(columns=["score", "clinic", "part"]))
    assert np.sqrt(np.square(found - held["score"]).mean()) == pytest.approx(result.summary["score_last"], rel=1e-5)


def test_classes_are_predicted_by_their_names(tmp_path: Path) -> None:
    fedspa.run(on_clinics(tmp_path / "run", "ward"))
    result = fedspa.RunResult.load(tmp_path / "run")
    held = _frame().query("part == 'test'")
    with torch.no_grad():  # each answer once
        for place, word in enumerate(["a", "b", None]):
            result.module[1].weight.zero_()
            result.module[1].bias.copy_(nn.functional.one_hot(torch.tensor(place), 3))
            assert set(result.predict(held[["age", "smoker", "score"]])) == {word}


def test_a_table_that_was_given_in_python_is_known_again(tmp_path: Path) -> None:
    """No config describes its columns: the summary does."""
    columns = on_clinics(tmp_path, "score")["data"]["table"]["columns"]
    columns |= {"clinic": {"kind": "ignore"}, "part": {"kind": "ignore"}}
    data = fedspa.from_table(_frame(), {"columns": columns}, name="clinics")
    config = small(tmp_path / "run", data={"holdout": 0.2}, algorithm={"compression": 1.0, "batch": 5})
    result = fedspa.run(config, data=data, task="regression")
    again = fedspa.RunResult.load(tmp_path / "run")
    found = again.predict(_frame())
    assert (found == result.predict(_frame())).all()
    assert (result.predict(data.train_x) == found).all()  # features, in the order of the schema
    with torch.no_grad():
        assert found == pytest.approx(result.module(data.train_x)[:, 0].numpy() * 100 + 100, rel=1e-5)


@pytest.mark.parametrize(
    "tree",
    [
        torch.zeros(1, 8, 8),
        torch.zeros(1),
        {"input_ids": torch.zeros(1, 12, dtype=torch.int64), "mask": torch.zeros(1, 12, dtype=torch.bool)},
        (torch.zeros(1, 3), {"deep": torch.zeros(1, 2, dtype=torch.int64)}),
    ],
)
def test_a_layout_can_be_read_back(tree: Any) -> None:
    again = of_layout(layout(tree))
    assert layout(again) == layout(tree)
    assert type(again) is type(tree)
