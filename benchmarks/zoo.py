"""Which model types of public libraries train privately, and whether their per-example gradients are exact.

    python benchmarks/zoo.py --lib FOLDER --out benchmarks/results/zoo.json

Each type is built tiny with random weights. It makes one private round by `fedspa.run`, and the gradients of single
examples by the engine that a run takes, and by the float64 reference, are compared with plain autograd in float64.
FOLDER holds libraries that are not dependencies of fedspa:
`pip install --target FOLDER --no-deps timm torchvision torch_geometric diffusers …`. Types run in a worker process with
a time limit each, so that no type ends the benchmark. An interrupted benchmark resumes where it stopped.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import os
import select
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fedspa
import zoo_models
from fedspa.engine.choose import EngineRequest, choose
from fedspa.engine.local import engine_rows
from fedspa.engine.per_example import float64_reference
from fedspa.errors import FedspaError, one_line
from fedspa.examples import Examples, Tree, in_float64, single_examples, zero_examples
from fedspa.learning.flat import FlatModel
from fedspa.learning.tasks import Task
from fedspa.learning.tasks.named import resolve
from provenance import in_parts, stamp

TIME_LIMIT = 60.0
LARGEST = 3_000_000  # parameters: a type whose config was not shrunk says nothing more and takes minutes
# Largest differences allowed, relative to the largest entry of an example's gradient. In float32 a type may amplify
# rounding: then as much as plain autograd in float32 differs from itself in float64, times ten.
NEAR_FLOAT64, NEAR_FLOAT32, AMPLIFIED = 1e-7, 1e-4, 10
CONFIG = {
    "federation": {"agents": 2, "rounds": 1, "per_round": 2},
    "algorithm": {"compression": 0.5, "local_steps": 1, "batch": 2},
    "privacy": {"epsilon": 8.0, "delta": 1e-3, "noise": "seeded"},
}
# Lines that a refusal may name, and what each does to a module.
FIXES: dict[str, Callable[[torch.nn.Module], torch.nn.Module]] = {
    "module = fedspa.fix(module)": fedspa.fix,
    "module.config.apply_spec_augment = False": lambda module: _set(module, apply_spec_augment=False),
}


def _set(module: Any, **options: object) -> torch.nn.Module:
    for name, value in options.items():
        setattr(module.config, name, value)
    return module  # type: ignore[no-any-return]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lib", type=Path, help="a folder with libraries that are not installed")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", default="", help="types whose names contain this")
    parser.add_argument("--json", action="store_true", help="print the result")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.lib is not None:
        sys.path.append(str(options.lib))
    if options.worker:
        work()
        return
    names, missing = zoo_models.names()
    pool = Worker(options.lib)
    document = in_parts(
        "types",
        [name for name in names if options.only in name],
        pool.measure,
        {"largest": LARGEST, "time_limit": TIME_LIMIT, "missing": missing},
        options.out,
        lambda: stamp(*zoo_models.PACKAGES),
    )
    pool.stop()
    print(json.dumps(document, indent=1) if options.json else Counter(kind(row) for row in document["types"].values()))


def kind(row: dict[str, Any]) -> str:
    return str(row["outcome"]).partition(":")[0].partition(" by ")[0]


class Worker:
    """A process that measures one type after another, and is started again when it dies or takes too long."""

    def __init__(self, lib: Path | None) -> None:
        self._command = [sys.executable, __file__, "--worker", *(["--lib", str(lib)] if lib else [])]
        self._process: subprocess.Popen[str] | None = None

    def measure(self, name: str) -> dict[str, Any]:
        if self._process is None:
            self._process = subprocess.Popen(
                self._command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        print(name, file=process.stdin, flush=True)
        ready, _, _ = select.select([process.stdout], [], [], TIME_LIMIT)
        line = process.stdout.readline() if ready else ""
        if line:
            found: dict[str, Any] = json.loads(line)
            return found
        self.stop()
        ended = f"the process ended with status {process.returncode}" if ready else f"no answer in {TIME_LIMIT:g} s"
        return {"outcome": f"not measured: {ended}"}

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def work() -> None:
    """Answer each name on standard input with a line of JSON on standard output."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what models print goes elsewhere
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for line in sys.stdin:
        print(json.dumps(outcome(line.strip())), file=answers, flush=True)


def outcome(name: str) -> dict[str, Any]:
    try:
        model = build(name)
        dimension = sum(parameter.numel() for parameter in model.module.parameters())
        if dimension > LARGEST:
            raise ValueError(f"{dimension:,} parameters: its config is not shrunk")
        with torch.no_grad():
            zoo_models.loss(model.module.eval(), (model.x, model.y))
    except Exception as error:
        return {"outcome": f"not built: {type(error).__name__}: {one_line(error)[:200]}"}
    fixes: list[str] = []
    while True:
        try:
            private_round(fixed(build(name).module, fixes), model)
            break
        except FedspaError as error:
            fix = next((each for each in FIXES if f"`{each}`" in str(error) and each not in fixes), "")
            if not fix:
                return {"outcome": f"refused: {error}", "dimension": dimension}
            fixes.append(fix)
        except (Exception, SystemExit) as error:
            return {"outcome": f"DIED: {type(error).__name__}: {one_line(error)[:300]}", "dimension": dimension}
    runs = f"fixed by `{'`, `'.join(fixes)}`" if fixes else "runs"
    try:
        found = differences(fixed(build(name).module, fixes), model)
    except Exception as error:
        return {"outcome": f"not compared: {type(error).__name__}: {one_line(error)[:300]}", "dimension": dimension}
    exact = found["float64"] is None or found["float64"] <= NEAR_FLOAT64
    near = found["engine_float32"] <= max(NEAR_FLOAT32, AMPLIFIED * found["plain_float32"])
    return {"outcome": runs if exact and near else f"WRONG: {runs}, and its gradient differs"} | found


def build(name: str) -> zoo_models.Model:
    """Return the type anew: a copy's closures would lead to the parameters of the original."""
    torch.manual_seed(0)
    return zoo_models.build(name)


def fixed(module: torch.nn.Module, fixes: list[str]) -> torch.nn.Module:
    for fix in fixes:
        module = FIXES[fix](module)
    return module


def private_round(module: torch.nn.Module, model: zoo_models.Model) -> None:
    data = fedspa.from_arrays(model.x, model.y, model.x, model.y, name="zoo")
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        config = CONFIG | {"run": {"out": folder, "workers": 1}}
        result = fedspa.run(config, data=data, module=module, task=model.task, progress=False)
        if not result.metrics[0].loss == result.metrics[0].loss:
            raise FedspaError("the loss after one round is not finite")


def differences(module: torch.nn.Module, model: zoo_models.Model) -> dict[str, Any]:
    """Largest differences from plain autograd in float64, in eval mode, where nothing is drawn, and at another θ than
    the module holds."""
    module, x, y = module.eval(), model.x, model.y
    data = fedspa.from_arrays(x, y, x, y, name="zoo")
    task = resolve(model.task, data.train_y, data.classes, data.key)
    theta = FlatModel(module, task).flatten()
    theta = theta + 0.02 * torch.randn(theta.shape, generator=torch.Generator().manual_seed(1))
    like = Examples(zero_examples(x), zero_examples(y))
    engine = choose(EngineRequest("auto", module, like, "cpu", 1, exact=False, task=task))
    alone = plain(module, task, theta, x, y).double()
    rows = {"engine_float32": engine_rows(engine, theta, x, y, torch.arange(len(theta))).double()}
    try:
        wanted = plain(module, task, theta.double(), in_float64(x), in_float64(y))
        rows["float64"] = torch.cat(list(float64_reference(module, task).rows(theta.double(), x, y, None)))
        rows["plain_float32"] = alone
    except RuntimeError:  # some layers do not run in float64, as those of mixtures of experts
        wanted = alone
    if not bool(wanted.isfinite().all()):
        raise ValueError("plain autograd has no finite gradient, in float64 and eval mode, for one of the examples")
    size = wanted.abs().amax(dim=1, keepdim=True)
    if not bool((size > 0).all()):
        raise ValueError("the gradient of an example is 0")
    far = {what: float(((found - wanted).abs() / size).max()) for what, found in rows.items()}
    return {"engine": engine.name, "dimension": len(theta), "float64": None, "plain_float32": 0.0} | far


def plain(module: torch.nn.Module, task: Task, theta: Tensor, x: Tree, y: Tree) -> Tensor:
    """Gradients by nothing but torch: a backward pass for each example."""
    held, rows = copy.deepcopy(module).to(theta.dtype), []
    trained = [parameter for parameter in held.parameters() if parameter.requires_grad]
    torch.nn.utils.vector_to_parameters(theta, trained)
    for one, target in zip(single_examples(x), single_examples(y)):
        parts = torch.autograd.grad(task.loss(held, one, target), trained, materialize_grads=True)
        rows.append(torch.cat([part.to_dense().flatten() for part in parts]))
    return torch.stack(rows)


if __name__ == "__main__":
    main()
