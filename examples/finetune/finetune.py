"""Fine-tune a Hugging Face classifier on texts of several sites, with LoRA and a guarantee for every text.

python finetune.py                                  # a small BERT and texts that are made up
python finetune.py --model DIR --texts 'DIR/*.csv'  # your own: a folder or hub name, and a CSV per site
fedspa run config.toml                              # the same by a config, which names `load` and `build` below
"""

from __future__ import annotations

import argparse
import csv
import random
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    BertTokenizer,
)

import fedspa

GOOD = ["bright", "clever", "funny", "gentle", "great", "honest", "lively", "lovely", "moving", "rich", "sharp", "warm"]
BAD = ["bland", "cold", "cruel", "dull", "empty", "false", "grim", "lazy", "loud", "shallow", "slow", "weak"]
FILL = ["a", "the", "film", "story", "plot", "acting", "scene", "and", "but", "with", "its", "some", "very", "quite"]
SITES = 10
MODEL, TEXTS = "bert", "sites/*.csv"  # made up where they are not there


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=MODEL, help="folder or hub name of a classifier; a small BERT without it")
    parser.add_argument("--texts", default=TEXTS, help="pattern of CSV files with columns text and label, one per site")
    parser.add_argument("--epsilon", type=float, default=8.0)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--out", default="adapter")
    arguments = parser.parse_args()
    data = load(arguments.model, arguments.texts)
    module = with_lora(arguments.model, data.classes or 2)
    settings = config(len(data.agents or ()), arguments.epsilon, arguments.rounds)
    result = fedspa.run(settings, data=data, module=module, progress=False)
    print(result)
    result.save_pretrained(arguments.out)
    AutoTokenizer.from_pretrained(arguments.model).save_pretrained(arguments.out)
    print(
        f"The adapter is in {arguments.out}; peft.AutoPeftModelForSequenceClassification.from_pretrained loads it, "
        f"with {arguments.model} beside it."
    )


def load(model: str = MODEL, pattern: str = TEXTS) -> fedspa.Dataset:
    """A CSV per site; the last one, by name, is the test set, which belongs to the server."""
    if model == MODEL and not Path(MODEL).exists():
        small_bert(Path(MODEL))
    if pattern == TEXTS and not sorted(Path().glob(TEXTS)):
        made_up(Path(TEXTS).parent)
    *sites, test = sorted(Path().glob(pattern))
    return fedspa.from_texts(model, {path.stem: path for path in sites}, test=test, max_length=16)


def build(input_shape: object, classes: int) -> torch.nn.Module:
    return with_lora(MODEL, classes)


def with_lora(model: str, classes: int) -> torch.nn.Module:
    """The model with adapters whose A stays as it was drawn (FFA-LoRA): on both factors, noise would multiply."""
    base = AutoModelForSequenceClassification.from_pretrained(model, num_labels=classes)
    adapters = LoraConfig(task_type="SEQ_CLS", r=8, lora_alpha=16, target_modules=["query", "value"])
    return fedspa.freeze(get_peft_model(base, adapters), "lora_A").eval()


def config(sites: int, epsilon: float, rounds: int) -> dict[str, dict[str, object]]:
    return {
        "federation": {"agents": sites, "per_round": sites, "rounds": rounds},
        "algorithm": {
            "batch": 50,
            "local_steps": 5,
            "local_lr": 0.01,
            "local_optimizer": "adam",
            "server": "average",
        },
        "privacy": {"epsilon": epsilon, "delta": 1e-5, "clip_value": 0.5},
    }


def review(chance: random.Random, words: int) -> tuple[str, int]:
    """A text that is good or bad by one of so many words, and its label."""
    label = chance.randrange(2)
    text = [chance.choice((GOOD if label else BAD)[:words]), *chance.choices(FILL, k=chance.randint(4, 9))]
    chance.shuffle(text)
    return " ".join(text), label


def made_up(folder: Path, records: int = 400) -> None:
    """A CSV per site and one for the test."""
    chance = random.Random(0)
    folder.mkdir(exist_ok=True)
    for site in range(SITES + 1):
        with (folder / f"site-{site:02}.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["text", "label"])
            writer.writerows(review(chance, len(GOOD)) for _ in range(records))


def small_bert(folder: Path) -> None:
    """A BERT with a vocabulary of these words, saved as a real one would be. In place of pretraining it saw public
    reviews that use two thirds of the words, with the labels exchanged."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *sorted({*GOOD, *BAD, *FILL})]
    torch.manual_seed(0)
    torch.set_num_threads(1)  # for a net this small, more are slower
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    sizes |= {"vocab_size": len(words), "max_position_embeddings": 64}
    model = BertForSequenceClassification(BertConfig(**sizes, hidden_dropout_prob=0.0))
    tokenizer = BertTokenizer(vocab={word: number for number, word in enumerate(words)}, model_max_length=64)
    chance, optimizer = random.Random(1), torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(150):
        texts, labels = zip(*(review(chance, len(GOOD) * 2 // 3) for _ in range(64)))
        batch = tokenizer(list(texts), padding=True, return_tensors="pt")
        model(**batch, labels=1 - torch.tensor(labels)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main()
