"""Models by name: the two CNNs of Fed-SPA (Hu, Gong and Guo, IJCAI 2021, section 5), three small ones, or the user's.
Before anything else is done, synthetic examples show whether a module can learn a task from examples of a layout.

Every built-in model is a plain ``nn.Sequential`` of standard layers, so that an engine can read its structure. None has
batch normalisation or dropout: the first mixes examples, so that a per-example gradient would not exist.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from contextlib import suppress

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from fedspa.data import plugin
from fedspa.errors import ConfigError, DataError, RunWarning, did_you_mean, warn
from fedspa.examples import Examples, Tree, joined, layout, leaves, moved, taken, zero_examples
from fedspa.learning.agreement import synthetic_examples
from fedspa.learning.flat import FlatModel, copied
from fedspa.learning.forward import Switches, evaluating, outputs, returned
from fedspa.learning.tasks import CustomLoss, OutputTask
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


_TOGETHER = 3


def require_fit(model: FlatModel, example_spec: Examples, what: str) -> None:
    """Raise a ConfigError that begins with `what` unless the module takes synthetic examples: three together, and one
    by itself, as records are trained."""
    try:
        with evaluating(model.module):
            pass
    except Exception as cause:  # what torch.export made has no other modes
        raise ConfigError(f"{what} cannot be switched to eval mode and back ({plugin.one_line(cause)})") from cause
    device = next(model.module.parameters()).device
    examples = synthetic_examples(example_spec, model.module, model.task)
    # On a copy: what the module itself kept of these would hide from the trial that it keeps something.
    with suppress(Exception):  # torch cannot copy all that a module may hold; a trial refuses it by name
        model = FlatModel(copied(model.module), model.task)
    several = (
        examples[:_TOGETHER],
        [examples[0]] * _TOGETHER,
        [Examples(zero_examples(example_spec.x), zero_examples(example_spec.y))] * _TOGETHER,
    )
    with torch.no_grad(), evaluating(model.module), torch.random.fork_rng(devices=[]):
        given = [Examples(*(moved(joined([one[i] for one in each]), device) for i in range(2))) for each in several]
        fitting = next((each for each in given if _fits(model, each)), None)
        if fitting is None:
            _refuse_unfit(model, given[0], example_spec, what)
            return
        x, y = (taken(tree, slice(1)) for tree in fitting)
        try:
            model.task.loss(model.module, x, y)
        except Exception as cause:  # the user's own code, which took several records
            shape = f"of shape {layout(example_spec.x)} ({plugin.one_line(cause)})"
            raise ConfigError(
                f"{what} cannot take one record by itself, {shape}: "
                "records are trained each as a batch of one, whose dimension a `.squeeze()` without an argument drops"
            ) from cause
        _warn_of_probabilities(model, [moved(each.x, device) for each in examples], what)


def _fits(model: FlatModel, few: Examples) -> bool:
    switches = Switches()
    try:
        model.task.require_fit(model.module, *few)
    except Exception:  # the user's forward may raise anything
        return False
    finally:
        switches.put_back()
    return True


def _refuse_unfit(model: FlatModel, few: Examples, example_spec: Examples, what: str) -> None:
    """Raise, in the task's words or the module's."""
    try:
        model.task.require_fit(model.module, *few)
    except ConfigError as cause:
        whose = model.task.what if type(model.task) is CustomLoss else what
        raise ConfigError(f"{whose}: {cause}") from cause
    except Exception as cause:  # layers that do not fit, a wrong device or dtype, or the user's own code
        why = plugin.one_line(cause)
        if type(model.task) is CustomLoss and not _module_fails(model, few.x, cause):
            raise ConfigError(  # it may take outputs, as torch's losses do
                f"{model.task.what} failed on records of shape {layout(example_spec.x)} ({why}), in its own code or in "
                "the module's; it is called as loss(module, example), where example is the pair (x, y) or the dict"
            ) from cause
        shape = f"of shape {layout(example_spec.x)} ({why})"
        raise ConfigError(f"{what} cannot take the data's records, {shape}{_hint(model, example_spec)}") from cause


def _module_fails(model: FlatModel, x: Tree, cause: Exception) -> bool:
    """Return whether the module by itself raises the same error."""
    try:
        returned(model.module, x)
    except Exception as error:  # the user's forward may raise anything
        return repr(error) == repr(cause)
    return False


def _warn_of_probabilities(model: FlatModel, inputs: list[Tree], what: str) -> None:
    """Warn where outputs lie between 0 and 1 whatever the input and the weights, and the task takes logits."""
    if not isinstance(model.task, OutputTask) or not model.task.takes_logits:
        return
    theta = model.flatten()
    elsewhere = theta + 0.5 * torch.randn(theta.shape, generator=torch.Generator().manual_seed(3)).to(theta)
    found = []
    for at, x in ((at, x) for at in (theta, elsewhere) for x in inputs):
        with suppress(Exception):  # the user's forward may raise anything for what is synthetic
            found.append(model.outputs(at, x).reshape(-1))
    if not found:
        return
    values = torch.cat(found)
    values = values[values.isfinite()]
    inside = bool(((values >= 0) & (values <= 1)).all())
    if inside and bool(((values > 0) & (values < 1)).any()):  # a dead ReLU gives nothing but zeros
        warn(
            f"{what} gives numbers between 0 and 1 only, as a sigmoid or softmax does; task {model.task.name!r} takes "
            "logits and makes probabilities of them itself, so that little would be learned: leave out the last one",
            RunWarning,
        )


def _hint(model: FlatModel, example_spec: Examples) -> str:
    """Return what to do where names or types of numbers are the likely cause."""
    takes = inspect.signature(model.module.forward).parameters
    unknown = [name for name in example_spec.x if name not in takes] if isinstance(example_spec.x, dict) else []
    if unknown and not any(each.kind is each.VAR_KEYWORD for each in takes.values()):
        return (
            f"; a record's parts are given to forward by name, which takes {', '.join(takes)} and not "
            f"{', '.join(unknown)}: rename the parts, or leave these out"
        )
    if any(parameter.dtype == torch.float64 for parameter in model.module.parameters()):
        return "; records are float32, so give module.float()"
    if all(leaf.dtype == torch.int64 for leaf in leaves(example_spec.x)):
        return "; whole numbers are taken for tokens, int64: give x.float() where they are none"
    return ""


def require_known(model: FlatModel, x: Tree, y: Tree, what: str) -> None:
    """Raise a DataError that begins with `what` where the module's outputs have no place for some of the targets. For
    records that are nobody's secret: at a site such a one costs no more than its own gradient."""
    if not isinstance(model.task, OutputTask):
        return
    with torch.no_grad(), evaluating(model.module), torch.random.fork_rng(devices=[]):
        try:
            example_spec = Examples(zero_examples(x), zero_examples(y))
            one = synthetic_examples(example_spec, model.module, model.task)[0].x
            found = outputs(model.module, moved(one, next(model.module.parameters()).device))
        except Exception as cause:  # the user's own code
            raise ConfigError(
                f"the module cannot take one record by itself, of shape {layout(x)} ({plugin.one_line(cause)}), "
                "and that is how records are trained: each as a batch of one"
            ) from cause
    invalid = model.task.invalid_targets(found.cpu(), y)
    if invalid is not None and bool(invalid.any()):
        raise DataError(
            f"{what}: the target of record {int(invalid.nonzero()[0])} is outside the module's classes "
            f"(outputs of shape {tuple(found.shape[1:])})"
        )
