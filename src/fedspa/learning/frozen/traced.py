"""A module as a graph of what it does to a record: by torch.fx, whose nodes are layers, or by torch.export, whose nodes
are torch's own operations.

torch.fx is first: its layers are those that the fast engines know. It runs a forward with stand-ins for tensors, which
most of transformers' models do not stand. torch.export takes nearly all, and its graph changes nothing in place.
"""

from __future__ import annotations

import logging
import operator
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from fedspa.errors import first_line
from fedspa.examples import Tree, leaves, mapped
from fedspa.learning import forward
from fedspa.learning.flat import copied
from fedspa.learning.threads import TRACING
from fedspa.learning.tracer import Tracer


class Untraced(Exception):
    """Why there is no graph, or none that can be cut."""


@dataclass(frozen=True)
class Traced:
    """Placeholders are an example's tensors in order. Targets of nodes are names in `root`, which holds the module
    itself as `module`, and beside it the constants that tracing found."""

    graph: fx.Graph
    root: nn.Module


class _Called(nn.Module):
    """The module, called with the tensors of a tree that is made like x, or with what stands in for them."""

    def __init__(self, module: nn.Module, x: Tree, logits: bool) -> None:
        super().__init__()
        self.module = module
        self._x, self._logits = x, logits

    def forward(self, *given: Tensor) -> object:
        rest = iter(given)
        x = mapped(lambda _: next(rest), self._x)
        if self._logits:
            return forward.outputs(self.module, x)
        return forward.returned(self.module, (x,) if isinstance(self._x, Tensor) else x)


class _Tracer(Tracer):
    """Layers are not looked into, unless only some of their parameters are trained."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self._inputs = inputs

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        mixed = len({parameter.requires_grad for parameter in m.parameters()}) > 1
        inside = next(m.children(), None) is not None
        return super().is_leaf_module(m, module_qualified_name) and not (mixed and inside)

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> tuple[Any, list[Any]]:
        places = [self.create_proxy("placeholder", f"x{place}", (), {}) for place in range(self._inputs)]
        return root_fn, [self.root, *places]


def by_layers(module: nn.Module, x: Tree) -> Traced:
    """By torch.fx."""
    copy = _Called(copied(module), x, logits=False)
    try:
        with TRACING:
            graph = _Tracer(sum(1 for _ in leaves(x))).trace(copy)
    except Exception as cause:  # tracing runs the user's forward, which may raise anything
        raise Untraced(f"torch.fx cannot trace it ({type(cause).__name__})") from cause
    (end,) = (node for node in graph.nodes if node.op == "output")
    end.args = (_logits(end.args[0]),)
    unused = [node for node in graph.nodes if not node.users and node.op not in ("placeholder", "output")]
    if any(changes_in_place(node, copy) or node.target is operator.setitem for node in unused):
        raise Untraced("it changes a tensor in place")
    graph.eliminate_dead_code(is_impure_node=lambda node: node.op in ("placeholder", "output"))
    return Traced(graph, _with_constants(module, graph, copy))


def by_operations(module: nn.Module, examples: Tree) -> Traced:
    """By torch.export, for any number of examples."""
    count = torch.export.Dim("examples", min=1)
    called = _Called(copied(module), examples, logits=True)
    given = tuple(leaves(examples))
    try:
        with warnings.catch_warnings(), _without_a_word():
            warnings.simplefilter("ignore", FutureWarning)  # torch's own, of torch's own
            program = torch.export.export(called, given, dynamic_shapes=(tuple({0: count} for _ in given),))
            whole = program.run_decompositions({}).module()
    except Exception as cause:
        raise Untraced(f"torch.export cannot trace it ({type(cause).__name__}: {first_line(cause)})") from cause
    graph = whole.graph
    assert isinstance(graph, fx.Graph)
    (end,) = (node for node in graph.nodes if node.op == "output")
    end.args = (_logits(end.args[0]),)
    graph.set_codegen(fx.graph.CodeGen())
    for node in reversed(graph.nodes):
        checks = node.target == "_guards_fn" or "assert" in str(node.target) or "sym_constrain" in str(node.target)
        if checks and not node.users:
            graph.erase_node(node)
        elif node.target in _AS_LAYERS:
            node.target = _AS_LAYERS[node.target]
        elif node.target is torch.ops.aten.clone.default and not node.kwargs:  # nothing changes in place here
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
        elif node.target is torch.ops.aten.linear.default:
            _as_layer(graph, node, module)
    graph.eliminate_dead_code(is_impure_node=lambda node: node.op in ("placeholder", "output"))
    return Traced(graph, _with_constants(module, graph, whole))


@contextmanager
def _without_a_word() -> Iterator[None]:
    """torch's compiler writes empty lines for a tool of its own into every log that anybody keeps."""
    logger = logging.getLogger("torch.__trace")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


# By the names under which the fast engines know them.
_AS_LAYERS: dict[Any, Callable[..., Tensor]] = {
    torch.ops.aten.relu.default: torch.relu,
    torch.ops.aten.tanh.default: torch.tanh,
}


def _as_layer(graph: fx.Graph, node: fx.Node, module: nn.Module) -> None:
    """A product with the weights of a linear layer is that layer."""
    given, *own = node.args
    names = [str(part.target).removeprefix("module.") for part in own if isinstance(part, fx.Node)]
    layer_name = names[0].rpartition(".")[0] if names else ""
    layers = dict(module.named_modules())
    layer = layers.get(layer_name)
    parts = [] if not isinstance(layer, nn.Linear) else [layer.weight, *([] if layer.bias is None else [layer.bias])]
    found = [dict(module.named_parameters(remove_duplicate=False)).get(name) for name in names]
    if type(layer) is not nn.Linear or len(parts) != len(found) or any(a is not b for a, b in zip(parts, found)):
        return
    with graph.inserting_before(node):
        node.replace_all_uses_with(graph.call_module(f"module.{layer_name}", (given,)))
    graph.erase_node(node)


def changes_in_place(node: fx.Node, root: nn.Module) -> bool:
    """Whether a node of torch.fx may write over what it is given."""
    if node.op == "call_module":
        return bool(getattr(root.get_submodule(str(node.target)), "inplace", False))
    if node.op == "call_method":
        return str(node.target).endswith("_") and not str(node.target).endswith("__")
    if node.op != "call_function" or isinstance(node.target, torch._ops.OpOverload):  # torch.export leaves none
        return False
    name = getattr(node.target, "__name__", "")
    flags = node.kwargs.get("inplace") is True or any(given is True for given in node.args)
    return flags or "out" in node.kwargs or node.target in _IN_PLACE or (name.endswith("_") and name[-2:] != "__")


_IN_PLACE = {
    getattr(operator, name)
    for name in ("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor", "imatmul")
}


def _logits(found: Any) -> Any:
    """The part of what a module returns that a loss is made of (`forward.outputs`), where that shows in the graph."""
    if isinstance(found, dict):
        return found.get("logits", found)
    return _logits(found[0]) if isinstance(found, tuple | list) and found else found


def _with_constants(module: nn.Module, graph: fx.Graph, traced: nn.Module) -> nn.Module:
    """The module, and what else the graph reads."""
    root = nn.Module()
    root.module = module
    for node in graph.nodes:
        if node.op in ("get_attr", "call_module") and not _holds(root, str(node.target)):
            if "." in str(node.target):
                raise Untraced(f"it reads {node.target}, which is neither a parameter nor a buffer")
            value = getattr(traced, str(node.target))
            if isinstance(value, nn.Module):
                root.add_module(str(node.target), value)
            else:
                root.register_buffer(str(node.target), value.detach())
    return root


def _holds(root: nn.Module, target: str) -> bool:
    try:
        operator.attrgetter(target)(root)
    except AttributeError:
        return False
    return True
