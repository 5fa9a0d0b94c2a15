"""Whether a module can learn a task from such examples, asked with blank ones before anything else is done."""

from __future__ import annotations

import torch

from fedspa.data import plugin
from fedspa.errors import ConfigError
from fedspa.examples import Examples, blanks, layout, moved
from fedspa.learning.flat import FlatModel
from fedspa.learning.forward import evaluating


def require_fit(model: FlatModel, like: Examples, what: str) -> None:
    """Three blank examples, made as the one that is given, through the module. A ConfigError begins with `what`."""
    device = next(model.module.parameters()).device
    x, y = (moved(blanks(tree, 3), device) for tree in like)
    with torch.no_grad(), evaluating(model.module), torch.random.fork_rng(devices=[]):
        try:
            model.task.require_fit(model.module, x, y)
        except ConfigError as cause:
            raise ConfigError(f"{what}: {cause}") from cause
        except Exception as cause:  # layers that do not fit, a wrong device or dtype, or the user's own code
            raise ConfigError(
                f"{what} cannot take the data's records, of shape {layout(like.x)} ({plugin.one_line(cause)})"
            ) from cause
