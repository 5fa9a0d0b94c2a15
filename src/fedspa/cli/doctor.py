"""`fedspa doctor`: check this machine, or say what a run would do with a model.

Every heavy import waits inside its check: a package that is missing or broken is a failed check, not an exception.
"""

from __future__ import annotations

import math
import os
import platform
import tempfile
import time
import warnings
from collections.abc import Iterator
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedspa.cli.screen import AsJson, show_checks
from fedspa.errors import Check, ConfigError, quoted, run_checks

if TYPE_CHECKING:
    from torch import nn

    from fedspa.data.dataset import Dataset
    from fedspa.runs.config import Config

# What each extra installs first, by the names of package and module.
EXTRAS = {
    "flower": ("flwr", "flwr"),
    "parquet": ("pyarrow", "pyarrow"),
    "plots": ("matplotlib", "matplotlib"),
    "ray": ("ray", "ray"),
}
_CLASSES = 10
_BATCHES = 4  # that an agent's synthetic records fill


def doctor(
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Check a model: a name as in model.name, package.module:function, or a config file (.toml).",
        ),
    ] = None,
    shape: Annotated[
        str | None, typer.Option(metavar="SIDES", help="Shape of synthetic records for --model, as in 1,28,28.")
    ] = None,
    classes: Annotated[int | None, typer.Option(help="Classes of the records of --shape (10).")] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key of --model's config.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check this machine: torch, devices, engines, extras, the current folder, and one round of the quickstart.

    With --model: whether the model can be trained privately, which engine trains it and why, and what would make it
    faster. Without --shape the records are those of the config, or the quickstart's.

    Exit code 0: the quickstart, or the model, can run; 1: it cannot.

    Example: fedspa doctor --model my_model:build --shape 3,32,32
    """
    if model is None:
        if overrides or shape is not None or classes is not None:
            raise ConfigError("--set, --shape and --classes require --model; name a model")
        show_checks("fedspa", check_machine(), as_json)
        return
    show_checks(model, diagnose(model, overrides or [], shape, classes), as_json)


def check_machine() -> list[Check]:
    """Run every check of the machine; a broken install can raise anything."""
    checks = (_torch, _engines, _extras, _folder, _quickstart)
    return run_checks({check.__name__.strip("_"): check for check in checks}, expected=Exception)


def _torch() -> Iterator[Check]:
    import torch

    from fedspa import __version__

    yield Check("fedspa", None, f"{__version__}, in {Path(__file__).parents[1]}")
    yield Check("torch", True, f"{torch.__version__}, Python {platform.python_version()}")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield Check("cpu", True, f"{cores} cores ({platform.machine()}); run.threads uses up to that many")
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        yield Check(f"cuda:{index}", True, f"{about.name}, {about.total_memory / 2**30:.0f} GiB")
    if not torch.cuda.is_available():
        why = "torch was built without CUDA" if torch.version.cuda is None else "no GPU was found"
        yield Check("cuda", None, f"none: {why}")


def _engines() -> Iterator[Check]:
    import torch

    from fedspa.engine.choose import device_unsupported
    from fedspa.engine.native import library

    missing, (compiler, found) = library.missing(), library.compiler()
    if missing is None:
        yield Check("native", True, f"built, instruction set {library.best_level()}")
    else:
        detail = f"{missing.reason}: {missing.fix}. Until then `auto` takes a slower engine"
        yield Check("native", False, detail, required=False)
    yield Check("compiler", None, found or f"no {compiler}; only building the native engine needs one")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        unfit = device_unsupported(device)
        detail = "on the GPU" if unfit is None else f"{unfit.reason}: {unfit.fix}"
        yield Check("traced", unfit is None, detail, required=False)
    else:
        yield Check("traced", True, "any module that torch can trace")
    yield Check("generic", True, "any module that autograd can differentiate; reference: the same in float64")


def _extras() -> Iterator[Check]:
    for extra, (package, module) in EXTRAS.items():
        if find_spec(module) is None:
            yield Check(extra, None, f"not installed: pip install 'fedspa[{extra}]'")
        else:
            yield Check(extra, True, f"{package} {metadata.version(package)}")


def _folder() -> Iterator[Check]:
    with tempfile.TemporaryDirectory(dir=".", prefix=".fedspa-doctor-"):
        yield Check("current folder", True, f"{Path.cwd()} is writable: runs go to runs/")


def _quickstart() -> Iterator[Check]:
    """Run one real round: data, model, accountant, engine, ledger, checkpoint, files."""
    from fedspa.errors import RunWarning
    from fedspa.running import run
    from fedspa.runs.config import load

    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore", RunWarning)  # one round learns little
        # TOML would take a backslash in the path for an escape; Config takes the text as it is.
        config = load(None, ["federation.rounds=1"])
        config = config.model_copy(update={"run": config.run.model_copy(update={"out": f"{folder}/run"})})
        summary = run(config, progress=False).summary
    yield Check("quickstart", True, f"one round in {time.monotonic() - started:.1f} s, engine {summary['engine']}")


def diagnose(source: str, overrides: list[str], shape: str | None, classes: int | None) -> list[Check]:
    """Try a model as a run would. `source` is a config file, or a model as in `model.name` with the quickstart's
    settings."""
    from fedspa.errors import MixingWarning, SeededNoiseWarning
    from fedspa.examples import layout
    from fedspa.learning import models
    from fedspa.learning.flat import FlatModel
    from fedspa.learning.layers import Unsound, layer_problems
    from fedspa.learning.models import require_fit
    from fedspa.learning.validate import trial
    from fedspa.runs.config import load
    from fedspa.runs.setup import prepare, records_of, task_of, with_targets

    is_config = source.endswith(".toml")
    if shape is not None and is_config:
        raise ConfigError("--shape replaces the data, and a config names its own; leave one of them out")
    if shape is None and classes is not None:
        raise ConfigError(f"--classes is {classes}, and there is no --shape; give both, or neither")
    config = load(source if is_config else None, [*([] if is_config else [f"model.name={source}"]), *overrides])
    data = records_of(config) if shape is None else _synthetic(config, _sides(shape), classes or _CLASSES)
    task = task_of(config, data)
    like, name = with_targets(data, task).example_spec, config.model.name
    module = models.build(name, data.input_shape, task.width, config.run.seed, config.run.code)
    problems = list(layer_problems(module))
    if not problems:
        require_fit(FlatModel(module, task), like, f"model.name = {name!r}")
        problems = trial(module, like, task).problems
    trained, frozen = (_count_parameters(module, trained=trained) for trained in (True, False))
    checks = [
        Check("model", None, f"{name}: d = {trained:,} parameters" + (f", {frozen:,} frozen" if frozen else "")),
        Check("records", None, f"{layout(like.x)} (data {data.name!r})"),
        *(Check("problem", False, str(problem), required=problem.unsound) for problem in problems),
    ]
    if any(problem.unsound for problem in problems):
        return checks
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", MixingWarning)  # it is among the problems
            warnings.simplefilter("ignore", SeededNoiseWarning)
            choice = prepare(config, data).training.choice
    except Unsound as refused:
        return [*checks, Check("problem", False, str(refused.problem))]
    return [
        *checks,
        Check("engine", True, f"{choice.engine} on {config.run.device}: {choice.why}"),
        *(Check(f"not {engine}", None, unsupported.reason) for engine, unsupported in choice.passed.items()),
        *(Check("faster", None, hint) for hint in choice.hints),
    ]


def _sides(shape: str) -> tuple[int, ...]:
    """Parse `--shape`."""
    from fedspa.randomness.mask import DIMENSION_LIMIT

    words = [side.strip() for side in shape.split(",")]
    sides = [int(word) if word.isdecimal() and len(word) <= 10 else 0 for word in words]
    if not 0 < math.prod(sides) < DIMENSION_LIMIT:
        raise ConfigError(
            f"--shape is {quoted(shape)}; give the sides of one record, as in 1,28,28 or 30: whole numbers whose "
            f"product is below {DIMENSION_LIMIT}"
        )
    return tuple(sides)


def _count_parameters(module: nn.Module, *, trained: bool) -> int:
    from torch.nn.parameter import is_lazy

    return sum(p.numel() for p in module.parameters() if p.requires_grad is trained and not is_lazy(p))


def _synthetic(config: Config, sides: tuple[int, ...], classes: int) -> Dataset:
    import torch

    from fedspa.data.adapters import from_arrays

    records = config.federation.agents * _BATCHES * config.algorithm.batch
    x = torch.rand(records, *sides, generator=torch.Generator().manual_seed(0))
    y = torch.arange(len(x)) % classes
    return from_arrays(x, y, x[:classes], y[:classes], name="synthetic", classes=classes)
