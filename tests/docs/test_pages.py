"""The pages do what they say: the tutorial is walked through, configs load, links and anchors lead somewhere."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from fedspa.cli import main
from fedspa.runs.config import Config, load

sys.path.insert(0, str(Path(__file__).parents[2] / "docs"))

import reference

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))
EVERY_PAGE = [*PAGES, *sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("examples/*/README.md"))]
_BLOCK = re.compile(r"^```(\w+)(?: title=\"([^\"]+)\")?\n(.*?)^```$", flags=re.M | re.S)


def _name(page: Path) -> str:
    return f"{page.parent.name}/{page.name}"


@pytest.mark.slow
def test_the_tutorial_can_be_walked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Files are written, commands run, in the order of the page. Nothing on it needs anything but what it made."""
    monkeypatch.chdir(tmp_path)
    ran = 0
    for language, title, text in _BLOCK.findall((ROOT / "docs" / "tutorial.md").read_text("utf-8")):
        if title:
            (tmp_path / title).write_text(text, "utf-8")
        elif language == "sh":
            for line in text.splitlines():
                monkeypatch.setattr(sys, "argv", shlex.split(line))
                with pytest.raises(SystemExit) as stop:
                    main()
                ran += 1
                assert (stop.value.code or 0) == 0, f"{line}: {capsys.readouterr().err}"
        elif language == "python":
            result = subprocess.run([sys.executable, "-c", text], cwd=tmp_path, capture_output=True, text=True)
            assert result.returncode == 0, result.stderr
            accuracy, epsilon = re.findall(r"\d+\.\d+", result.stdout)
            assert float(accuracy) > 0.6
            assert float(epsilon) <= 8
    assert ran >= 8
    for module in ("flowers", "net"):  # names that other tests' folders may hold too
        sys.modules.pop(module, None)
    shown = capsys.readouterr().out
    assert "ε = 2.000, δ = 0.001" in shown
    assert "ε = 4.587 under replace-one (pld)" in shown  # what "Reading the guarantee" takes apart


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_its_configs_load(page: Path) -> None:
    for language, _, text in _BLOCK.findall(page.read_text("utf-8")):
        if language == "toml" and "[privacy]" in text:
            load(tomllib.loads(text))


def _commands(page: Path) -> list[str]:
    """Lines of code blocks that call fedspa, without prompt and comment; patterns with … or [ are no commands."""
    text = page.read_text("utf-8")
    code = [line for block in _BLOCK.findall(text) for line in block[2].splitlines()]
    code += re.findall(r"^ {4,}(.+)$", text, flags=re.M)
    lines = [line.removeprefix("$ ") for line in code if re.match(r"(\$ )?fedspa [a-z]", line)]
    plain = [re.sub(r"\s+(#|>|\\$|  ).*", "", line) for line in lines]
    return [line for line in plain if not re.search(r"[…\[|<]|\.\.\.", line)]


@pytest.mark.parametrize("page", EVERY_PAGE, ids=_name)
def test_its_commands_parse(page: Path) -> None:
    """Unknown commands and flags raise here; nothing is run."""
    from typer.main import get_command

    from fedspa.cli import app

    for line in _commands(page):
        command, words = get_command(app), shlex.split(line)[1:]
        while hasattr(command, "commands"):
            assert words[0] in command.commands, line
            command, words = command.commands[words[0]], words[1:]
        command.make_context(line, words)


def _anchors(path: Path) -> set[str]:
    """As a forge makes them from headings, and as mkdocs does where they differ not."""
    headings = re.findall(
        r"^#+ (.+)$", re.sub(r"^```.*?^```$", "", path.read_text("utf-8"), flags=re.M | re.S), flags=re.M
    )
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", EVERY_PAGE, ids=_name)
def test_its_links_lead_somewhere(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)\s#]*)(#[^)\s]+)?\)", page.read_text("utf-8")):
        if "://" in target:
            continue
        path = (page.parent / target).resolve() if target else page
        assert path.exists(), target
        if anchor and path.suffix == ".md":
            assert anchor[1:] in _anchors(path), f"{target}{anchor}"


# Every promise of SECURITY.md names a test, and that test is there.

TESTS = Path(__file__).parents[1]
PAGE = (TESTS.parent / "SECURITY.md").read_text("utf-8")


def test_the_tests_of_the_promises_are_there() -> None:
    named = re.findall(r"`([\w/]+\.py)::(test_\w+)`", PAGE)
    assert len(named) > 60
    for file, name in named:
        assert re.search(rf"^ *(?:async )?def {name}\(", (TESTS / file).read_text("utf-8"), re.M), f"{file}::{name}"


# The reference is made from the code: every key has a meaning, every command and option a line.


def test_every_key_of_a_config_has_a_meaning() -> None:
    for name, section in Config.model_fields.items():
        for key, about in section.annotation.model_fields.items():  # type: ignore[union-attr]
            assert about.description, f"say what {name}.{key} means, by Field(description=…) in runs/sections.py"
            assert about.description[-1] == "."


@pytest.mark.parametrize("page", reference.PAGES, ids=lambda page: page.stem)
def test_the_pages_are_up_to_date(page: Path) -> None:
    """After a change of keys or commands: python docs/reference.py."""
    text = page.read_text("utf-8")
    assert "<!-- reference: " in text
    assert text == reference.filled(text)


def test_pages_that_the_source_names_exist() -> None:
    """Messages send a user there."""
    sources = [path for kind in ("*.py", "*.c", "*.h", "*.toml") for path in (ROOT / "src").rglob(kind)]
    named = {name for path in sources for name in re.findall(r"docs/[\w-]+\.md", path.read_text("utf-8"))}
    assert named
    assert [name for name in sorted(named) if not (ROOT / name).is_file()] == []
