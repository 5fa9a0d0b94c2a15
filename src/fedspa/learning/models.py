"""Models by name: the two CNNs of Fed-SPA (Hu, Gong and Guo, IJCAI 2021, section 5), three small ones, or the user's.

Every built-in model is a plain ``nn.Sequential`` of standard layers, so that an engine can read its structure. None has
batch normalisation or dropout: the first mixes examples, so that a per-example gradient would not exist.
"""

import inspect
import math
from collections.abc import Callable

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from fedspa.data import plugin
from fedspa.errors import ConfigError, did_you_mean
from fedspa.learning.tasks.totals import TotalsModel


def _small_cnn(shape: tuple[int, ...], classes: int, *hidden: int) -> nn.Sequential:
    channels, height, width = shape
    flat = 20 * _after(height, 5, 2) * _after(width, 5, 2)
    return nn.Sequential(
        *(nn.Conv2d(channels, 10, 5), nn.MaxPool2d(2), nn.ReLU()),
        *(nn.Conv2d(10, 20, 5), nn.MaxPool2d(2), nn.ReLU()),
        nn.Flatten(),
        *(layer for size in hidden for layer in (nn.Linear(flat, size), nn.ReLU())),
        nn.Linear(hidden[-1] if hidden else flat, classes),
    )


def _cifar10_cnn(shape: tuple[int, ...], classes: int) -> nn.Sequential:
    # The paper names no padding: without any d = 537,610, and with 1 everywhere it would be 930,826.
    channels, height, width = shape
    flat = 256 * _after(height, 3, 3) * _after(width, 3, 3)
    return nn.Sequential(
        *(nn.Conv2d(channels, 64, 3), nn.MaxPool2d(2), nn.ReLU()),
        *(nn.Conv2d(64, 128, 3), nn.MaxPool2d(2), nn.ReLU()),
        *(nn.Conv2d(128, 256, 3), nn.MaxPool2d(2), nn.ReLU()),
        nn.Flatten(),
        *(nn.Linear(flat, 128), nn.ReLU()),
        *(nn.Linear(128, 256), nn.ReLU()),
        nn.Linear(256, classes),
    )


def _logistic(shape: tuple[int, ...], classes: int) -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), classes))


def _mlp(shape: tuple[int, ...], classes: int) -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), 64), nn.Tanh(), nn.Linear(64, classes))


def _after(side: int, kernel: int, blocks: int) -> int:
    """Return an image's side after ``blocks`` of an unpadded convolution and a 2×2 pooling."""
    for _ in range(blocks):
        side = (side - kernel + 1) // 2
    return side


_BUILDERS: dict[str, Callable[[tuple[int, ...], int], nn.Module]] = {
    "mnist-cnn": lambda shape, classes: _small_cnn(shape, classes, 50),
    "cifar10-cnn": _cifar10_cnn,
    "small-cnn": _small_cnn,
    "logistic": _logistic,
    "mlp": _mlp,
    "totals": lambda shape, width: TotalsModel(width),  # of the task `statistics`
}
# The smallest height and width that leave a CNN one pixel before its first linear layer.
_SMALLEST_SIDE = {"mnist-cnn": 16, "cifar10-cnn": 22, "small-cnn": 16}

NAMES = tuple(_BUILDERS)


def build(
    name: str, input_shape: tuple[int, ...] | None, width: int | None, seed: int, code: str | None = None
) -> nn.Module:
    """Return the model ``name`` for records of ``input_shape`` and a task that wants ``width`` outputs (its classes,
    say), drawn from ``seed``; the global random state is untouched.

    A user's ``package.module:function`` is called with (input_shape, width) if it takes two arguments, else without;
    it is looked for in the folder ``code`` too (run.code).
    Either may be None: a record of several tensors has no shape, and a task of the user's own has no width. The
    initialisation is public (the server sends it), so its seed has no privacy consequence.
    """
    shape = None if input_shape is None else tuple(int(side) for side in input_shape)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would also reseed every accelerator
        model = _users(name, shape, width, code) if plugin.is_plugin(name) else _built_in(name, shape, width)
    # A lazy parameter has no size yet; `FlatModel` refuses it with a hint.
    if not any(p.requires_grad and (is_lazy(p) or p.numel()) for p in model.parameters()):
        raise ConfigError(f"model.name = {name!r} has no trainable parameters: there is nothing to learn")
    return model


def _built_in(name: str, shape: tuple[int, ...] | None, width: int | None) -> nn.Module:
    if name not in _BUILDERS:
        allowed = ", ".join(NAMES)
        raise ConfigError(
            f"model.name = {name!r} is unknown{did_you_mean(name, NAMES)}: choose one of {allowed}, or "
            "'package.module:function'"
        )
    if shape is None or width is None:
        lacking = "examples of several tensors" if shape is None else "such a task"
        raise ConfigError(f"model.name = {name!r} is not made for {lacking}: name a model of your own")
    side = _SMALLEST_SIDE.get(name)
    if side is not None and (len(shape) != 3 or min(shape[1:]) < side):
        raise ConfigError(
            f"model.name = {name!r} does not fit the data of data.name, whose records have shape {shape}: it needs "
            f"(channels, height, width) with height and width of at least {side}; logistic and mlp fit any shape"
        )
    return _BUILDERS[name](shape, width)


def _users(name: str, shape: tuple[int, ...] | None, width: int | None, code: str | None) -> nn.Module:
    function = plugin.resolve(name, key="model.name", error=ConfigError, code=code)
    takes_two = _accepts(function, shape, width)
    if not takes_two and not _accepts(function):
        raise ConfigError(f"model.name = {name!r} must take (input_shape, classes) or no arguments")
    arguments = (shape, width) if takes_two else ()
    model = plugin.call(function, *arguments, what=f"model.name = {name!r}", error=ConfigError)
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model.name = {name!r} returned a {type(model).__name__}, not a torch.nn.Module")
    return model


def _accepts(function: Callable[..., object], *arguments: object) -> bool:
    try:
        inspect.signature(function).bind(*arguments)
    except ValueError:  # no signature to read: some builtins
        return not arguments
    except TypeError:
        return False
    return True
