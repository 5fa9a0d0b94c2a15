"""Devices by name."""

from __future__ import annotations

import torch

from fedspa.errors import ConfigError


def device_named(name: str, key: str) -> torch.device:
    """The device that `key` names, or a ConfigError where it cannot compute."""
    try:
        device = torch.device(name)
        torch.ones(1, device=device).item()  # some devices, such as meta, hold no values
    except Exception as cause:  # each backend of torch has its own way to say that it is not there
        raise ConfigError(f"{key} is {name!r}, which cannot compute on this machine; cpu can") from cause
    return device
