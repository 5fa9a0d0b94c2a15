"""The run's folder: config.toml, metrics.jsonl (a line a round), summary.json, model.safetensors, ledger.sqlite."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from torch import nn

from fedspa.errors import ConfigError
from fedspa.runs.config import Config, to_toml


class RunFolder:
    """A fresh folder; `run.out`, or a dated one under runs/."""

    def __init__(self, config: Config, data_name: str) -> None:
        self.path = Path(config.run.out) if config.run.out is not None else _dated(config, data_name)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            if any(self.path.iterdir()):
                raise ConfigError(f"run.out is {self.path}, which is not empty; name a new folder")
            (self.path / "config.toml").write_text(to_toml(config), "utf-8")
            self._metrics = (self.path / "metrics.jsonl").open("w", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"run.out is {self.path}: {error.strerror or error}; name a folder to write to") from None

    @property
    def ledger(self) -> Path:
        return self.path / "ledger.sqlite"

    def add_round(self, metrics: Mapping[str, Any]) -> None:
        self._metrics.write(json.dumps(metrics, allow_nan=False) + "\n")
        self._metrics.flush()

    def finish(self, summary: Mapping[str, Any], module: nn.Module) -> None:
        from safetensors.torch import save_model

        self._metrics.close()
        save_model(module, str(self.path / "model.safetensors"))
        (self.path / "summary.json").write_text(json.dumps(summary, indent=2, allow_nan=False) + "\n", "utf-8")


def _dated(config: Config, data_name: str) -> Path:
    """runs/<algorithm>-<data>-<UTC time>, with a number behind it where two start within one second."""
    data = Path(data_name.replace(":", ".")).stem
    stem = f"{config.algorithm.name}-{data}-{datetime.now(UTC):%Y%m%d-%H%M%S}"
    path, number = Path("runs", stem), 1
    while path.exists():
        number += 1
        path = Path("runs", f"{stem}-{number}")
    return path
