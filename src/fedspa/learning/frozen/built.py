"""A module made of a graph, with the layers and parameters of the module that was traced."""

from __future__ import annotations

from typing import Any, cast

from torch import fx, nn


def built(name: str, graph: fx.Graph, root: nn.Module) -> nn.Module:
    """Layers and parameters are shared with `root`, under the same names. All trained parameters are there, in their
    order, where the graph reads a trained one: θ is then the same vector, whether or not each of them is used."""
    called = {str(node.target) for node in graph.nodes if node.op == "call_module"}
    read = {str(node.target) for node in graph.nodes if node.op == "get_attr"}
    made = _mirrored(root, "", called, read, trained=name == "Head") or nn.Module()
    code = graph.python_code("self")
    scope: dict[str, Any] = dict(code.globals)
    exec(compile(code.src, f"<{name} of {type(root.module).__name__}>", "exec"), scope)
    kind = type(name, (nn.Module,), {"forward": scope["forward"], "__module__": __name__, "code": code.src})
    whole = cast(nn.Module, kind())
    for key, parameter in made._parameters.items():
        whole.register_parameter(key, parameter)
    for key, buffer in made._buffers.items():
        whole.register_buffer(key, buffer)
    for key, child in made._modules.items():
        whole.add_module(key, child)
    whole.training = root.get_submodule("module").training
    return whole


def _mirrored(module: nn.Module, path: str, called: set[str], read: set[str], *, trained: bool) -> nn.Module | None:
    """The same tree with nothing in it but layers that are called, what is read, and the trained parameters."""
    if path in called:
        return module
    made, kept, below = nn.Module(), False, f"{path}." if path else ""
    for name, parameter in module._parameters.items():
        if parameter is not None and (f"{below}{name}" in read or (trained and parameter.requires_grad)):
            made.register_parameter(name, parameter)
            kept = True
    for name, buffer in module._buffers.items():
        if f"{below}{name}" in read:
            made.register_buffer(name, buffer)
            kept = True
    for name, child in module._modules.items():
        part = child if f"{below}{name}" in read else None  # a graph within the graph
        if child is not None and part is None:
            part = _mirrored(child, f"{below}{name}", called, read, trained=trained)
        if part is not None:
            made.add_module(name, part)
            kept = True
    for name in (name[len(below) :] for name in read if name.startswith(below)):
        if "." not in name and not hasattr(made, name):  # a tensor that is no buffer
            setattr(made, name, getattr(module, name))
            kept = True
    made.training = module.training
    return made if kept else None
