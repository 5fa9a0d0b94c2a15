"""report.html: a run, or several beside each other, on one page that needs no network and no other file."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from fedspa import __version__, durable
from fedspa.errors import FedspaError, worded
from fedspa.report.parts import page
from fedspa.report.record import RunRecord, read

if TYPE_CHECKING:
    from jinja2 import Environment


def write(folders: Sequence[Path], path: Path) -> None:
    """Write the report of the runs in `folders` to `path`, whole or not at all."""
    text = render([read(folder) for folder in folders])
    with worded(FedspaError, lambda why: f"{path} cannot be written: {why}; name another file"):
        durable.replace_text(path, text)


def render(runs: Sequence[RunRecord]) -> str:
    """The page as one text. Its own rules forbid every request, and every script and style but its own two."""
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
    """As a content security policy names an inline script or style."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
