"""Every algorithm on every engine with every listed option: refused before anyone pays, or a round that ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from config_keys import keys, listed
from small_runs import ALGORITHMS, small

import fedspa
from fedspa.errors import ConfigError
from fedspa.learning.forward import torch_threads
from fedspa.runs.config import Config, load
from fedspa.runs.local import LocalTransport
from fedspa.runs.loop import run_round
from fedspa.runs.sections import Run
from fedspa.runs.setup import prepare
from fedspa.server.coordinator import Coordinator

NAMES = tuple(ALGORITHMS)
ENGINES = get_args(Run.model_fields["engine"].annotation)
QUICK = {("fedspa", "auto"), *((name, "generic") for name in NAMES)}
OPTIONS = [
    (key, value)
    for key, kind, _ in keys()
    if key.startswith(("algorithm.", "privacy.")) and key != "algorithm.name"
    for value in listed(kind) or []
]


def records() -> fedspa.Dataset:
    chance = torch.Generator().manual_seed(0)
    x, y = torch.randn(60, 4, generator=chance), torch.arange(60) % 3
    return fedspa.from_arrays(x, y, x, y, name="few")


def made(name: str, engine: str, key: str, value: Any) -> Config:
    beside = ALGORITHMS[name]
    sizes = {"agents": 2, "rounds": 1, "per_round": 2}
    merged: dict[str, dict[str, Any]] = {each: dict(values) for each, values in beside.items()}
    merged["federation"] = {**merged.get("federation", {}), **sizes}
    merged["run"] = {"engine": engine}
    config = small(Path("unused"), **merged)
    *sections, option = key.split(".")
    inner: dict[str, Any] = config
    for section in sections:
        inner = inner.setdefault(section, {})
    inner[option] = value
    return load(config)


@pytest.mark.parametrize(
    ("name", "engine"),
    [
        pytest.param(name, engine, marks=[] if (name, engine) in QUICK else [pytest.mark.long])
        for name in NAMES
        for engine in ENGINES
    ],
)
def test_it_is_refused_before_it_starts_or_a_round_ends(name: str, engine: str) -> None:
    data, ended = records(), []
    for key, value in OPTIONS:
        try:
            job = prepare(made(name, engine, key, value), data)
        except ConfigError:  # and no other
            continue
        with torch_threads(1):
            metrics = run_round(Coordinator(job.server), LocalTransport(job), [0, 1])
        assert metrics.agents == 2, (key, value)
        ended.append((key, value))
    assert len(ended) > 10
