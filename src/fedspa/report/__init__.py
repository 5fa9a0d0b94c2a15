"""What comes of a run, for people: a page that needs no network and no other file; as Markdown the model card, and the
annex to a data protection impact assessment (Article 35 GDPR). All are of the same facts and words."""

from __future__ import annotations

import base64
import hashlib
import logging
import re
from datetime import UTC, datetime
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from fedspa import __version__, durable
from fedspa.errors import FedspaError, one_line, os_errors_as, printable
from fedspa.report.parts import describe
from fedspa.report.record import RunRecord, read

if TYPE_CHECKING:
    from jinja2 import Environment


log = logging.getLogger(__name__)


def write(folder: Path, path: Path | None = None) -> Path:
    """Write the report of the run in `folder` to `path` (its report.html), whole or not at all; return the path."""
    return _written(render(read(folder)), path or folder / "report.html")


def write_card(folder: Path, path: Path | None = None) -> Path:
    """Write the model card, likewise (card.md)."""
    return _written(card(folder), path or folder / "card.md")


def write_annex(folder: Path, path: Path | None = None) -> Path:
    """Write the annex, likewise (dpia.md)."""
    text = _pages().get_template("annex.md").render(run=describe(read(folder)), version=__version__)
    return _written(text, path or folder / "dpia.md")


def card(folder: Path) -> str:
    """Return the model card of the run in `folder`."""
    return _pages().get_template("card.md").render(run=describe(read(folder)), version=__version__)


def _written(text: str, path: Path) -> Path:
    with os_errors_as(FedspaError, f"{path} cannot be written", "name another file"):
        durable.replace_text(path, text)
    return path


def write_or_warn(folder: Path) -> None:
    """Write the report of a run that has just ended. The run is written: nothing of a report may end it in an error."""
    try:
        write(folder)
    except Exception as error:
        log.warning("there is no report: %s; `fedspa report %s` tries again", one_line(error), folder)


def render(run: RunRecord) -> str:
    """Return the page as one text. Its own rules forbid every request, and every script and style but its own two."""
    css, js = (resources.files(__name__).joinpath("page", name).read_text("utf-8") for name in ("page.css", "page.js"))
    return (
        _pages()
        .get_template("page.html")
        .render(
            run=describe(run),
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
    from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape

    found = Environment(
        loader=PackageLoader("fedspa.report", "page"),
        autoescape=select_autoescape(["html"]),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters["md"] = _as_markdown
    return found


def _as_markdown(text: str) -> str:
    """Names and values may be anybody's: nothing in them is markup, and none of them ends a line or a cell."""
    return re.sub(r"([\\`<|\[\]])", r"\\\1", printable(text.replace("\u00a0", " ")))


def _hash(text: str) -> str:
    """Return the name of an inline script or style in a content security policy."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
