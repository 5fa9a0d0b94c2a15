"""Whole runs of modules that users bring: adapters of peft, tied weights, BatchNorm that is refused and then fixed.

Noise is small and seeded here, so that a run whose examples lost their gradients does not learn and is found out.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedspa
from fedspa.running import RunResult

CLASSES, WORDS, LENGTH, RECORDS = 3, 24, 6, 96


@pytest.fixture(autouse=True)
def _fixed() -> None:
    torch.manual_seed(0)


def config(out: Path, **algorithm: Any) -> dict[str, Any]:
    return {
        "federation": {"agents": 3, "rounds": 3, "per_round": 3},
        "algorithm": {"compression": 0.5, "local_steps": 2, "batch": 12, "local_lr": 0.2, "server": "average"}
        | algorithm,
        "privacy": {"noise_multiplier": 0.3, "clip_value": 0.5, "noise": "seeded"},
        "run": {"out": str(out)},
    }


def learned(result: RunResult, parameters: int, score: str = "accuracy") -> None:
    """It trained what it should, privately, and got better at it."""
    assert result.summary["dimension"] == parameters
    assert result.summary["epsilon"] > 0
    assert result.metrics[-1].loss < result.metrics[0].loss
    assert score in result.metrics[-1].scores


def trainable(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)


def images() -> fedspa.Dataset:
    y = torch.arange(RECORDS) % CLASSES
    x = torch.randn(RECORDS, 1, 8, 8) + 2 * torch.eye(8)[y][:, None, None, :]
    return fedspa.from_arrays(x[:72], y[:72], x[72:], y[72:], name="images")


def texts() -> tuple[Tensor, Tensor]:
    """Tokens whose class stands in the first half, and the classes."""
    y = torch.arange(RECORDS) % CLASSES
    tokens = torch.randint(CLASSES, WORDS, (RECORDS, LENGTH))
    tokens[:, : LENGTH // 2] = y[:, None]
    return tokens, y


def tokenized() -> fedspa.Dataset:
    """As a tokenizer gives them, with padding, and with labels."""
    tokens, y = texts()
    mask = torch.ones_like(tokens)
    mask[::2, LENGTH - 2 :] = 0
    whole = {"input_ids": tokens, "attention_mask": mask, "labels": y}
    train, test = ({key: part[rows] for key, part in whole.items()} for rows in (slice(72), slice(72, None)))
    return fedspa.from_examples(train, test, name="tokenized")


class Residual(nn.Module):
    """A residual block whose normalisation is given."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.stem, self.conv, self.norm = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1), norm
        self.head = nn.Linear(4 * 16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu()
        x = (x + self.norm(self.conv(x))).relu()
        return self.head(nn.functional.avg_pool2d(x, 2).flatten(1))


class Tied(nn.Module):
    """A language model whose output matrix is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.mix = nn.Embedding(WORDS, 8), nn.GRU(8, 8, batch_first=True)
        self.out = nn.Linear(8, WORDS, bias=False)
        self.out.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.mix(self.words(tokens))[0])


def test_tied_weights_count_once_and_stay_tied(tmp_path: Path) -> None:
    tokens, _ = texts()
    data = fedspa.from_arrays(tokens[:72], tokens[:72], tokens[72:], tokens[72:], name="text")
    net = Tied()
    result = fedspa.run(config(tmp_path, local_lr=1.0), data=data, module=net, task="next-token")
    learned(result, WORDS * 8 + trainable(net.mix), "perplexity")
    assert result.module.out.weight is result.module.words.weight


def bert() -> nn.Module:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install fedspa[dev]")
    return transformers.BertForSequenceClassification(
        transformers.BertConfig(
            vocab_size=WORDS,
            hidden_size=8,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=16,
            max_position_embeddings=LENGTH,
            num_labels=CLASSES,
        )
    )


def test_a_hugging_face_bert_with_pefts_lora(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed: pip install fedspa[dev]")
    net = peft.get_peft_model(
        bert(), peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query", "value"], lora_dropout=0.1)
    )
    result = fedspa.run(config(tmp_path, local_lr=1.0), data=tokenized(), module=net)
    learned(result, 2 * 2 * (8 + 8) + 8 * CLASSES + CLASSES)


def test_batchnorm_is_refused_in_one_line_and_mended_in_one_call(tmp_path: Path) -> None:
    net = Residual(nn.BatchNorm2d(4))
    with pytest.raises(fedspa.FedspaError, match=r"layer 'norm' \(BatchNorm2d\) mixes .*fedspa\.fix") as refusal:
        fedspa.run(config(tmp_path), data=images(), module=net)
    assert "\n" not in str(refusal.value)
    assert not list(tmp_path.iterdir())
    learned(fedspa.run(config(tmp_path), data=images(), module=fedspa.fix(net)), trainable(net))


@pytest.mark.gpu
def test_a_residual_cnn_with_groupnorm_on_a_gpu(tmp_path: Path) -> None:
    net = Residual(nn.GroupNorm(2, 4))
    asked = config(tmp_path)
    asked["run"]["device"] = "cuda"
    learned(fedspa.run(asked, data=images(), module=net), trainable(net))
