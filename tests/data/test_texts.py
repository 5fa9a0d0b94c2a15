"""Texts of several agents for Hugging Face models: what is read, and one line for everything that is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import fedspa
from fedspa.cli import app
from fedspa.errors import ConfigError, DataError

transformers = pytest.importorskip("transformers")
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "bad", "film"]


def tokenizer(**changes: Any) -> Any:
    vocabulary = {word: number for number, word in enumerate(WORDS)}
    return transformers.BertTokenizer(**{"vocab": vocabulary, "model_max_length": 16, **changes})


def table(path: Path, rows: list[tuple[str, Any]], head: str = "text,label") -> Path:
    path.write_text("\n".join([head, *(f'"{text}",{label}' for text, label in rows)]) + "\n")
    return path


ROWS = [("good film", 1), ("bad film", 0)] * 10


def test_files_pairs_and_names(tmp_path: Path) -> None:
    data = fedspa.from_texts(
        tokenizer(),
        {"north": table(tmp_path / "a.csv", ROWS), "south": (["bad"] * 4, [0] * 4)},
        test=(["good"], [1]),
        max_length=8,
    )
    assert data.agents == ("north", "south")
    assert data.classes == 2
    assert isinstance(data.train_x, dict)
    assert data.train_x["input_ids"].shape == (24, 8)
    assert data.train_x["input_ids"][0].tolist() == [2, 5, 7, 3, 0, 0, 0, 0]
    assert data.train_x["attention_mask"][0].tolist() == [1, 1, 1, 1, 0, 0, 0, 0]
    assert data.train_y[:2].tolist() == [1, 0]
    assert np.bincount(data.owners).tolist() == [20, 4]


def test_words_as_labels_long_texts_and_tabs(tmp_path: Path) -> None:
    path = tmp_path / "sst.tsv"
    path.write_text("sentence\tlabel\n" + "good " * 50 + "\tpositive\nbad\tnegative\n")
    given = {"text": "sentence", "labels": ["negative", "positive"], "max_length": 6}
    data = fedspa.from_texts(tokenizer(), {"one": path}, test=path, **given)
    assert data.train_y.tolist() == [1, 0]
    assert data.train_x["input_ids"][0].tolist() == [2, 5, 5, 5, 5, 3]  # type: ignore[index,call-overload]


BAD: list[tuple[dict[str, Any], str]] = [
    (
        {"tokenizer": "no/such-model"},
        r"no tokenizer can be loaded from 'no/such-model': give the folder .* or a hub name",
    ),
    ({"tokenizer": 7}, "tokenizer is a int; a Hugging Face tokenizer"),
    ({"max_length": 17}, r"max_length is 17; this tokenizer's model takes 1 to 16 tokens"),
    ({"max_length": 0}, "max_length is 0"),
    ({"test": (["good"], ["yes"])}, r"the test set has the label 'yes', a word: give labels="),
    ({"test": (["good"], ["yes"]), "labels": ["no", "maybe"]}, r"'yes', which is none of no, maybe"),
    ({"test": (["good"], [1, 0])}, "1 texts and 2 labels"),
    ({"test": ([], [])}, "0 texts"),
    ({"test": ([3], [1])}, "text 0 is a int; every text must be a str"),
    ({"test": 5}, "the test set is a int; a CSV or TSV file, or a pair"),
    ({"test": "nowhere.csv"}, "nowhere.csv: .*give a CSV or TSV file"),
    (
        {"text": "review", "test": "there.csv"},
        r"there.csv has no column 'review'; it has 'text, label': name the right one with text=",
    ),
]


@pytest.mark.parametrize(("changes", "message"), BAD)
def test_bad_input_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    table(tmp_path / "there.csv", ROWS)
    given: dict[str, Any] = {"tokenizer": tokenizer(), "test": (["good"], [1]), "max_length": 8, **changes}
    with pytest.raises(DataError, match=message) as caught:
        fedspa.from_texts(given.pop("tokenizer"), {"one": (["bad"], [given.get("labels", [0])[0]])}, **given)
    assert "\n" not in str(caught.value)


def test_a_hub_name_without_network_fails_in_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """And never reaches the hub's client, which tries for most of a minute."""
    called: list[dict[str, Any]] = []

    def missing(name: str, **options: Any) -> None:
        called.append(options)
        raise OSError("not here")

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", missing)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.delenv("HTTPS_PROXY", raising=False)
    monkeypatch.delenv("https_proxy", raising=False)
    with pytest.raises(DataError, match="or a hub name where there is a network"):
        fedspa.from_texts("no/such-model", {"one": (["bad"], [0])}, test=(["good"], [1]))
    assert called == [{"local_files_only": True}]


def test_save_pretrained_writes_model_and_card(tmp_path: Path) -> None:
    config = transformers.BertConfig(
        vocab_size=len(WORDS), hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8
    )
    module = transformers.BertForSequenceClassification(config).eval()
    data = fedspa.from_texts(
        tokenizer(), {"one": (["good", "bad"] * 10, [1, 0] * 10)}, test=(["good"], [1]), max_length=4
    )
    settings = {"federation": {"agents": 1, "per_round": 1, "rounds": 1}, "algorithm": {"batch": 5, "local_steps": 1}}
    settings |= {"privacy": {"epsilon": 5.0}, "run": {"out": str(tmp_path / "run")}}
    result = fedspa.run(settings, data=data, module=module, progress=False)
    folder = result.save_pretrained(tmp_path / "saved")
    again = transformers.BertForSequenceClassification.from_pretrained(folder)
    assert all((a == b).all() for a, b in zip(again.parameters(), result.module.parameters()))
    assert "ε" in (folder / "README.md").read_text("utf-8")
    with torch.no_grad():
        next(result.module.parameters()).add_(1e-3)
    with pytest.raises(ConfigError, match=r"other parameters than the run"):
        result.save_pretrained(tmp_path / "changed")
    assert not (tmp_path / "changed").exists()


@pytest.mark.slow
def test_a_new_project_for_texts_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("peft")
    folder = tmp_path / "study"
    printed = CliRunner().invoke(app, ["new", str(folder), "--text"], catch_exceptions=False).output
    assert "MODEL in my_texts.py" in printed
    refused = CliRunner().invoke(app, ["new", str(tmp_path / "other"), "--text", "--flower"])
    assert str(refused.exception) == "--flower and --text: give one of them"
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    config = transformers.BertConfig(**sizes, vocab_size=len(WORDS), max_position_embeddings=128)
    transformers.BertForSequenceClassification(config).save_pretrained(folder / "model")
    tokenizer(model_max_length=128).save_pretrained(folder / "model")
    script = folder / "my_texts.py"
    script.write_text(script.read_text().replace('"distilbert-base-uncased"', 'str(HERE / "model")'))
    (folder / "sites").mkdir()
    for path in ("sites/north.csv", "sites/south.csv", "test.csv"):
        table(folder / path, ROWS * 3)
    monkeypatch.chdir(folder)
    result = CliRunner().invoke(app, ["run", "config.toml", "--set", "federation.rounds=1", "--json"])
    assert result.exception is None
    summary = json.loads(result.stdout)
    assert summary["agent_names"] == ["north", "south"]
    assert summary["dimension"] == 2 * 8 * 8 + 2 * 8 + 2  # two factors B of rank 8, and the head
