"""Rounds for a tracker that the user already has: one small file each, and none of them can cost a run.

What is logged is what metrics.jsonl and summary.json hold: the server's side, nothing of an agent.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fedspa.errors import ConfigError, first_line
from fedspa.runs.config import Config
from fedspa.runs.guarantee import statement
from fedspa.runs.rundir import Follower

log = logging.getLogger(__name__)


class Tracking:
    """The tracker that `run.track` names, if any. It is looked for before a run starts; when it fails later, it is
    dropped with a warning and the run continues."""

    def __init__(self, config: Config, folder: Path) -> None:
        self._config, self._folder = config, folder
        self._name: str | None = config.run.track
        self._tracker: Follower | None = None  # made when the first round is done
        if self._name is not None and find_spec(self._name) is None:
            raise ConfigError(
                f"run.track is {self._name!r}, which is not installed; pip install 'fedspa[{self._name}]', or leave it "
                "out"
            )

    def add_round(self, metrics: Mapping[str, Any]) -> None:
        if self._name is not None:
            with self._dropped_when_it_fails():
                if self._tracker is None:
                    module = import_module(f"fedspa.track.{self._name}")
                    self._tracker = module.open_tracker(self._config, self._folder, metrics["round"])
                self._tracker.add_round(metrics)

    def finish(self, summary: Mapping[str, Any]) -> None:
        if self._tracker is not None:
            with self._dropped_when_it_fails():
                self._tracker.finish(summary)

    def close(self) -> None:
        if self._tracker is not None:
            with self._dropped_when_it_fails():
                self._tracker.close()
        self._tracker = None

    @contextmanager
    def _dropped_when_it_fails(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # a full disk, a server that is gone, another version: whatever it is
            log.warning("%s failed and is no longer logged to: %s", self._name, first_line(error))
            self._name = self._tracker = None


def figures(metrics: Mapping[str, Any]) -> dict[str, float]:
    """What of a round's metrics is a number to be drawn, its scores beside the rest. An ε that is no guarantee has a
    name that says so."""
    names = {} if metrics["private"] else {key: f"{key}_not_private" for key in ("epsilon", "epsilon_worst_case")}
    return {
        names.get(key, key).replace(":", "."): float(value)  # a function's name; not every tracker takes a colon
        for key, value in {**metrics.get("scores", {}), **metrics}.items()
        if key != "round" and isinstance(value, int | float) and not isinstance(value, bool)
    }


def words(summary: Mapping[str, Any]) -> dict[str, str]:
    """What is to be read beside the numbers. Where settings were searched, a config has only those that it began with:
    which of them trained the model is said, too."""
    found = {"guarantee": statement(summary), "warnings": "\n".join(summary["warnings"]), "score": summary["score"]}
    if (tuning := summary.get("tuning")) is not None:
        found["chosen"] = json.dumps(tuning["trials"][tuning["choice"]]["settings"])
    return found
