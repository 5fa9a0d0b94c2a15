"""A program compared with plain autograd before it is used.

A trace is right where torch's rules for vmap are, and where a module does for mapped tensors what it does for others:
one that catches an exception by which vmap refuses something, for example, does not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fedspa.engine.traced.capture import Untraceable
from fedspa.examples import Examples
from fedspa.learning.agreement import Disagreement, Rows, require_agreement
from fedspa.learning.flat import FlatModel
from fedspa.learning.forward import Modes, in_modes
from fedspa.learning.synthetic import synthetic_examples

aten = torch.ops.aten
# Other numbers of examples than those of the trace, below them and above.
_SIZES = 1, 7


def verify(model: FlatModel, modes: Modes, like: Examples, rows: Rows) -> None:
    """Raise `Untraceable` unless `rows`, where Dropout keeps everything, are the gradients of single examples."""
    examples = synthetic_examples(like, model.module, model.task)
    try:
        with in_modes(modes):
            require_agreement(model, examples, rows, sizes=_SIZES, mode=_KeepAll)
    except Disagreement as error:
        raise Untraceable(
            f"its gradients of examples that are taken together are not those of single ones (parameters {error})"
        ) from error


class _KeepAll(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Bernoulli variables are all one, as in a program without a generator."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is aten.bernoulli_.float:
            return aten.fill_.Scalar(args[0], 1)
        return function(*args, **(kwargs or {}))
