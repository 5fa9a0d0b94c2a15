"""A trained module as ONNX, for programs without torch; its model card goes with it."""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedspa import durable
from fedspa.errors import ConfigError, FedspaError, first_line, os_errors_as
from fedspa.examples import Tree, named_leaves, zero_examples
from fedspa.learning.flat import copied
from fedspa.learning.forward import outputs
from fedspa.report import card as cards

_NEEDED = ("onnx", "onnxscript")
_EXAMPLES = 2  # of the batch that is traced: torch takes a batch of one for a size that never changes


def to_onnx(module: nn.Module, like: Tree, card: str, path: Path) -> Path:
    """Write the outputs of `module` for inputs made as `like` to `path`, and `card` to the same path with `.md` behind
    it."""
    if lacking := [name for name in _NEEDED if find_spec(name) is None]:
        raise ConfigError(f"ONNX needs {' and '.join(lacking)}; pip install 'fedspa[onnx]'")
    beside = path.with_name(f"{path.name}.md")
    with os_errors_as(FedspaError, f"{path} cannot be written", "name another file"):
        durable.replace_bytes(path, _model(module, like))
        cards.write(card, beside)
    return path


class _Outputs(nn.Module):
    """What the task's answers are made of, as one tensor, whatever the module returns."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Any) -> Tensor:
        return outputs(self.module, x)


def _model(module: nn.Module, like: Tree) -> bytes:
    """Return the file. The module itself stays as it is: torch's export runs on a copy, in eval mode on the CPU."""
    example = zero_examples(like, _EXAMPLES)
    names = [name or "x" for name, _ in named_leaves(example)]
    batch = torch.export.Dim("records")
    try:
        with _quiet():
            program = torch.onnx.export(
                _Outputs(copied(module).cpu()).eval(),
                (),
                kwargs={"x": example},  # as the last of the positional arguments a dict would be taken for these
                input_names=names,
                output_names=["outputs"],
                dynamic_shapes={"x": _sizes(example, batch)},
                dynamo=True,
                verbose=False,
            )
            assert program is not None
            proto = program.model_proto
    except Exception as error:  # torch's exporter raises many kinds, over code that is the user's
        reason = error.__cause__ if isinstance(error.__cause__, Exception) else error  # torch wraps it in advice
        raise FedspaError(
            f"torch cannot write this {type(module).__name__} as ONNX ({first_line(reason)}); use the module "
            "itself, by fedspa.load_model"
        ) from error
    proto.producer_name = "fedspa"
    _without_traces(proto)
    return bytes(proto.SerializeToString())


def _without_traces(proto: Any) -> None:
    """torch writes the lines of code that each step came from into the file, with the paths of this machine."""
    for graph in (proto.graph, *proto.functions):
        for kind in ("node", "input", "output", "value_info", "initializer"):
            for part in getattr(graph, kind, ()):
                if hasattr(part, "metadata_props"):  # of a function, inputs are mere names
                    del part.metadata_props[:]
        del graph.metadata_props[:]


def _sizes(example: Tree, batch: Any) -> Any:
    """Say, in the form of the example, which sides may be of any size: the first of each tensor."""
    if isinstance(example, dict):
        return {key: _sizes(part, batch) for key, part in example.items()}
    if isinstance(example, tuple):
        return tuple(_sizes(part, batch) for part in example)
    return {0: batch}


@contextmanager
def _quiet() -> Iterator[None]:
    """torch's exporter talks of itself on every way there is, which is nothing to its user."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
