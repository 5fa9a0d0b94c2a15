"""Whether a module can learn a task from such examples, asked with blank ones before anything else is done."""

from __future__ import annotations

import torch

from fedspa.data import plugin
from fedspa.errors import ConfigError, DataError
from fedspa.examples import Examples, Tree, blanks, layout, leaves, moved
from fedspa.learning.flat import FlatModel
from fedspa.learning.forward import evaluating, outputs
from fedspa.learning.tasks.base import OfOutputs
from fedspa.learning.tasks.own import Own
from fedspa.learning.traces.blame import of_function


def require_fit(model: FlatModel, like: Examples, what: str) -> None:
    """Three blank examples, made as the one that is given, through the module. A ConfigError begins with `what`."""
    device = next(model.module.parameters()).device
    x, y = (moved(blanks(tree, 3), device) for tree in like)
    try:
        with evaluating(model.module):
            pass
    except Exception as cause:  # what torch.export made has no other modes
        raise ConfigError(f"{what} cannot be switched to eval mode and back ({plugin.one_line(cause)})") from cause
    with torch.no_grad(), evaluating(model.module), torch.random.fork_rng(devices=[]):
        try:
            model.task.require_fit(model.module, x, y)
        except ConfigError as cause:
            whose = model.task.what if type(model.task) is Own else what
            raise ConfigError(f"{whose}: {cause}") from cause
        except Exception as cause:  # layers that do not fit, a wrong device or dtype, or the user's own code
            why = plugin.one_line(cause)
            if type(model.task) is Own and of_function(cause, model.module, x):
                raise ConfigError(  # it may take outputs, as torch's losses do
                    f"{model.task.what} failed on records of shape {layout(like.x)} ({why}); it is called as "
                    "loss(module, example), where example is the pair (x, y) or the dict that was given"
                ) from cause
            raise ConfigError(
                f"{what} cannot take the data's records, of shape {layout(like.x)} ({why}){_hint(model, like)}"
            ) from cause


def _hint(model: FlatModel, like: Examples) -> str:
    """What to do where the types of numbers are the likely cause."""
    if any(parameter.dtype == torch.float64 for parameter in model.module.parameters()):
        return "; records are float32, so give module.float()"
    if all(leaf.dtype == torch.int64 for leaf in leaves(like.x)):
        return "; whole numbers are taken for tokens, int64: give x.float() where they are none"
    return ""


def require_known(model: FlatModel, x: Tree, y: Tree, what: str) -> None:
    """Raise a DataError that begins with `what` where the module's outputs have no place for some of the targets. For
    records that are nobody's secret: at a site such a one costs no more than its own gradient."""
    if not isinstance(model.task, OfOutputs):
        return
    with torch.no_grad(), evaluating(model.module), torch.random.fork_rng(devices=[]):
        try:
            found = outputs(model.module, moved(blanks(x), next(model.module.parameters()).device))
        except Exception as cause:  # the user's own code, which took several records
            raise ConfigError(
                f"the module cannot take one record by itself, of shape {layout(x)} ({plugin.one_line(cause)}), "
                "and that is how records are trained: each as a batch of one"
            ) from cause
    strange = model.task.strange(found.cpu(), y)
    if strange is not None and bool(strange.any()):
        raise DataError(
            f"{what}: the target of record {int(strange.nonzero()[0])} is outside what the module tells apart "
            f"(outputs of shape {tuple(found.shape[1:])})"
        )
