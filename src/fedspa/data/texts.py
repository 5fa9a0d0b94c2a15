"""Labelled texts as records for a Hugging Face classifier: read from CSV files, one per agent, and tokenized."""

from __future__ import annotations

import csv
import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from fedspa.data.adapters import from_agents
from fedspa.data.dataset import Dataset
from fedspa.errors import DataError, os_errors_as, quoted

_LONGEST = 10**6  # what tokenizers without a length of their own say is far beyond it


def from_texts(
    tokenizer: Any,
    agents: Mapping[str, Any],
    *,
    test: Any,
    max_length: int = 128,
    labels: Sequence[str] | None = None,
    text: str = "text",
    label: str = "label",
    name: str = "texts",
) -> Dataset:
    """Make a Dataset of labelled texts, for a module that takes `input_ids` and `attention_mask`.

    Args:
        tokenizer: A Hugging Face tokenizer, or the folder or hub name of one.
        agents: An entry per agent, by its name: a CSV or TSV file with a head line, or a pair of texts and labels.
        test: One entry more, the test set.
        max_length: Tokens of every text: shorter ones are padded, longer ones are cut.
        labels: The words that labels are, in the order of the model's outputs. Without, labels are 0, 1, ….
        text: The column of the texts.
        label: The column of the labels.
        name: The name of the data in the run's files.

    Returns:
        The data, for `run(data=…, module=…)`.

    Raises:
        DataError: A file, a label or the tokenizer cannot be used.

    Examples:
        >>> import fedspa
        >>> data = fedspa.from_texts(  # doctest: +SKIP
        ...     "my-bert", {"north": "north.csv", "south": "south.csv"}, test="test.csv", labels=["no", "yes"]
        ... )
    """
    encoder = _loaded(tokenizer, max_length)
    known = None if labels is None else {str(word): number for number, word in enumerate(labels)}

    def entry(source: Any, what: str) -> dict[str, Any]:
        texts, found = _read(source, what, text, label)
        encoded = encoder(texts, padding="max_length", truncation=True, max_length=max_length, return_tensors="np")
        kept = {key: encoded[key] for key in ("input_ids", "attention_mask", "token_type_ids") if key in encoded}
        return {**kept, "labels": [_number(each, known, what) for each in found]}

    entries = {agent: entry(source, f"agent {agent!r}") for agent, source in agents.items()}
    numbers = [number for each in (*entries.values(),) for number in each["labels"]]
    classes = len(known) if known is not None else max(numbers, default=0) + 1
    return from_agents(entries, test=entry(test, "the test set"), name=name, classes=classes)


def _loaded(tokenizer: Any, max_length: int) -> Any:
    if isinstance(tokenizer, str | Path):
        tokenizer = _from_pretrained(str(tokenizer))
    if not callable(tokenizer) or not hasattr(tokenizer, "pad_token"):
        raise DataError(f"tokenizer is a {type(tokenizer).__name__}; a Hugging Face tokenizer or its folder is needed")
    if tokenizer.pad_token is None:
        raise DataError(
            "the tokenizer has no padding token, and texts are padded to one length: set tokenizer.pad_token = "
            "tokenizer.eos_token, and the model's config.pad_token_id"
        )
    most = tokenizer.model_max_length
    if not 1 <= max_length <= _LONGEST or (most <= _LONGEST and max_length > most):
        raise DataError(f"max_length is {max_length}; this tokenizer's model takes 1 to {min(most, _LONGEST)} tokens")
    return tokenizer


def _from_pretrained(name: str) -> Any:
    """Load a tokenizer from a folder or from what was downloaded before; else from the hub, if it can be reached."""
    from transformers import AutoTokenizer

    try:
        try:
            return AutoTokenizer.from_pretrained(name, local_files_only=True)
        except (OSError, ValueError):
            if Path(name).exists() or not _hub_answers():
                raise
            return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise DataError(
            f"no tokenizer can be loaded from {quoted(name, 80)}: give the folder that `save_pretrained` wrote, or a "
            "hub name where there is a network"
        ) from error


def _hub_answers() -> bool:
    """Return whether the hub can be reached: its own client tries for most of a minute."""
    if os.environ.get("HTTPS_PROXY") or os.environ.get("https_proxy"):
        return True
    hub = urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co"))
    try:
        socket.create_connection((hub.hostname or "", hub.port or 443), timeout=1).close()
    except OSError:
        return False
    return True


def _read(source: Any, what: str, text: str, label: str) -> tuple[list[str], list[Any]]:
    if isinstance(source, tuple) and len(source) == 2:
        texts, labels = list(source[0]), list(source[1])
    elif isinstance(source, str | Path):
        texts, labels = _of_file(Path(source), text, label)
    else:
        raise DataError(f"{what} is a {type(source).__name__}; a CSV or TSV file, or a pair (texts, labels), is needed")
    if not texts or len(texts) != len(labels):
        raise DataError(f"{what} has {len(texts)} texts and {len(labels)} labels; one label for each text is needed")
    for place, each in enumerate(texts):
        if not isinstance(each, str):
            raise DataError(f"{what}: text {place} is a {type(each).__name__}; every text must be a str")
    return texts, labels


def _of_file(path: Path, text: str, label: str) -> tuple[list[str], list[Any]]:
    with os_errors_as(DataError, str(path), "give a CSV or TSV file with a head line"):
        lines = path.read_text("utf-8", errors="replace").splitlines(keepends=True)
    rows = csv.DictReader(lines, delimiter="\t" if path.suffix == ".tsv" else ",")
    columns = rows.fieldnames or []
    for key, named in (("text", text), ("label", label)):
        if named not in columns:
            raise DataError(
                f"{path} has no column {named!r}; it has {quoted(', '.join(columns), 200)}: name the right one with "
                f"{key}="
            )
    found = list(rows)
    return [row[text] or "" for row in found], [row[label] for row in found]


def _number(label: Any, known: Mapping[str, int] | None, what: str) -> int:
    if known is not None:
        if str(label) not in known:
            raise DataError(f"{what} has the label {quoted(str(label), 60)}, which is none of {', '.join(known)}")
        return known[str(label)]
    try:
        return int(label)
    except (TypeError, ValueError):
        raise DataError(
            f"{what} has the label {quoted(str(label), 60)}, a word: give labels=[…], all words in the order of the "
            "model's outputs"
        ) from None
