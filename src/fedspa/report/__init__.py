"""report.html: a run, or several beside each other, on one page that needs no network and no other file."""

from __future__ import annotations

import base64
import hashlib
import logging
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedspa import __version__, durable
from fedspa.errors import FedspaError, one_line, os_errors_as
from fedspa.report.parts import page
from fedspa.report.record import RunRecord, read
from fedspa.runs.config import Config
from fedspa.track import Tracking

if TYPE_CHECKING:
    from jinja2 import Environment

log = logging.getLogger(__name__)


def write(folders: Sequence[Path], path: Path) -> None:
    """Write the report of the runs in `folders` to `path`, whole or not at all."""
    text = render([read(folder) for folder in folders])
    with os_errors_as(FedspaError, f"{path} cannot be written", "name another file"):
        durable.replace_text(path, text)


def render(runs: Sequence[RunRecord]) -> str:
    """Return the page as one text. Its own rules forbid every request, and every script and style but its own two."""
    css, js = (resources.files(__name__).joinpath("page", name).read_text("utf-8") for name in ("page.css", "page.js"))
    return (
        _pages()
        .get_template("page.html")
        .render(
            page=page(runs),
            css=css,
            js=js,
            css_hash=_hash(css),
            js_hash=_hash(js),
            version=__version__,
            made=f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        )
    )


@cache
def _pages() -> Environment:
    """Kept: making templates ready takes longer than filling them in."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    return Environment(
        loader=PackageLoader("fedspa.report", "page"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _hash(text: str) -> str:
    """Return the name of an inline script or style in a content security policy."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


class ReportWriter(Tracking):
    """Logs rounds to the run's tracker, if it has one, and writes its report at the end, which can be made again."""

    def __init__(self, config: Config, folder: Path) -> None:
        super().__init__(config, folder)
        self._path = folder

    def finish(self, summary: Mapping[str, Any]) -> None:
        super().finish(summary)
        try:
            write([self._path], self._path / "report.html")
        except Exception as error:  # the run is over and written: nothing of a report may end it in an error
            log.warning("there is no report: %s; `fedspa report %s` tries again", one_line(error), self._path)
