"""Which of the two failed: a loss of the user's own, or the module that it calls."""

from __future__ import annotations

import traceback

import torch
from torch import nn

from fedspa.examples import Tree
from fedspa.learning.forward import returned
from fedspa.learning.traces.watch import tensors


def of_function(error: Exception, module: nn.Module, x: Tree) -> bool:
    """Whether the error that such inputs ended in is the function's. A module that takes them by itself, and gives what
    has a gradient, is not to blame for what it was handed."""
    try:
        found = tensors(returned(module, x))
    except Exception:  # it may be one that wants to be called in another way
        kinds = {type(layer) for layer in module.modules()}
        return not any(type(frame.f_locals.get("self")) in kinds for frame, _ in traceback.walk_tb(error.__traceback__))
    return not torch.is_grad_enabled() or any(values.requires_grad for values in found)
