"""A module with its unsound layers replaced, or with some of its parameters frozen."""

from __future__ import annotations

import logging

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from fedspa.errors import ConfigError, quoted
from fedspa.learning.flat import copied
from fedspa.learning.layers import (
    is_compiled,
    iterates,
    keeps_statistics,
    mixes_batch,
    packs_weights,
    renormalises,
    replaceable,
    require_module,
)

log = logging.getLogger(__name__)
_MOST_GROUPS, _CHANNELS_PER_GROUP = 32, 4


def fix(module: nn.Module) -> nn.Module:
    """Return a copy of the module whose unsound layers are replaced or switched off.

    BatchNorm in training mode becomes GroupNorm with the same weight and bias; its running statistics are dropped, and
    an activation or dropout that its class applies afterwards is kept. What torch.compile wrapped is taken out of the
    wrapper. All else stays as it is: weights, frozen parts,
    modes, a BatchNorm in eval mode. Each change is logged (INFO, logger `fedspa`). `check` names what is left to do.

    Args:
        module: The module, which is left as it was.

    Returns:
        The copy.

    Raises:
        ConfigError: `module` is no torch.nn.Module.

    Examples:
        >>> import fedspa, torch
        >>> module = fedspa.fix(torch.nn.Sequential(torch.nn.Conv2d(1, 8, 3), torch.nn.BatchNorm2d(8)))
        >>> type(module[1]).__name__, module[1].num_groups
        ('GroupNorm', 2)
    """
    require_module(module)
    fixed, changes = replace_layers(module)
    for line in changes:
        log.info("%s", line)
    return fixed


def freeze(module: nn.Module, *names: str) -> nn.Module:
    """Freeze the parameters whose names contain one of `names`: they are no part of θ, never clipped, noised or sent.

    `fedspa.freeze(module, "lora_A")` makes peft's LoRA adapters those of FFA-LoRA, in which only B is trained: noise on
    both factors would multiply.

    Args:
        module: The module, whose parameters are changed in place.
        names: Parts of names, as in `module.named_parameters()`.

    Returns:
        The module itself.

    Raises:
        ConfigError: No parameter has such a name.

    Examples:
        >>> import fedspa, torch
        >>> module = fedspa.freeze(torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2)), "0.", "bias")
        >>> [name for name, parameter in module.named_parameters() if parameter.requires_grad]
        ['1.weight']
    """
    require_module(module)
    for part in names:
        found = [parameter for name, parameter in module.named_parameters() if part in name]
        if not found:
            raise ConfigError(f"no parameter has {quoted(part)} in its name; `module.named_parameters()` lists them")
        for parameter in found:
            parameter.requires_grad_(False)
    return module


def replace_layers(module: nn.Module) -> tuple[nn.Module, list[str]]:
    """Return the copy that `fix` returns, and a line for each change."""
    fixed, done = copied(module), []
    instead: dict[nn.Module, nn.Module] = {}
    for name, layer in fixed.named_modules():
        named = f"{name or 'the module itself'}: {type(layer).__name__}"
        if isinstance(layer, _BatchNorm) and mixes_batch(layer) and replaceable(layer):
            instead[layer] = norm = group_norm(layer)
            groups = norm.num_groups
            kept = "weight and bias kept, " if layer.affine else ""
            lost = "running statistics dropped" if layer.running_mean is not None else "it had no running statistics"
            done.append(f"{named}({layer.num_features}) became GroupNorm({groups}, {layer.num_features}); {kept}{lost}")
        elif isinstance(layer, _InstanceNorm) and keeps_statistics(layer):
            layer.track_running_stats = False
            layer.running_mean = layer.running_var = layer.num_batches_tracked = None
            done.append(f"{named}({layer.num_features}) keeps no running statistics any more")
        elif isinstance(layer, nn.Embedding | nn.EmbeddingBag) and renormalises(layer):
            done.append(f"{named} has max_norm = None instead of {layer.max_norm:g}")
            layer.max_norm = None
        elif packs_weights(layer):
            layer.support_avx512bf16_for_cpu = False
            done.append(f"{named} keeps its weights as they are on a CPU")
        elif is_compiled(layer):
            instead[layer] = layer.get_submodule("_orig_mod")
            done.append(f"{named} became the {type(instead[layer]).__name__} that was compiled")
        elif iterates(layer):
            layer.training = False  # the layer's own mode: its children keep theirs
            done.append(f"{named} is in eval mode: its spectral norm's estimate stays as it is")
    # By identity: the same layer may stand in several places.
    for parent in list(fixed.modules()):
        for name, child in parent._modules.items():
            if child is not None:
                parent._modules[name] = _replacement(child, instead)
    return _replacement(fixed, instead), done


def _replacement(layer: nn.Module, instead: dict[nn.Module, nn.Module]) -> nn.Module:
    while layer in instead:
        layer = instead[layer]
    return layer


def group_norm(layer: _BatchNorm) -> nn.GroupNorm:
    """Return a GroupNorm of the same channels, with the layer's weight, bias, ε, mode, place and type."""
    channels = layer.num_features
    # Where a channel is a single number, as in BatchNorm1d on (N, C), a group of few channels would leave nothing but
    # signs of it: all channels together then.
    groups = 1 if isinstance(layer, nn.BatchNorm1d) else _groups(channels)
    children = dict(layer.named_children())
    norm = (GroupNormThen if children else nn.GroupNorm)(groups, channels, eps=layer.eps, affine=layer.affine)
    if layer.affine:
        norm.weight, norm.bias = layer.weight, layer.bias
    norm.training = layer.training
    for name, child in children.items():
        norm.add_module(name, child)
    return norm


class GroupNormThen(nn.GroupNorm):
    """A GroupNorm and then its children in order, under the names that they had in the layer that it replaces."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        for layer in self.children():
            x = layer(x)
        return x


def _groups(channels: int) -> int:
    """Return the most that divide the channels, up to 32 and with at least four channels to each."""
    most = max(1, min(_MOST_GROUPS, channels // _CHANNELS_PER_GROUP))
    return next(groups for groups in range(most, 0, -1) if channels % groups == 0)
