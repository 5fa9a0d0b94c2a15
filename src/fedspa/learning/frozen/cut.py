"""A graph cut in two: what depends on records and constants alone, and what depends on trained parameters or draws.

Nodes are of three kinds. *Trained* ones read a trained parameter, draw random numbers, or read another trained one.
*Features* depend on the record and are not trained. *Constants* are neither; both halves have them.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from fedspa.learning.frozen.traced import Traced, Untraced, changes_in_place
from fedspa.learning.frozen.work import work
from fedspa.learning.sound import may_draw

_DRAWING = "; '{}' draws random numbers, as Dropout does in training mode: in eval mode (module.eval()) it would not"


class Cut(NamedTuple):
    """The two halves, as graphs whose targets are names in one root. The body returns a tuple of as many tensors as the
    head has placeholders. The body takes `work` multiplications for a record, a `share` of a forward pass. `drawing`
    says what draws, if anything does, and what to do about it."""

    body: fx.Graph
    head: fx.Graph
    root: nn.Module
    work: int
    share: float
    drawing: str


def random_states() -> list[Tensor]:
    """Of torch's generators."""
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [])]


class Values(fx.Interpreter):
    """Every node's value for some examples, and which nodes drew."""

    def __init__(self, traced: Traced) -> None:
        super().__init__(traced.root, garbage_collect_values=False, graph=traced.graph)
        self.drew: set[fx.Node] = set()
        self.of: dict[fx.Node, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        before = random_states()
        self.of[n] = super().run_node(n)
        if not all(map(torch.equal, before, random_states())):
            self.drew.add(n)
        return self.of[n]


def cut(traced: Traced, alone: list[Values], together: Values) -> Cut:
    """`alone` are the values for single examples, `together` those for several; raises `Untraced`."""
    cutting = _Cutting(traced, alone, together)
    return Cut(cutting.body(), cutting.head(), traced.root, *cutting.work(), cutting.drawing)


class _Cutting:
    def __init__(self, traced: Traced, alone: list[Values], together: Values) -> None:
        self._graph, self._root = traced.graph, traced.root
        self._alone, self._together = alone, together
        self._count = len(next(v for n, v in together.of.items() if n.op == "placeholder"))
        drew: set[fx.Node] = set().union(*(values.drew for values in (*alone, together)))
        self.drawing = next((_DRAWING.format(node.name) for node in self._graph.nodes if node in drew), "")
        self._trained: set[fx.Node] = set()
        self._of_record: set[fx.Node] = set()
        self._of_values: set[fx.Node] = set()  # and not of a record's shape alone
        for node in self._graph.nodes:
            after = any(given in self._trained for given in node.all_input_nodes)
            if after or node.op == "output" or node in drew or self._reads_trained(node):
                self._trained.add(node)
            elif node.op == "placeholder" or any(given in self._of_record for given in node.all_input_nodes):
                self._of_record.add(node)
            if node.op == "placeholder" or (
                not _reads_shape(node) and not self._of_values.isdisjoint(node.all_input_nodes)
            ):
                self._of_values.add(node)
        for node in self._trained:
            kept = any(given not in self._trained for given in node.all_input_nodes[:1])
            if kept and changes_in_place(node, self._root):
                raise Untraced(f"'{node.name}' changes a tensor of the frozen part in place")
        self._again: set[fx.Node] = set()
        self.features = self._boundary()
        if all(node.op == "placeholder" for node in self.features):
            raise Untraced(f"nothing comes before what is trained or draws{self.drawing}")

    def _reads_trained(self, node: fx.Node) -> bool:
        if node.op == "get_attr":
            value = operator.attrgetter(str(node.target))(self._root)
            return isinstance(value, Tensor) and value.requires_grad
        if node.op != "call_module":
            return False
        layer = self._root.get_submodule(str(node.target))
        return any(p.requires_grad for p in layer.parameters()) or any(may_draw(each) for each in layer.modules())

    def _boundary(self) -> list[fx.Node]:
        """What trained nodes read of a record, in order. What is only a larger view of something is left to the head:
        a mask that is repeated for every row of attention is not kept for every record."""
        wanted = {given for node in self._trained for given in node.all_input_nodes if given in self._of_record}
        for node in reversed(self._graph.nodes):
            if node not in wanted or not self._is_feature(node):
                continue
            parts = {given for given in node.all_input_nodes if given in self._of_record}
            fresh = [given for given in parts if isinstance(self._alone[0].of[given], Tensor) and given not in wanted]
            smaller = all(map(self._is_feature, fresh)) and sum(map(self._bytes, fresh)) < self._bytes(node)
            if smaller and _enlarges(node):
                self._again.add(node)
                wanted |= parts
                wanted.discard(node)
        return [node for node in self._graph.nodes if node in wanted and self._is_feature(node)]

    def _bytes(self, node: fx.Node) -> int:
        value = self._alone[0].of[node]
        return int(value.numel() * value.element_size())

    def _is_feature(self, node: fx.Node) -> bool:
        """Whether each example has a row of its own in it."""
        one, several = self._alone[0].of[node], self._together.of[node]
        if not isinstance(one, Tensor) or not one.ndim or not several.ndim:
            return False
        return len(one) == 1 and len(several) == self._count and one.shape[1:] == several.shape[1:]

    def work(self) -> tuple[int, float]:
        """Of the body, and its share."""
        values, body = self._alone[0].of, _ancestors(self.features)
        each = {node: work(node, values, self._root) for node in self._graph.nodes}
        saved = sum(each[node] for node in body)
        return saved, saved / max(1, sum(each.values()))

    def body(self) -> fx.Graph:
        made = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        needed = _ancestors(self.features)
        for node in self._graph.nodes:
            if node.op == "placeholder" or node in needed:
                copies[node] = made.node_copy(node, copies.__getitem__)
        made.output(tuple(copies[node] for node in self.features))
        return made

    def head(self) -> fx.Graph:
        made = fx.Graph()
        copies: dict[fx.Node, Any] = {}
        for place, node in enumerate(self.features):
            copies[node] = made.placeholder(f"f{place}")
        size = made.call_method("size", (copies[self.features[0]], 0))
        for node in self._graph.nodes:
            if node in copies or node not in self._trained | self._again:
                continue
            for given in node.all_input_nodes:
                if given not in copies:
                    copies[given] = made.node_copy(given) if given.op == "get_attr" else self._fixed(made, given, size)
            copies[node] = made.node_copy(node, copies.__getitem__)
            if isinstance(node.target, torch._ops.OpOverload) and node.all_input_nodes:
                # It is where its inputs are: torch.export names the device that the graph was made on.
                copies[node].kwargs = {key: given for key, given in copies[node].kwargs.items() if key != "device"}
        if not size.users:
            made.erase_node(size)
        return made

    def _fixed(self, made: fx.Graph, node: fx.Node, size: fx.Node) -> Any:
        """What the head has in place of what is the same for every record: a constant, or the number of examples."""
        if node in self._of_values:
            raise Untraced(f"'{node.name}' depends on the records, and has no row for each of them")
        one, several = self._alone[0].of[node], self._together.of[node]
        if not isinstance(one, Tensor):
            return self._number(node, one, several, size)
        if one.shape != several.shape or not torch.equal(one, several):
            raise Untraced(f"'{node.name}' depends on the number of examples")
        name = f"constant_{node.name}"
        self._root.register_buffer(name, one.detach().clone())
        return made.get_attr(name)

    def _number(self, node: fx.Node, one: Any, several: Any, size: fx.Node) -> Any:
        if isinstance(one, tuple) and isinstance(several, tuple) and len(one) == len(several):
            return tuple(self._number(node, *pair, size) for pair in zip(one, several))
        if type(one) is type(several) and one == several:
            return one
        if type(one) is int and one == 1 and several == self._count:
            return size
        raise Untraced(f"'{node.name}' depends on the number of examples")


# Of which a result may be larger than what it is made of, and costs next to nothing to make again.
_ENLARGING = {
    *("expand", "expand_as", "repeat", "unsqueeze", "view", "reshape", "slice"),
    *("_to_copy", "to", "float", "bool", "long"),
    *("__and__", "__or__", "bitwise_and", "bitwise_or", "bitwise_not", "logical_and", "logical_not"),
    *("eq", "ne", "lt", "gt", "le", "ge", "where", "masked_fill", "rsub", "sub", "mul"),
}
_OF_SHAPE = {"size", "dim", "numel", "sym_size", "sym_numel"}


def _enlarges(node: fx.Node) -> bool:
    return node.op in ("call_function", "call_method") and _name(node) in _ENLARGING


def _reads_shape(node: fx.Node) -> bool:
    """Whether what it gives is the same for all records of one layout."""
    if node.target is getattr:
        return node.args[1] in ("shape", "ndim", "dtype", "device")
    return node.op in ("call_function", "call_method") and _name(node) in _OF_SHAPE


def _name(node: fx.Node) -> str:
    target = node.target
    return target if isinstance(target, str) else str(getattr(target, "__name__", "")).partition(".")[0]


def _ancestors(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """With the nodes themselves."""
    found: set[fx.Node] = set()
    left = list(nodes)
    while left:
        node = left.pop()
        if node not in found:
            found.add(node)
            left += node.all_input_nodes
    return found


def bytes_of(features: Iterable[Tensor]) -> int:
    """Of one record's."""
    return sum(math.prod(leaf.shape[1:]) * leaf.element_size() for leaf in features)
