"""A project is no run: its folder has a config.toml too, as `fedspa new` makes it, and nothing that a run writes."""

from __future__ import annotations

from pathlib import Path

from fedspa import durable
from fedspa.errors import ConfigError

# Before its first checkpoint a run has written its config alone, so that whatever else stands there is not a run's.
_OF_A_RUN = {"checkpoint", "ledger.sqlite", "metrics.jsonl", "summary.json", "ended.json", "model.safetensors"}
_OF_A_RUN |= {"report.html"}  # also of one that has not begun


def refuse(folder: Path) -> None:
    """Raise where `folder` holds a project, which would else be taken for a run that was killed before its first round,
    and be trained in."""
    names = {file.name for file in folder.iterdir() if not file.name.endswith(durable.DRAFT)}
    if names > {"config.toml"} and not names & _OF_A_RUN:
        start = folder / "config.toml"
        raise ConfigError(f"{folder} holds a config and no run yet; `fedspa run {start}` starts one, under runs/")
