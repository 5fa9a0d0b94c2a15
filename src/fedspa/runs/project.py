"""A project is no run: its folder has a config.toml too, as `fedspa new` makes it, with its code beside it."""

from __future__ import annotations

from pathlib import Path

from fedspa.errors import ConfigError

_OF_A_RUN = ("checkpoint", "ledger.sqlite", "metrics.jsonl", "summary.json")


def refuse(folder: Path) -> None:
    """Raise where `folder` holds a project, which would else be taken for a run that was killed before its first round,
    and be trained in. A run writes no code, at whatever instant it is killed. Nor does it make pipes, sockets or
    devices, and to open a pipe would wait for ever."""
    for path in (*folder.iterdir(), *folder.glob("checkpoint/*")):
        if path.exists() and not path.is_file() and not path.is_dir():
            raise ConfigError(f"{path} is not a plain file; put the run's own file back from a backup")
    if any(folder.glob("*.py")) and not any((folder / name).exists() for name in _OF_A_RUN):
        start = folder / "config.toml"
        raise ConfigError(f"{folder} holds a config and no run yet; `fedspa run {start}` starts one, under runs/")
