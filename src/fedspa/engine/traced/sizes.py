"""One graph for every number of examples, from the graphs of two.

They are the same but for whole numbers such as shapes, and those grow with the number of examples in a straight line:
two points give it. Whatever does not is refused.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from fedspa.engine.traced.capture import Untraceable


def for_any_size(few: fx.Graph, more: fx.Graph, sizes: tuple[int, int]) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
    """A graph whose first argument is the number of examples; and which of its nodes stands for which of the first."""
    nodes, others = list(few.nodes), list(more.nodes)
    if [(n.op, str(n.target)) for n in nodes if n.op != "get_attr"] != [
        (n.op, str(n.target)) for n in others if n.op != "get_attr"
    ] or len(nodes) != len(others):
        raise Untraceable("its operations depend on the number of examples")
    graph = fx.Graph()
    merger = _Merger(graph, sizes)
    for one, other in zip(nodes, others):
        merger.add(one, other)
    return graph, merger.made


class _Merger:
    def __init__(self, graph: fx.Graph, sizes: tuple[int, int]) -> None:
        self._graph, self._sizes = graph, sizes
        self._size = graph.placeholder("size")
        self._lines: dict[tuple[int, int], fx.Node] = {}
        self.made: dict[fx.Node, fx.Node] = {}
        self._twins: dict[fx.Node, fx.Node] = {}

    def add(self, one: fx.Node, other: fx.Node) -> None:
        if one.op == "placeholder":
            made = self._graph.placeholder(str(one.target))
        else:
            args, kwargs = self._merged(one.args, other.args), self._merged(one.kwargs, other.kwargs)
            made = self._graph.create_node(one.op, one.target, args, kwargs)
        made.meta = dict(one.meta)
        self.made[one], self._twins[one] = made, other

    def _merged(self, one: Any, other: Any) -> Any:
        if isinstance(one, fx.Node):
            if self._twins[one] is not other:
                raise Untraceable("what its operations take depends on the number of examples")
            return self.made[one]
        if isinstance(one, dict):
            return {key: self._merged(one[key], other[key]) for key in one}
        if isinstance(one, tuple | list):
            if len(one) != len(other):
                raise Untraceable("its shapes depend on the number of examples")
            return type(one)(self._merged(a, b) for a, b in zip(one, other))
        if one == other or (one != one and other != other):  # or both are NaN
            return one
        return self._line(one, other)

    def _line(self, one: Any, other: Any) -> fx.Node:
        (small, large), whole = self._sizes, isinstance(one, int) and isinstance(other, int)
        if not whole or (other - one) % (large - small):
            raise Untraceable(f"{one} becomes {other} with {large} examples in place of {small}")
        slope = (other - one) // (large - small)
        line = slope, one - slope * small
        if line not in self._lines:
            self._lines[line] = self._graph.call_function(_along, (self._size, *line))
        return self._lines[line]


def _along(size: int, slope: int, start: int) -> int:
    return slope * size + start
