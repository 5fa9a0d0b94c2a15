"""All that is wrong with a module, at once."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from fedspa.errors import ConfigError, one_line
from fedspa.examples import Examples, Tree, count
from fedspa.learning import forward
from fedspa.learning.fix import replace_layers
from fedspa.learning.sound import Problem, layer_problems, require_module
from fedspa.learning.tasks import Own
from fedspa.learning.traces.watch import tensors
from fedspa.learning.trial import failures, trial


def check(module: nn.Module, example: object = None) -> list[Problem]:
    """What keeps a module from being trained privately, layer by layer.

    Nothing is trained and nothing is released.

    Args:
        module: The module, which is left as it was.
        example: A batch as the module takes it: a tensor for `module(x)`, a tuple for `module(*x)`, a dict for
            `module(**x)`. Use made-up numbers or public records. The module is then also run, on a copy, with the
            example and with others made like it: that finds what is kept from one example to the next, whatever keeps
            it, and what is left behind by one that raises an error (which engines that do not call the module allow).
            Without an example only kinds and modes of layers are looked at.

    Returns:
        A `Problem` for each; none where the module can be trained as it is.

    Examples:
        >>> import fedspa, torch
        >>> module = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2))
        >>> [(problem.layer, problem.kind) for problem in fedspa.check(module, torch.rand(2, 4))]
        [('1', 'BatchNorm1d')]
    """
    require_module(module)
    problems = list(layer_problems(module))
    if example is None:
        return problems
    # With what is known already out of the way, the rest can be found as well.
    try:
        fixed, _ = replace_layers(module)
    except Exception as error:  # torch cannot copy all that a module may hold
        why = f"cannot be copied, and only copies are tried ({one_line(error)})"
        mend = "keep what cannot be copied, such as open files and locks, outside of it"
        return problems or [Problem("", type(module).__name__, why, mend)]
    # A module without known problems is tried itself: a copy's closures lead to the parameters of the original.
    rest = fixed if problems else module
    layers = dict(rest.named_modules())
    for problem in layer_problems(rest):
        layers[problem.layer or ""].training = False
    if any(layer_problems(rest)):
        return problems
    x = _tree(example)
    like = Examples(x, torch.zeros(count(x)))
    task = Own(_any_loss)
    found = trial(rest, like, task).problems
    if not any(problem.unsound for problem in found):
        found = found + failures(rest, like, task)
    return problems + found


def _tree(example: object) -> Tree:
    if isinstance(example, Tensor):
        return example
    if isinstance(example, Mapping):
        return {str(key): _tree(part) for key, part in example.items()}
    if isinstance(example, tuple | list):
        return tuple(_tree(part) for part in example)
    raise ConfigError(
        f"the example holds a {type(example).__name__}; it must be a tensor, or a tuple or dict of tensors"
    )


def _any_loss(module: nn.Module, example: Tree) -> Tensor:
    """Of every number that the module gives, each with a weight of its own."""
    assert isinstance(example, tuple)
    found = [values for values in tensors(forward.returned(module, example[0])) if values.requires_grad]
    if not found:
        raise ConfigError("what the module gives has no gradient: is it under torch.no_grad, or detached?")
    return torch.stack(
        [(values * torch.cos(torch.arange(values.numel()).view(values.shape))).sum() for values in found]
    ).sum()
