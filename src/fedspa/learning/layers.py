"""Which layers are unsound, as far as a layer's kind and mode say it.

A private step clips each example's own gradient. A layer that mixes the examples of a batch leaves none of them a
gradient of its own, and what a layer keeps of one example is in the next one's gradient, whatever the clip.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm

from fedspa.errors import ConfigError

_REPLACED = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_FIX = "`module = fedspa.fix(module)`"


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong with a module; `str()` of it is a sentence.

    Attributes:
        layer: Its name in `module.named_modules()`, "" for the module itself, None for the task.
        kind: The class of the layer, or what the task is called.
        why: What is wrong with it.
        fix: What to do about it.
        unsound: Whether a run refuses it. The others are warnings: the guarantee holds, but the model trains otherwise
            than it evaluates.
    """

    layer: str | None
    kind: str
    why: str
    fix: str
    unsound: bool = True

    def __str__(self) -> str:
        where = f"the module's layer '{self.layer}'" if self.layer else "the module itself"
        where = "the task" if self.layer is None else where
        return f"{where} ({self.kind}) {self.why}; {self.fix}"


class Unsound(ConfigError):
    """A module that may not be trained, for this problem."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self.problem = problem


def require_module(module: object) -> None:
    """Raise a ConfigError for what is no module that could be called."""
    if isinstance(module, nn.Module):
        return
    what, fix = f"a {type(module).__name__}", "it must be a torch.nn.Module, built and ready"
    if isinstance(module, type):
        what = f"the class {module.__name__}"
        fix = f"give what it makes, as {module.__name__}()" if issubclass(module, nn.Module) else fix
    elif isinstance(module, list | tuple) and all(isinstance(part, nn.Module) for part in module):
        fix = "`torch.nn.Sequential(*module)` runs one after the other"
    raise ConfigError(f"module is {what}; {fix}")


def check_layers(module: nn.Module) -> None:
    """Raise a ConfigError for a module with a layer that is known to be unsound."""
    problems = list(layer_problems(module))
    if problems:
        more = "" if len(problems) == 1 else f" ({len(problems) - 1} more: fedspa.check(module) lists all)"
        raise ConfigError(f"{problems[0]}{more}")


def layer_problems(module: nn.Module) -> Iterator[Problem]:
    """Yield the problems of a module, layer by layer, without running it."""
    root = type(module).__name__
    if isinstance(module, torch.jit.ScriptModule):
        why = "is TorchScript as a whole, to which torch gives no other parameters"
        yield Problem("", root, why, "give the module that it was made of, or `torch.nn.Sequential(module)`")
        return
    for name, layer in module.named_modules():
        # A parametrization is a layer below the one that the user knows.
        head, below, _ = f".{name}".partition(".parametrizations.")
        known = head[1:] if below else name
        kind = type(module.get_submodule(known)).__name__.removeprefix("Parametrized")
        for why, fix in _of_layer(known, layer):
            yield Problem(known, kind, why, fix)
    lazy = any(is_lazy(values) for values in (*module.parameters(), *module.buffers()))
    if not lazy and not any(parameter.requires_grad for parameter in module.parameters()):
        why = "has no trainable parameters, and federated training needs at least one"
        some = next(module.parameters(), None) is not None
        yield Problem("", root, why, "`module.requires_grad_(True)` trains all of them" if some else "add a layer")


def mixes_batch(layer: nn.Module) -> bool:
    """Return whether it is a batch norm that uses the batch's own statistics. With frozen ones, in eval mode, it is an
    affine map."""
    return isinstance(layer, _BatchNorm) and (layer.training or layer.running_mean is None)


def replaceable(layer: nn.Module) -> bool:
    """Return whether it is a batch norm of torch's own kinds, or one that is followed by its children, without hooks
    that a replacement would lose."""
    if is_altered(layer):
        return False
    return type(layer) in _REPLACED or (isinstance(layer, _REPLACED) and _norm_then_children(layer))


def is_altered(layer: nn.Module) -> bool:
    """Return whether hooks or a forward of its own make its outputs other than those of its kind."""
    hooks = (layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks)
    return any(hooks) or "forward" in vars(layer)


def is_compiled(layer: nn.Module) -> bool:
    """Return whether torch.compile wrapped the layer `layer._orig_mod`, and nothing else was added."""
    # Of torch's OptimizedModule, whose own file takes seconds to import; its forward is always its own.
    hooks = (layer._forward_hooks, layer._forward_pre_hooks)
    return "_orig_mod" in layer._modules and not any(hooks)


def is_quantised(module: nn.Module) -> bool:
    """Return whether the module holds weights of bitsandbytes or torchao."""
    return any(map(_by_library, (*module.parameters(), *module.buffers())))


def _by_library(values: Tensor) -> bool:
    return type(values).__module__.partition(".")[0] in ("torchao", "bitsandbytes")


def packs_weights(layer: nn.Module) -> bool:
    """Return whether it is a 4-bit layer of bitsandbytes that repacks its weights when it is first evaluated on a CPU
    with AVX512-BF16, and has no gradient from then on."""
    return bool(getattr(layer, "support_avx512bf16_for_cpu", False))


def plain_values(values: Tensor) -> Tensor:
    """Return the values as torch's own tensor: those of torchao can be read as such only."""
    return values.dequantize() if type(values).__module__.partition(".")[0] == "torchao" else values


def _norm_then_children(layer: _BatchNorm) -> bool:
    """Return whether a subclass normalises and then applies its children in order, as timm's BatchNormAct2d does. With
    statistics that are held fixed, its outputs must be those."""
    sides = 1 if isinstance(layer, nn.BatchNorm1d) else 3 if isinstance(layer, nn.BatchNorm3d) else 2
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            tried = copy.deepcopy(layer).to("cpu", torch.float32).eval()
            torch.default_generator.manual_seed(0)
            x = torch.randn(2, layer.num_features, *[3] * sides)
            for values in (*tried.parameters(recurse=False), *tried.buffers(recurse=False)):
                values.copy_(torch.rand_like(values, dtype=torch.float32) + 0.5)
            found = functional.batch_norm(
                x, tried.running_mean, tried.running_var, tried.weight, tried.bias, eps=tried.eps
            )
            for child in tried.children():
                found = child(found)
            return torch.allclose(tried(x), found, atol=1e-5)
    except Exception:  # whatever a class of its own may do
        return False


def keeps_statistics(layer: nn.Module) -> bool:
    """Return whether the layer averages over the examples that it sees in training."""
    tracks = layer.training and bool(getattr(layer, "track_running_stats", False))
    return tracks and not isinstance(layer, _BatchNorm) and next(layer.buffers(recurse=False), None) is not None


def renormalises(layer: nn.Module) -> bool:
    return isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.max_norm is not None


def iterates(layer: nn.Module) -> bool:
    """Return whether it is a spectral norm whose estimate moves with each forward pass: torch's parametrization, or the
    hook before it."""
    if isinstance(layer, _SpectralNorm):
        return layer.training
    return layer.training and any(isinstance(hook, SpectralNorm) for hook in layer._forward_pre_hooks.values())


def may_draw(layer: nn.Module) -> bool:
    """Return whether it is a layer of torch's own kinds that draws random numbers in a forward pass, where one reaches
    it."""
    if isinstance(layer, _DropoutNd):
        return layer.training and layer.p > 0
    if isinstance(layer, nn.RNNBase | nn.MultiheadAttention):
        return layer.training and layer.dropout > 0
    if isinstance(layer, nn.RReLU):
        return layer.training
    return isinstance(layer, nn.FractionalMaxPool2d | nn.FractionalMaxPool3d)


def _extra_state(layer: nn.Module) -> list[object]:
    """Return the extra state of the layer itself, without that of its children."""
    own = type(layer).get_extra_state is not nn.Module.get_extra_state
    return [layer.get_extra_state()] if own else []


def _of_layer(name: str, layer: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield for each problem of a layer why it is unsound, and what fixes it."""
    this = f"module.get_submodule('{name}')" if name else "module"
    own = (*layer.parameters(recurse=False), *layer.buffers(recurse=False))
    compiled = "which keeps what it compiled for later examples"
    if "_orig_mod" in layer._modules:
        yield f"was made by torch.compile, {compiled}", f"give `{this}._orig_mod`, or {_FIX}"
    if layer._compiled_call_impl is not None:
        yield f"was compiled in place, {compiled}", f"leave `{this}.compile()` out, or {_FIX}"
    if isinstance(layer, nn.DataParallel | nn.parallel.DistributedDataParallel):
        yield "spreads a batch over devices or processes, and examples are taken apart here", f"give `{this}.module`"
    kinds = [base.__module__ for base in type(layer).__mro__]
    if any(kind.startswith("torch.distributed.fsdp") for kind in kinds):
        yield "has its parameters in pieces, on several processes (FSDP)", "give a module that was not sharded"
    by_torch = any(kind.startswith("torch.ao.nn.") and ".quantized." in kind for kind in kinds)
    if by_torch:
        fix = "quantise frozen layers by bitsandbytes or torchao, or train in bfloat16 and quantise what comes of it"
        yield "was quantised by torch.ao, whose layers hold more than tensors", fix
    elif any(values.requires_grad and _by_library(values) for values in own):
        yield "trains quantised weights, and updates are added in float32", f"`{this}.requires_grad_(False)` freezes it"
    elif any(not isinstance(value, Tensor) for value in _extra_state(layer)):
        fix = "keep it in an attribute, outside of `get_extra_state`"
        yield "has something in its state_dict that is no tensor, and a model's file holds numbers only", fix
    if any(is_lazy(values) for values in own):
        yield "has no sizes yet", "`module(example)` gives it some: pass one example through it first"
        return
    if packs_weights(layer):
        why = "packs its weights where it is first evaluated on this CPU, and passes no gradient on from then on"
        yield why, f"`{this}.support_avx512bf16_for_cpu = False`, or {_FIX}"
    if any(values.is_meta for values in own):
        yield "lies on torch's device 'meta' and has no values", "build the module on another device, as on 'cpu'"
    if any(values.is_inference() for values in own):
        yield "was built under torch.inference_mode, and nothing of it can be trained", "build the module outside of it"
    if any(values.layout != torch.strided for values in own):
        yield "has sparse weights, and θ is dense", "keep them dense (`weight.to_dense()`), with zeros in them"
    trained = {parameter.dtype for parameter in layer.parameters(recurse=False) if parameter.requires_grad}
    for kind in sorted(trained - {torch.float32, torch.float64}, key=str):
        named = str(kind).removeprefix("torch.")
        fix = f"`{this}.float()`" if not kind.is_complex else "keep real and imaginary parts as parameters of their own"
        yield f"trains parameters of type {named}, and updates are clipped and noised as float32", fix
    if mixes_batch(layer):
        always = "" if layer.training else " in eval mode too (track_running_stats=False)"
        fix = f"{_FIX} replaces it by GroupNorm" if replaceable(layer) else "use GroupNorm or LayerNorm instead"
        yield f"mixes the examples of a batch{always}, so that none has a gradient of its own", fix
    if keeps_statistics(layer):
        fix = f"{_FIX} switches them off" if isinstance(layer, _InstanceNorm) else "set track_running_stats=False"
        yield "keeps running statistics of the examples, without noise", fix
    if renormalises(layer):
        why = "rescales its weights by those that an example looks up (max_norm), which the next example then sees"
        yield why, f"`{this}.max_norm = None`, or {_FIX}"
    if iterates(layer):
        yield "moves its spectral norm's estimate with each example", f"`{this}.eval()` holds it fixed, or {_FIX}"
