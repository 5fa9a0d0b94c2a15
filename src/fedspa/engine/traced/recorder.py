"""A function's operations written down while it runs: what torch dispatches below vmap and grad, in order."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten


def record(function: Callable[..., Sequence[Tensor]], given: Sequence[Tensor]) -> fx.GraphModule:
    """(given) → list of tensors. Tensors that come from elsewhere are held as they are. Nodes know shapes and types."""
    recorder = _Recorder(given)
    with recorder:
        found = function(*given)
    return recorder.module(found)


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, given: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._graph, self._root = fx.Graph(), nn.Module()
        self._nodes: dict[int, fx.Node] = {}
        self._alive: list[Tensor] = []  # a tensor is known by its address, which another may have after it
        for number, tensor in enumerate(given):
            self._know(tensor, self._graph.placeholder(f"given_{number}"))

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is aten.lift_fresh.default:
            return self._fresh(*args)
        wanted = pytree.tree_map_only(Tensor, self._node, (args, kwargs))
        found = function(*args, **kwargs)
        made = self._graph.call_function(function, *wanted)
        if isinstance(found, Tensor):
            self._know(found, made)
        elif isinstance(found, tuple | list):
            for place, each in enumerate(found):
                if isinstance(each, Tensor):
                    self._know(each, self._graph.call_function(operator.getitem, (made, place)))
        return found

    def _fresh(self, tensor: Tensor) -> Tensor:
        """What torch.tensor makes is made anew each time: a program that wrote into it would else find that again."""
        constant = self._node(tensor.detach().clone())
        self._know(tensor, self._graph.call_function(aten.clone.default, (constant,)))
        return tensor

    def module(self, found: Sequence[Tensor]) -> fx.GraphModule:
        self._graph.output([self._node(each) for each in found])
        self._nodes, self._alive = {}, []
        return fx.GraphModule(self._root, self._graph)

    def _know(self, tensor: Tensor, node: fx.Node) -> None:
        node.meta["shape"], node.meta["dtype"] = tuple(tensor.shape), tensor.dtype
        self._nodes[id(tensor)] = node
        self._alive.append(tensor)

    def _node(self, tensor: Tensor) -> fx.Node:
        """Where a tensor comes from; a constant, where nobody saw it made."""
        if id(tensor) not in self._nodes:
            name = f"constant_{len(self._root._buffers)}"
            self._root.register_buffer(name, tensor.detach(), persistent=False)
            self._know(tensor, self._graph.get_attr(name))
        return self._nodes[id(tensor)]
