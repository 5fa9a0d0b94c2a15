"""What works on this machine: each question asked of the real thing, each answer with what to do about it.

Nothing here raises: a package that is missing or broken is an answer. So every heavy import waits inside its question.
"""

from __future__ import annotations

import operator
import os
import platform
import re
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

_EXTRAS_OF_DEVELOPERS = {"dev", "fuzz", "docs"}
_OLDEST_PYTHON = (3, 11)
# An extra that nobody asked for is no fault; one of the wrong version is.
_BEST_LAST = (False, None, True)


@dataclass(frozen=True)
class Answer:
    """`works` is None where there is nothing to be right or wrong. `needed`: the quickstart cannot do without it."""

    topic: str
    subject: str
    works: bool | None
    detail: str
    needed: bool = False


def examine() -> list[Answer]:
    """Every question, in the order in which a reader wants the answers."""
    return [answer for question in _QUESTIONS for answer in _asked(question)]


def ready(answers: list[Answer]) -> bool:
    """Whether the quickstart can run here."""
    return all(answer.works is not False for answer in answers if answer.needed)


def _asked(question: Callable[[], Iterator[Answer]]) -> Iterator[Answer]:
    try:
        yield from question()
    except Exception as cause:  # a broken install can raise anything, and that is the finding
        name = question.__name__.strip("_")
        yield Answer(name, name, False, f"{type(cause).__name__}: {cause}", needed=question in _NEEDED)


def _python() -> Iterator[Answer]:
    from fedspa import __version__

    yield Answer("python", "fedspa", None, f"{__version__}, in {Path(__file__).parents[1]}")
    fits = sys.version_info >= _OLDEST_PYTHON
    oldest = ".".join(map(str, _OLDEST_PYTHON))
    detail = platform.python_version() if fits else f"{platform.python_version()}; install {oldest} or newer"
    yield Answer("python", "Python", fits, detail, needed=True)


def _torch() -> Iterator[Answer]:
    import torch

    yield Answer("torch", "torch", True, str(torch.__version__), needed=True)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield Answer("torch", "cpu", True, f"{cores} cores ({platform.machine()}); run.threads uses up to that many")
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        yield Answer("torch", f"cuda:{index}", True, f"{about.name}, {about.total_memory / 2**30:.0f} GiB")
    if not torch.cuda.is_available():
        built = torch.version.cuda
        why = "this torch was built without CUDA" if built is None else f"torch is built for CUDA {built}, no GPU found"
        yield Answer("torch", "cuda", None, f"none: {why}")


def _engines() -> Iterator[Answer]:
    import torch

    from fedspa.engine import stacked
    from fedspa.engine.native import library

    missing, (compiler, found) = library.missing(), library.compiler()
    if missing is None:
        yield Answer("engines", "native", True, f"built, instruction set {library.best_level()}")
    else:
        detail = f"{missing.why}: {missing.mend}. Until then `auto` takes another one, which is slower"
        yield Answer("engines", "native", False, detail)
    yield Answer("engines", "compiler", None, found or f"no {compiler} here; only building native needs one")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    obstacle = stacked.device_obstacle(device, exact=False)
    where = "on the GPU" if device == "cuda" else "on this CPU, slowly: it is made for GPUs"
    detail = where if obstacle is None else f"{obstacle.why}: {obstacle.mend}"
    yield Answer("engines", "stacked", obstacle is None, detail)
    detail = (
        f"any module that torch can trace, on this {'GPU' if device == 'cuda' else 'CPU'}"
        if obstacle is None
        else detail
    )
    yield Answer("engines", "traced", obstacle is None, detail)
    yield Answer("engines", "generic, reference", True, "any module that autograd goes through")


def _extras() -> Iterator[Answer]:
    """As this install's own metadata lists them (`packaging`, which reads such lines in full, may not be here)."""
    try:
        lines = metadata.requires("fedspa") or []
    except metadata.PackageNotFoundError:
        yield Answer("extras", "fedspa", None, "not installed as a package; extras cannot be told")
        return
    groups: dict[str, list[str]] = {}
    for line in lines:
        if extra := re.search(r"""extra == ["']([^"']+)""", line):
            groups.setdefault(extra[1], []).append(line.partition(";")[0])
    for name, asked in sorted(groups.items()):
        if name not in _EXTRAS_OF_DEVELOPERS:
            states = [_state(requirement) for requirement in asked]
            works = min((fits for fits, _ in states), key=_BEST_LAST.index)
            todo = "" if works else f": pip install 'fedspa[{name}]'"
            yield Answer("extras", name, works, ", ".join(said for fits, said in states if fits is works) + todo)


def _state(requirement: str) -> tuple[bool | None, str]:
    """Whether `name[extra]>=a,<b` is installed within its bounds (None: not at all), and how to say it."""
    match = re.match(r"([\w.-]+)(?:\[[^]]*\])?\s*(.*)", requirement)
    assert match is not None
    name, bounds = match[1], match[2].strip()
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        return None, f"no {name}"
    compare = {">=": operator.ge, "<": operator.lt, "==": operator.eq}
    for sign, bound in re.findall(r"(>=|==|<)\s*([\d.]+)", bounds):
        if not compare[sign](_numbers(version), _numbers(bound)):
            return False, f"{name} {version} is not {bounds}"
    return True, f"{name} {version}"


def _numbers(version: str) -> tuple[int, ...]:
    leading = re.match(r"[\d.]*\d", version)
    return tuple(int(part) for part in leading[0].split(".")) if leading else ()


def _data() -> Iterator[Answer]:
    from fedspa.data import datasets
    from fedspa.errors import DataError, real_path

    yield Answer("data", "digits", True, "within scikit-learn")
    places = {"./data": Path("data")}
    if named := os.environ.get("FEDSPA_DATA"):
        places["$FEDSPA_DATA"] = Path(named)
    names: tuple[Literal["mnist", "cifar10"], ...] = ("mnist", "cifar10")
    for name in names:
        found = []
        for label, folder in places.items():
            try:
                datasets.files(name, folder)
                found.append(f"in {label} ({real_path(folder)})")
            except DataError:
                continue
        nowhere = f"not in {' or '.join(places)}; name its folder by data.dir"
        yield Answer("data", name, True if found else None, "; ".join(found) or nowhere)


def _folder() -> Iterator[Answer]:
    with tempfile.TemporaryDirectory(dir=".", prefix=".fedspa-doctor-"):
        yield Answer("folder", "current folder", True, f"{Path.cwd()} can be written: runs go to runs/", needed=True)


def _quickstart() -> Iterator[Answer]:
    """One real round: data, model, accountant, engine, ledger, checkpoint, files."""
    from fedspa.errors import RunWarning
    from fedspa.running import simulate
    from fedspa.runs.config import load

    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore", RunWarning)  # one round learns little
        # TOML would take a backslash in the path for an escape; Config takes the text as it is.
        config = load(None, ["federation.rounds=1"])
        config = config.model_copy(update={"run": config.run.model_copy(update={"out": f"{folder}/run"})})
        summary = simulate(config, progress=False).summary
    seconds = time.monotonic() - started
    detail = f"one round in {seconds:.1f} s, engine {summary['engine']}"
    yield Answer("quickstart", "fedspa run", True, detail, needed=True)


_NEEDED = (_python, _torch, _folder, _quickstart)
_QUESTIONS = (_python, _torch, _engines, _extras, _data, _folder, _quickstart)
