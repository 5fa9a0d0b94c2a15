"""The trained module of a finished run, from its folder and without its records.

The weights are in model.safetensors, which holds numbers and no code. What the module is made of, the config names; how
large its input and output are, the summary says.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedspa.data.plugin import GIVEN
from fedspa.errors import ConfigError, first_line, quoted
from fedspa.examples import of_layout
from fedspa.learning import models
from fedspa.runs import rundir
from fedspa.runs.config import Config, load


def finished(folder: Path, module: nn.Module | None = None) -> tuple[dict[str, Any], nn.Module]:
    """The summary of the run in `folder`, and its trained module on the CPU: built anew, or the one that is given, with
    the run's parameters in place of its own."""
    rundir.check_is_run(folder)
    config, summary = load(folder / "config.toml"), rundir.read_summary(folder)
    if summary is None:
        raise ConfigError(
            f"the run in {folder} is not finished: there is no summary.json; `fedspa run --resume {folder}` resumes it"
        )
    if module is None:
        module = _built(config, summary, folder)
    elif not isinstance(module, nn.Module):
        raise ConfigError(f"module is a {type(module).__name__}; it must be a torch.nn.Module, built as the run's was")
    _fill(module.cpu(), folder)
    return summary, module


def require_its_own(module: nn.Module, folder: Path) -> None:
    """Raise where the module has other parameters than the run left, or more: its card would vouch for them."""
    from safetensors.torch import load_file

    kept = load_file(folder / "model.safetensors")
    now = module.state_dict()
    changed = any(name not in now or not torch.equal(now[name].cpu(), values) for name, values in kept.items())
    # The file has values that go by several names under one of them.
    places = {now[name].untyped_storage().data_ptr() for name in kept if name in now}
    added = [value for name, value in now.items() if name not in kept]
    if changed or any(value.numel() and value.untyped_storage().data_ptr() not in places for value in added):
        raise ConfigError(
            f"the module has other parameters than the run in {folder} left, and the model card is of those; export "
            f"fedspa.RunResult.load({str(folder)!r}), or write the changed module without a card by torch.onnx.export"
        )


def path_of(given: object, what: str) -> Path:
    if not isinstance(given, str | os.PathLike):
        raise ConfigError(f"{what} is {quoted(given)}; give a path")
    return Path(given)


def known(summary: Mapping[str, Any], fact: str, folder: Path) -> Any:
    """Return what the run found of its records and module."""
    found = summary.get("provenance")
    if not isinstance(found, dict) or fact not in found:
        raise ConfigError(f"summary.json in {folder} does not say the {fact}; give the folder of a whole run")
    return found[fact]


def _built(config: Config, summary: Mapping[str, Any], folder: Path) -> nn.Module:
    name = config.model.name
    if name.startswith(GIVEN):
        raise ConfigError(
            f"the run in {folder} was given its module in Python ({name.removeprefix(GIVEN)}), which no file builds; "
            f"build it the same way: fedspa.load_model({str(folder)!r}, module=…)"
        )
    like = of_layout(known(summary, "shape of a record", folder))
    shape = tuple(like.shape[1:]) if isinstance(like, Tensor) else None
    return models.build(
        name, shape, known(summary, "number of outputs", folder) or None, config.run.seed, config.run.code
    )


def _fill(module: nn.Module, folder: Path) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import load_model

    path = folder / "model.safetensors"
    if not path.is_file():
        raise ConfigError(f"{folder} has no model.safetensors; a finished run has one, so bring it back from a copy")
    try:
        load_model(module, path)
    except SafetensorError as error:
        raise ConfigError(f"{path} is damaged ({first_line(error)}); bring it back from a copy") from error
    except Exception as error:  # torch's, of names and shapes; and a module may have its own way to load
        reason = quoted(" ".join(str(error).split()))[1:-1]
        raise ConfigError(
            f"the parameters in {path} are not those of this {type(module).__name__} ({reason}); build "
            "the module as for the run"
        ) from error
