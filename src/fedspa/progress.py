"""A run while it goes on, in one line: rounds, time left, the score, ε so far, bytes. In terminals and notebooks."""

from __future__ import annotations

import html
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from fedspa.runs.metrics import RoundMetrics, shown_score
from fedspa.runs.statement import shown, shown_bytes

if TYPE_CHECKING:
    from rich.console import Console

    from fedspa.runs.config import Config

Show = Callable[[int, str], None]  # rounds that are done, and words


class Progress:
    """What is told of a run, to whatever shows it."""

    def __init__(self, config: Config, show: Show) -> None:
        self._config, self._show = config, show
        self._done = self._sent = 0

    def resumed(self, history: Sequence[RoundMetrics]) -> None:
        """The run goes on after these rounds."""
        self._done, self._sent = len(history), sum(metrics.uplink_bytes for metrics in history)

    def advance(self, metrics: RoundMetrics) -> None:
        """A round is done."""
        self._done, self._sent = metrics.round + 1, self._sent + metrics.uplink_bytes
        privacy = self._config.privacy
        flaw = "" if metrics.private else f" ({not_private(privacy.noise)})"
        floor = f" (floor {shown(metrics.epsilon_floor)})" if privacy.adversary != "local" else ""
        spent = "" if metrics.epsilon is None else f"  ε {shown(metrics.epsilon)}{floor}{flaw}"
        self.say(f"{shown_score(metrics.headline, metrics.score)}{spent}  {shown_bytes(self._sent)}")

    def say(self, words: str) -> None:
        self._show(self._done, words)


def not_private(noise: str | None) -> str:
    """What stands beside an ε that is no guarantee."""
    return "SEEDED NOISE: not private" if noise == "seeded" else "not private"


@contextmanager
def watching(config: Config, asked: bool | None, console: Console | None = None) -> Iterator[Progress]:
    """The progress of a run, where there is somebody to see it or it was `asked` for: a bar in terminals and notebooks,
    else a line per round on standard error."""
    from rich.console import Console

    screen = console if console is not None else Console(stderr=True)
    rounds = config.federation.rounds
    if asked is False or (asked is None and not screen.is_terminal and not screen.is_jupyter):
        yield Progress(config, lambda done, words: None)
        return
    with _on(screen, rounds) as show:
        progress = Progress(config, show)
        with _features_told(progress.say):
            yield progress


@contextmanager
def _on(screen: Console, rounds: int) -> Iterator[Show]:
    if screen.is_jupyter:
        yield _in_notebook(rounds)
    elif not screen.is_terminal:
        yield lambda done, words: print(f"round {done} of {rounds}  {words}", file=sys.stderr, flush=True)
    else:
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Columns

        text = TextColumn("{task.description}", markup=False)
        columns = (TextColumn("round"), MofNCompleteColumn(), BarColumn(bar_width=14), TimeRemainingColumn(), text)
        with Columns(*columns, console=screen) as bar:
            task = bar.add_task("", total=rounds)
            yield lambda done, words: bar.update(task, completed=done, description=words)


def _in_notebook(rounds: int) -> Show:
    """By IPython alone, since rich wants ipywidgets there, which few have."""
    from IPython.display import HTML, display

    handle = display(HTML(""), display_id=True)

    def show(done: int, words: str) -> None:
        bar = f'<progress value="{done}" max="{rounds}"></progress>'
        handle.update(HTML(f"{bar} round {done} of {rounds} &nbsp; {html.escape(words)}"))

    return show


@contextmanager
def _features_told(tell: Callable[[str], None]) -> Iterator[None]:
    """The first pass through a frozen body can take minutes: what it says meanwhile is told."""
    logger, handler = logging.getLogger("fedspa.learning.features"), logging.Handler()
    handler.emit = lambda record: tell(record.getMessage())  # type: ignore[method-assign]
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
