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
    whole.training = root.module.training  # type: ignore[assignment]
    return whole


def _mirrored(module: nn.Module, path: str, called: set[str], read: set[str], *, trained: bool) -> nn.Module | None:
    """The same tree with nothing in it but layers that are called, what is read, and the trained parameters."""
    if path in called:
        return module
    made, below = nn.Module(), f"{path}." if path else ""
    for name, parameter in module._parameters.items():
        if parameter is not None and (f"{below}{name}" in read or (trained and parameter.requires_grad)):
            made.register_parameter(name, parameter)
    for name, buffer in module._buffers.items():
        if f"{below}{name}" in read:
            made.register_buffer(name, buffer)
    for name, child in module._modules.items():
        part = child if f"{below}{name}" in read else None  # a graph within the graph
        if child is not None and part is None:
            part = _mirrored(child, f"{below}{name}", called, read, trained=trained)
        if part is not None:
            made.add_module(name, part)
    for name in [name for name in read if name.startswith(below) and "." not in name[len(below) :]]:
        value = getattr(module, name[len(below) :], None)
        if not hasattr(made, name[len(below) :]) and value is not None:  # a tensor that is no buffer
            setattr(made, name[len(below) :], value)
    made.training = module.training
    return made if any(True for _ in (*made.parameters(), *made.buffers(), *made.children())) or vars_of(made) else None


def vars_of(module: nn.Module) -> list[str]:
    """Names of what hangs on it beside what every module has."""
    return sorted(vars(module).keys() - vars(nn.Module()).keys())
