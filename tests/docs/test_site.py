"""The built site: strict, whole, without a word to the network."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("material")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return folder


def test_every_page_is_reached_from_the_menu(site: Path) -> None:
    menu = set(re.findall(r'href="([^"#]+\.html)"', (site / "index.html").read_text("utf-8")))
    for page in [*ROOT.glob("docs/*.md"), *ROOT.glob("examples/*/README.md")]:
        name = f"{page.stem}.html" if page.parent.name == "docs" else f"examples/{page.parent.name}.html"
        assert name in menu, f"name {page.relative_to(ROOT)} in mkdocs.yml"


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        text = re.sub(r"<pre.*?</pre>", "", page.read_text("utf-8"), flags=re.S)
        loaded = re.findall(r'<(?:script|link|img|iframe)[^>]+(?:src|href)="(https?://[^"]+)"', text)
        assert loaded == [], page.name


def test_the_reference_is_filled_in(site: Path) -> None:
    assert "<code>clip_value</code>" in (site / "config.html").read_text("utf-8")
    assert "fedspa ledger verify" in (site / "cli.html").read_text("utf-8")


def test_lists_after_a_line_of_text_are_lists(site: Path) -> None:
    """A forge takes them for lists; Python-Markdown does only after an empty line."""
    page = (site / "accounting.html").read_text("utf-8")
    assert "<li>the exact ε of the plain Gaussian" in page


def test_sources_that_pages_link_to_are_pages(site: Path) -> None:
    page = (site / "pitfalls.html").read_text("utf-8")
    assert 'href="source/src/fedspa/mechanisms/gaussian/plan.py.html"' in page
    assert "class" in (site / "source/src/fedspa/mechanisms/gaussian/plan.py.html").read_text("utf-8")


def test_the_api_is_made_from_docstrings_and_found(site: Path) -> None:
    page = (site / "api.html").read_text("utf-8")
    for name in ("run", "load_model", "RunResult", "from_table"):
        assert f'id="fedspa.{name}"' in page, name
    assert "Where the run was given its module in Python" in page
    assert "&gt;&gt;&gt; </span>" in page  # examples are code,
    assert "numbers in the\ntarget's own unit" in page  # a Returns is one item, however many its lines are
    assert "<blockquote>" not in page  # which Markdown alone takes for quotes of quotes
    found = json.loads((site / "search" / "search_index.json").read_text("utf-8"))["docs"]
    assert any(entry["location"] == "api.html#fedspa.load_model" for entry in found)
