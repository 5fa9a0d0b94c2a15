"""From a config to everything a run needs, checked before anything is written."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fedspa.algorithms import ALGORITHMS, Algorithm
from fedspa.data.datasets import Dataset, load
from fedspa.data.features import Features
from fedspa.data.partition import partition
from fedspa.data.view import view
from fedspa.engine.choose import choose, reason
from fedspa.engine.task import Engine
from fedspa.errors import ConfigError, DataError
from fedspa.learning import models
from fedspa.learning.flat import FlatModel
from fedspa.learning.initial import oriented
from fedspa.mechanisms import Plan
from fedspa.runs.config import Config
from fedspa.runs.guarantee import refuse_unpriced
from fedspa.runs.plans import calibrated_plan, cap_of
from fedspa.server.optimizers import ServerOptimizer
from fedspa.wire.payload import Coding


@dataclass(frozen=True)
class Job:
    """A run that could start now. `holdings[i]` are the training records of agent i."""

    config: Config
    data: Dataset
    holdings: list[NDArray[np.int64]]
    model: FlatModel
    engine: Engine
    engine_reason: str
    algorithm: Algorithm
    optimizer: ServerOptimizer
    active: int
    cap: int
    plan: Plan | None
    layers: tuple[tuple[int, int], ...] | None = None

    @property
    def coding(self) -> Coding:
        """`int` where there is noise to hide the rounding in, `f32` where not, unless the config says otherwise."""
        return self.config.algorithm.coding or ("int" if self.plan is not None else "f32")


def prepare(config: Config, data: Dataset | None = None, module: nn.Module | None = None) -> Job:
    """Load, deal out, build and calibrate. `data` and `module` stand in for what the config names."""
    data, given = data if data is not None else records_of(config), module
    holdings = partition(
        data.train_y.numpy(),
        config.federation.agents,
        config.data.partition,
        alpha=config.data.alpha,
        seed=config.run.seed,
    )
    input_shape = tuple(data.train_x.shape[1:])
    if module is None:
        module = models.build(config.model.name, input_shape, data.classes, config.run.seed)
        if config.model.init == "oriented":
            oriented(module, config.run.seed)
    if not isinstance(module, nn.Module):
        raise ConfigError(f"module is a {type(module).__name__}; it must be a torch.nn.Module, built and ready")
    module = module.to(_device(config.run.device))
    model = FlatModel(module)
    if given is not None:
        _try_scores(model, input_shape, data.classes)
    algorithm = ALGORITHMS[config.algorithm.name]
    # cpSGD compresses by the size of its numbers: every coordinate travels.
    layers = _layers(config.algorithm.layer_shares, model.sizes)
    active = _active(config.algorithm.compression, model.dimension) if algorithm.sparse else model.dimension
    if layers is not None:
        active = sum(k for _, k in layers)
    records = _smallest_holding(config, holdings)
    plan = calibrated_plan(config, model.dimension, active, records) if algorithm.private else None
    if plan is not None:
        refuse_unpriced(plan, config.privacy.accountant)
    settings = config.algorithm
    run, exact = config.run, config.privacy.noise == "exact"
    engine = choose(run.engine, module, input_shape, run.device, run.threads, exact, run.tf32)
    return Job(
        config=config,
        data=data,
        holdings=holdings,
        model=model,
        engine=engine,
        engine_reason=reason(run.engine, module, input_shape, run.device, exact),
        algorithm=algorithm,
        optimizer=ServerOptimizer(
            step=settings.server or algorithm.server,
            server_lr=settings.server_lr,
            beta1=settings.beta1,
            beta2=settings.beta2,
            kappa=settings.kappa,
            ema=settings.ema,
            lr_decay=settings.lr_decay,
        ),
        active=active,
        cap=cap_of(config),
        plan=plan,
        layers=layers,
    )


def records_of(config: Config, data: Dataset | None = None) -> Dataset:
    """The records that the config names, or those given, as its features and with its share held out."""
    if data is not None and not isinstance(data, Dataset):
        raise DataError(
            f"data is a {type(data).__name__}; make it by fedspa.from_arrays(train_x, train_y, test_x, test_y, name=…)"
        )
    named, alone = config.data, config.privacy.noise == "exact"
    if data is None and named.features is not None:
        return _mapped(named.name, named.dir, named.features, named.holdout, alone)
    data = data if data is not None else load(named.name, Path(named.dir))
    return view(data, named.features, named.holdout, alone=alone)


@lru_cache(maxsize=1)  # a sweep runs many configs on the same features, which take longer to make than some runs
def _mapped(name: str, folder: str, features: Features, holdout: float, alone: bool) -> Dataset:
    return view(load(name, Path(folder)), features, holdout, alone=alone)


def _try_scores(model: FlatModel, input_shape: tuple[int, ...], classes: int) -> None:
    """Three blank records through a module that no config named."""
    theta = model.flatten()
    blank = torch.zeros(3, *input_shape, device=theta.device)
    models.check_scores(lambda x: model.logits(theta, x), blank, classes, "the module")


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.ones(1, device=device).item()  # some devices, such as meta, hold no values
    except Exception as cause:  # each backend of torch has its own way to say that it is not there
        raise ConfigError(f"run.device is {name!r}, which cannot compute on this machine; cpu can") from cause
    return device


def _active(compression: float, dimension: int) -> int:
    if compression * dimension < 1:
        raise ConfigError(
            f"algorithm.compression is {compression}; with d = {dimension} parameters it leaves no active coordinate: "
            f"it must be at least {1 / dimension:.3g}"
        )
    return round(compression * dimension)


def _layers(shares: list[float] | None, sizes: list[int]) -> tuple[tuple[int, int], ...] | None:
    """(d_j, k_j) of each parameter tensor."""
    if shares is None:
        return None
    if len(shares) != len(sizes):
        raise ConfigError(
            f"algorithm.layer_shares has {len(shares)} shares; the model has {len(sizes)} parameter tensors, of "
            f"{', '.join(map(str, sizes))} coordinates: one share for each"
        )
    layers = tuple((size, round(share * size)) for share, size in zip(shares, sizes))
    if not any(active for _, active in layers):
        raise ConfigError("algorithm.layer_shares leaves no active coordinate: at least one share must be larger")
    return layers


def _smallest_holding(config: Config, holdings: list[NDArray[np.int64]]) -> int:
    """The fewest records an agent has: its sampling rate is the largest, so noise that serves it serves all."""
    sizes = {len(indices) for indices in holdings}
    if config.algorithm.batch > min(sizes):
        raise ConfigError(
            f"algorithm.batch is {config.algorithm.batch}; the smallest of the {len(holdings)} agents holds "
            f"{min(sizes)} records: at most that"
        )
    if config.private and config.privacy.delta >= 1 / max(sizes):
        raise ConfigError(
            f"privacy.delta is {config.privacy.delta}; agents hold up to {max(sizes)} records: it must be below "
            f"1/{max(sizes)} = {1 / max(sizes):.3g}"
        )
    return min(sizes)
