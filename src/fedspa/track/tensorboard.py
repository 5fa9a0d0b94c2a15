"""TensorBoard: `tensorboard --logdir RUN/tensorboard`. Steps are rounds, counted from 1."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from fedspa.runs.config import Config, to_toml
from fedspa.track import figures, words


class TensorBoard:
    """Event files in the run's folder. A resumed run hides what was logged of rounds that it repeats."""

    def __init__(self, config: Config, folder: Path, first_round: int) -> None:
        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=first_round + 1)
        self._text("config", to_toml(config))

    def add_round(self, metrics: Mapping[str, Any]) -> None:
        for key, value in figures(metrics).items():
            self._writer.add_scalar(key, value, metrics["round"] + 1)

    def finish(self, summary: Mapping[str, Any]) -> None:
        for name, text in words(summary).items():
            self._text(name, text)

    def close(self) -> None:
        self._writer.close()

    def _text(self, name: str, text: str) -> None:
        """Log a text as code, so that nothing in it is taken for Markdown."""
        indented = "".join(f"    {line}\n" for line in text.splitlines())
        self._writer.add_text(name, indented)


open_tracker = TensorBoard
