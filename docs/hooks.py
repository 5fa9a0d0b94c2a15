"""Hooks of `make docs`: add files from outside docs/, and adapt Markdown and links.

Pages are written for a forge first: they link to sources and examples by relative paths. Here every such target becomes
a page of the site, so that nothing leads nowhere and the site needs no network.
"""

from __future__ import annotations

import json
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]

# Page of the site ← file of the repository.
OUTSIDE = {
    "index.md": "README.md",
    "security.md": "SECURITY.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
    "dependencies.md": "DEPENDENCIES.md",
    "deploy.md": "deploy/README.md",
    **{f"examples/{path.parent.name}.md": f"examples/{path.parent.name}/README.md"
       for path in sorted(ROOT.glob("examples/*/README.md"))},
}  # fmt: skip
_LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?(\))")
_PICTURES = {".png", ".svg"}
_LANGUAGES = {".py": "python", ".toml": "toml", ".json": "json", ".c": "c", ".h": "c", ".sh": "sh"}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    for section in config.nav or []:
        for entries in section.values():
            for entry in entries if isinstance(entries, list) else []:
                for title, target in entry.items():
                    if target == "EXAMPLES":
                        entry[title] = [page for page in OUTSIDE if page.startswith("examples/")]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds what lies outside docs/; each text has its links made relative to where it now is."""
    for page, source in OUTSIDE.items():
        files.append(File.generated(config, page, content=_moved((ROOT / source).read_text("utf-8"), source, page)))
    for page in [file.src_uri for file in files.documentation_pages() if file.src_uri not in OUTSIDE]:
        text = (ROOT / "docs" / page).read_text("utf-8")
        files.remove(files.src_uris[page])
        files.append(File.generated(config, page, content=_moved(text, f"docs/{page}", page)))
    for source in sorted(_linked):
        if Path(source).suffix in _PICTURES:
            files.append(File.generated(config, source, content=(ROOT / source).read_bytes()))
            continue
        text, suffix = (ROOT / source).read_text("utf-8"), Path(source).suffix
        body = _notebook(text) if suffix == ".ipynb" else _fenced(text, _LANGUAGES.get(suffix, "text"))
        content = f"---\nsearch:\n  exclude: true\n---\n# `{source}`\n\n{body}"
        files.append(File.generated(config, _page_of(source), content=content))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    return _lists_apart(markdown)


_linked: set[str] = set()


def _moved(text: str, source: str, page: str) -> str:
    """`text` of the repository's file `source` with its links as they must read on the site's `page`."""

    def link(match: re.Match[str]) -> str:
        opening, target, anchor, closing = match[1], match[2], match[3] or "", match[4]
        if "://" in target or target.startswith("mailto:"):
            return match[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        if not (ROOT / path).exists():
            return match[0]  # the strict build names it
        new = posixpath.relpath(_page_of(path), posixpath.dirname(page) or ".")
        return f"{opening}{new}{anchor}{closing}"

    return "".join(
        part if i % 2 else _LINK.sub(link, part) for i, part in enumerate(re.split(r"(```.*?```)", text, flags=re.S))
    )


def _page_of(path: str) -> str:
    """Where a file or folder of the repository is found on the site: a folder by its README, or by the first below."""
    if (ROOT / path).is_dir():
        found = [source for source in OUTSIDE.values() if source.startswith(f"{path}/")]
        path = f"{path}/README.md" if f"{path}/README.md" in found or not found else found[0]
    for page, source in OUTSIDE.items():
        if path == source:
            return page
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    _linked.add(path)
    return path if Path(path).suffix in _PICTURES else f"source/{path}.md"


def _fenced(text: str, language: str) -> str:
    return f"````{language}\n{text}\n````\n"


def _notebook(text: str) -> str:
    """A notebook with the outputs that it holds."""
    parts = []
    for cell in json.loads(text)["cells"]:
        source = "".join(cell["source"])
        parts.append(re.sub(r"^# ", "## ", source) if cell["cell_type"] == "markdown" else _fenced(source, "python"))
        for output in cell.get("outputs", []):
            if "text" in output:
                parts.append(_fenced("".join(output["text"]), "text"))
            else:
                parts.append(f"![figure](data:image/png;base64,{output['data']['image/png']})")
    return "\n\n".join(parts) + "\n"


def _lists_apart(text: str) -> str:
    """Python-Markdown wants an empty line before a list, a forge does not."""
    lines: list[str] = []
    fenced = False
    for line in text.splitlines():
        fenced ^= line.lstrip().startswith("```")
        before = lines[-1] if lines else ""
        begins = re.match(r"([-*]|\d+\.) ", line) is not None and not re.match(r"([-*]|\d+\.) | ", before)
        if not fenced and begins and before.strip():
            lines.append("")
        lines.append(line)
    return "\n".join(lines) + "\n"
