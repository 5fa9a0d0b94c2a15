"""torch.fx, but for what its graphs forget."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx


class Forgotten(Exception):
    """A part of the forward pass runs under a switch of torch's that a graph of its operations does not have."""


class Tracer(fx.Tracer):
    """Refuses a forward pass that switches gradients off or autocast on for a part of itself: the graph would train
    what the module keeps as it is, or compute in another precision."""

    def trace(self, root: Any, concrete_args: dict[str, Any] | None = None) -> fx.Graph:
        with torch.enable_grad():
            self._before = _switches()
            return super().trace(root, concrete_args)

    def create_node(self, *arguments: Any, **options: Any) -> fx.Node:
        if _switches() != self._before:
            raise Forgotten("it runs a part of itself under torch.no_grad or torch.autocast")
        return super().create_node(*arguments, **options)


def _switches() -> tuple[bool, ...]:
    return torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")
