"""The pages can be read: no cell is a paragraph, the words of the glossary are linked to, figures are true."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fedspa.runs.statement import guesses

DOCS = Path(__file__).parents[2] / "docs"
# Tables of config keys and commands are made from the code, and deployment's are a reference.
REFERENCE = {"api", "cli", "config", "deployment"}
PAGES = sorted(page for page in DOCS.glob("*.md") if page.stem not in REFERENCE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_no_cell_is_a_paragraph(page: Path) -> None:
    rows = [line for line in page.read_text("utf-8").splitlines() if line.startswith("|")]
    cells = [cell for row in rows for cell in row.strip("|").split("|")]
    assert not [cell for cell in cells if len(cell.split()) > 45]


@pytest.mark.parametrize("page", ["tuning", "ledger", "engine"])
def test_no_sentence_is_a_paragraph(page: str) -> None:
    text = re.sub(
        r"^```.*?^```|^(?:\||#|<!--|    ).*?$", "", (DOCS / f"{page}.md").read_text("utf-8"), flags=re.S | re.M
    )
    blocks = re.split(r"\n\s*\n|^\s*(?:[-*]|\d+\.) ", text, flags=re.M)
    ends = r"(?<=[.!?])[)*]*\s+(?=[A-Z`*(\[ετδ])"
    sentences = [sentence for block in blocks for sentence in re.split(ends, block.replace("\n>", "\n"))]
    assert len(sentences) > 80
    assert not [sentence for sentence in sentences if len(sentence.split()) > 38]


def test_the_glossary_says_each_term_in_a_few_sentences() -> None:
    terms = re.findall(r"^### (.+)\n((?:(?!#).+\n)+)", (DOCS / "glossary.md").read_text("utf-8"), flags=re.M)
    assert len(terms) >= 40
    for term, text in terms:
        assert len(text.split()) <= 60, term


@pytest.mark.parametrize("page", ["tutorial", "choosing", "privacy", "accounting", "wire", "secagg", "engine", "faq"])
def test_the_glossary_is_linked_to_where_its_words_appear_first(page: str) -> None:
    text = (DOCS / f"{page}.md").read_text("utf-8")
    assert "glossary.md" in text[: len(text) // 2]


def test_what_is_said_of_guesses_is_true() -> None:
    tutorial, privacy, glossary = (
        " ".join((DOCS / f"{page}.md").read_text("utf-8").split()) for page in ("tutorial", "privacy", "glossary")
    )
    strong, middle, weak = (guesses(epsilon, 1e-3) for epsilon in (1, 2, 8))
    assert f"At ε = 1 they are right at most {strong} times, at ε = 2 at most {middle} times" in tutorial
    assert f"right at most {strong} times in 100" in privacy
    assert f"right at most {strong} times in 100" in glossary
    assert weak == 100
