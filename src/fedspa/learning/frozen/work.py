"""About how many multiplications a node of a graph costs: enough to tell whether a frozen part is worth keeping.

torch's own counter would import its compiler, which takes longer than all else here.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, fx, nn


def work(node: fx.Node, values: Mapping[fx.Node, Any], root: nn.Module) -> int:
    """Of products with weights, and of matrices with each other."""
    made = next(_tensors(values.get(node)), None)
    if made is None or not made.ndim or node.op not in ("call_module", "call_function", "call_method"):
        return 0
    if node.op == "call_module":
        layer = root.get_submodule(str(node.target))
        looked_up = {id(each.weight) for each in layer.modules() if isinstance(each, nn.Embedding | nn.EmbeddingBag)}
        return sum(_by_weight(made, weight) for weight in layer.parameters() if id(weight) not in looked_up)
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    if "embedding" in name or "norm" in name:
        return 0
    read = [operator.attrgetter(str(given.target))(root) for given in node.all_input_nodes if given.op == "get_attr"]
    total = sum(_by_weight(made, weight) for weight in read if isinstance(weight, nn.Parameter))
    if not total and any(word in name for word in ("matmul", "bmm", "mm", "attention", "einsum")):
        first, *others = (value for given in node.all_input_nodes for value in _tensors(values[given]))
        total = first.numel() * max((sum(other.shape[-2:]) for other in others if other.ndim > 1), default=0)
    return total


def _by_weight(made: Tensor, weight: Tensor) -> int:
    """Each number of a weight is multiplied once for every place of what is made: a pixel, a token, an example."""
    if weight.ndim < 2:
        return 0
    outputs = made.shape[-1] if weight.ndim == 2 else weight.shape[0]
    return weight.numel() * max(1, made.numel() // max(1, outputs))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _tensors(part)
