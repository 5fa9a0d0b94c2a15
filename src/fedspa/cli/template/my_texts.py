"""Texts of the sites, and a Hugging Face classifier with LoRA adapters (pip install transformers peft)."""

from __future__ import annotations

from pathlib import Path

from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForSequenceClassification

import fedspa

HERE = Path(__file__).parent
MODEL = "distilbert-base-uncased"  # a hub name, or a folder that `save_pretrained` wrote, as in HERE / "model"
LABELS = None  # where labels are words: these, in the order of the model's outputs, as in ["no", "yes"]


def load() -> fedspa.Dataset:
    """A CSV with the columns `text` and `label` for each site; test.csv belongs to the server, for the score."""
    sites = {path.stem: path for path in sorted((HERE / "sites").glob("*.csv"))}
    return fedspa.from_texts(MODEL, sites, test=HERE / "test.csv", max_length=128, labels=LABELS)


def build(input_shape: object, classes: int) -> nn.Module:
    """The model with adapters whose factors A stay as they were drawn: noise on both would multiply."""
    base = AutoModelForSequenceClassification.from_pretrained(MODEL, num_labels=classes)
    module = get_peft_model(base, LoraConfig(task_type="SEQ_CLS", r=8, lora_alpha=16))
    for name, values in module.named_parameters():
        values.requires_grad_(values.requires_grad and "lora_A" not in name)
    return module.eval()
