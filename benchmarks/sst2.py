"""SST-2 by public word embeddings: 100 agents, ε = 8, 3 and 1 at δ = 10⁻⁵, local and in sums, beside no privacy.

    pip download --no-deps wordllama && unzip wordllama-*.whl -d DIR     # for its embeddings and tokenizer
    python benchmarks/sst2.py --data DIR/SST-2 --embeddings DIR/wordllama [--jobs 2] [--out FILE]

`head` is a linear head on a sentence's mean embedding. `words` trains a layer on each word's embedding, adds its
outputs up over the sentence, and a linear head on the sum. The embeddings are frozen: 32,000 × 256 pretrained numbers.
All settings but the ones below follow from public numbers (`run.chosen`), so that nothing was tuned on these records.
Scores are accuracies on GLUE's 872 development sentences, after the last round.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import tempfile
import warnings
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor, nn

import fedspa
from intervals import half_interval
from provenance import in_parts, stamp

AGENTS, FIRST_SEED, SEEDS, DELTA = 100, 8000, 5, 1e-5
WORDS, HIDDEN = 24, 32  # of a sentence, what follows is cut; and of the layer
SUMS = {"adversary": "secure-aggregation", "colluders": 20}
ROWS: dict[str, dict[str, Any]] = {
    f"{model}, {where}, ε = {epsilon:g}": {"model": model, "privacy": {"epsilon": epsilon, **more}}
    for model in ("head", "words")
    for where, more in (("local", {}), ("sums of 100", SUMS))
    for epsilon in (8.0, 3.0, 1.0)
}
ROWS |= {f"{model}, no privacy": {"model": model} for model in ("head", "words")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--embeddings", type=Path, required=True)
    parser.add_argument("--rows", default=None, help="only those whose names hold this text")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--out", type=Path, default=None)
    arguments = parser.parse_args()
    names = [name for name in ROWS if arguments.rows is None or arguments.rows in name]
    score = functools.partial(scored, arguments.data, arguments.embeddings)
    with ProcessPoolExecutor(arguments.jobs, mp_context=get_context("spawn")) as pool:

        def measured(name: str) -> dict[str, Any]:
            runs = list(pool.map(functools.partial(score, ROWS[name]), range(FIRST_SEED, FIRST_SEED + SEEDS)))
            scores = [run.pop("accuracy") for run in runs]
            return {
                "mean": statistics.mean(scores),
                "half_interval": half_interval(scores),
                "scores": scores,
                **runs[0],
            }

        document = in_parts("rows", names, measured, {"seeds": SEEDS}, arguments.out, stamp)
    print(json.dumps(document, indent=1, ensure_ascii=False))


def scored(data: Path, embeddings: Path, row: dict[str, Any], seed: int) -> dict[str, Any]:
    """One run's accuracy and what it promised."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    private = "privacy" in row
    sums = private and "adversary" in row["privacy"]
    torch.manual_seed(seed)
    with tempfile.TemporaryDirectory() as folder:
        settings: dict[str, Any] = {
            "federation": {"agents": AGENTS, "per_round": AGENTS if sums else 10, "rounds": 30},
            "privacy": {"delta": DELTA, "noise": "seeded", **row.get("privacy", {})},
            "run": {"seed": seed, "out": f"{folder}/run", "threads": 1, "checkpoint_every": 1000},
        }
        if sums:
            settings["algorithm"] = {"mask": "shared"}
        if not private:
            rate = 1.0 if row["model"] == "head" else 0.3
            settings["algorithm"] = {"name": "fedavg", "local_steps": 20, "batch": 64, "local_lr": rate}
        module, read = {"head": (head, means), "words": (words, tokens)}[row["model"]]
        summary = fedspa.run(settings, data=read(data, embeddings), module=module(embeddings), progress=False).summary
    kept = ("epsilon", "epsilon_worst_case", "delta", "neighbours", "participations_max", "dimension", "engine")
    return {"accuracy": summary["accuracy_last"], **{key: summary.get(key) for key in kept}}


@functools.cache
def table(embeddings: Path) -> Tensor:
    """Embeddings of the tokens from 1 on, of length 1, their spread made more even; 0 stands for no token."""
    (values,) = load_file(embeddings / "weights/l2_supercat_256.safetensors").values()
    values = values.float() - values.float().mean(0)
    _, sizes, directions = torch.linalg.svd(values, full_matrices=False)
    values = values @ (directions.T / sizes.sqrt())
    return torch.cat([torch.zeros(1, values.shape[1]), nn.functional.normalize(values, dim=1)])


@functools.cache
def tokens(data: Path, embeddings: Path) -> fedspa.Dataset:
    tokenizer = Tokenizer.from_file(str(embeddings / "tokenizers/l2_supercat_tokenizer_config.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(WORDS)
    parts = []
    for name in ("train.tsv", "dev.tsv"):
        lines = [line.rsplit("\t", 1) for line in (data / name).read_text("utf-8").splitlines()[1:]]
        x = torch.zeros(len(lines), WORDS, dtype=torch.int64)
        for row, found in zip(x, tokenizer.encode_batch([text for text, _ in lines], add_special_tokens=False)):
            row[: len(found.ids)] = torch.tensor(found.ids) + 1
        parts += [x, torch.tensor([int(label) for _, label in lines])]
    return fedspa.from_arrays(*parts, name="sst2", classes=2)


@functools.cache
def means(data: Path, embeddings: Path) -> fedspa.Dataset:
    """Mean embeddings of length 1: a formula of one record and public numbers."""
    found, vectors = tokens(data, embeddings), table(embeddings)
    train, test = (
        torch.cat([nn.functional.normalize(vectors[part].sum(1), dim=1) for part in torch.split(x, 1000)])
        for x in (found.train_x, found.test_x)
        if isinstance(x, Tensor)
    )
    return fedspa.from_arrays(train, found.train_y, test, found.test_y, name="sst2-means", classes=2)


def head(embeddings: Path) -> nn.Module:
    return nn.Linear(table(embeddings).shape[1], 2)


def words(embeddings: Path) -> nn.Module:
    return Words(table(embeddings))


class Words(nn.Module):
    """A layer on each word, added up over the sentence; no word adds nothing."""

    def __init__(self, vectors: Tensor) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vectors.shape[0], vectors.shape[1], _weight=vectors, _freeze=True)
        self.layer, self.head = nn.Linear(vectors.shape[1], HIDDEN), nn.Linear(HIDDEN, 2)

    def forward(self, x: Tensor) -> Tensor:
        there = (x > 0).to(torch.float32).unsqueeze(2)
        found = torch.relu(self.layer(self.embedding(x))) * there
        logits: Tensor = self.head(found.sum(1) / there.sum(1).clamp_min(1.0).sqrt())
        return logits


if __name__ == "__main__":
    main()
