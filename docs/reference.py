"""The reference of the config and of the command line, in config.md and cli.md, from the code that reads them.

    python docs/reference.py     # after a change of keys or commands: writes both pages anew

A test holds the pages to the code.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic.fields import FieldInfo
from typer.main import get_command

from fedspa.cli import app
from fedspa.learning.options import OPTIONS
from fedspa.runs.config import Config

_SIGNS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}


PAGES = tuple(Path(__file__).with_name(name) for name in ("config.md", "cli.md"))


def filled(page: str) -> str:
    """A page with what stands between `<!-- reference: config -->` and `<!-- end -->` made anew."""
    makers = {"config": config, "cli": cli}
    return re.sub(
        r"(<!-- reference: (\w+) -->\n)(?:.*\n)*?(<!-- end -->\n)",
        lambda match: f"{match[1]}{makers[match[2]]()}{match[3]}",
        page,
    )


def config() -> str:
    """A table per section: key, values, default, meaning."""
    parts = []
    for section, field in Config.model_fields.items():
        rows = []
        for key, about in _keys(field.annotation):
            missing = about.default is None or about.is_required()
            default = "–" if missing else f"`{_toml(about.default)}`"
            rows.append(f"| `{key}` | {_values(about)} | {default} | {about.description} |")
        if section == "task":
            rows += _task_options()
        parts.append(f"## [{section}]\n\n| key | values | default | |\n|---|---|---|---|\n" + "\n".join(rows) + "\n")
    return "\n".join(parts)


def _keys(owner: Any, prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Return the keys of a section with their fields, those of a table within it as `table.key`."""
    for key, about in owner.model_fields.items():
        within = [kind for kind in (about.annotation, *get_args(about.annotation)) if hasattr(kind, "model_fields")]
        if within:
            yield from _keys(within[0], f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", about


def _task_options() -> list[str]:
    rows: dict[tuple[str, str], list[str]] = {}
    for task, options in OPTIONS.items():
        for key, about in options.model_fields.items():
            default = "–" if about.default is None else f"`{_toml(about.default)}`"
            text = str(about.description)
            rows.setdefault((f"| `options.{key}` | {_values(about)} | {default} |", text), []).append(f"`{task}`")
    return [f"{cells} For {', '.join(tasks)}: {text[0].lower()}{text[1:]} |" for (cells, text), tasks in rows.items()]


def cli() -> str:
    """A section per command: what it does, an example, its arguments and options."""
    parts = []
    for path, command in _commands(get_command(app)):
        name = " ".join(("fedspa", *path))
        arguments = [p for p in command.params if p.param_type_name == "argument"]
        words = [f"[{p.human_readable_name}]" if not p.required else p.human_readable_name for p in arguments]
        described = re.sub(r"^\s*Example: (.+)$", r"\n    \1\n", command.help or "", flags=re.M)
        rows = [_row(p) for p in command.params if p.name != "help"]
        table = "| | values | default | |\n|---|---|---|---|\n" + "\n".join(rows) + "\n" if rows else ""
        usage = " ".join([name, *words, *(["[OPTIONS]"] if len(rows) > len(arguments) else [])])
        parts.append(f"## {name}\n\n    {usage}\n\n{_unwrapped(described)}\n{table}")
    return "\n".join(parts)


def _commands(group: Any, *path: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _commands(command, *path, name)
        else:
            yield (*path, name), command


def _row(parameter: Any) -> str:
    option = parameter.param_type_name == "option"
    name = f"`{', '.join(parameter.opts)}`" if option else f"`{parameter.human_readable_name}`"
    kind = "flag" if getattr(parameter, "is_flag", False) else _kind(parameter)
    default = parameter.default
    shown = "required" if parameter.required else "–" if default is None or default is False else f"`{default}`"
    cells = (name, kind, shown, getattr(parameter, "help", None) or "")
    return f"| {' | '.join(_cell(cell) for cell in cells)} |"


def _kind(parameter: Any) -> str:
    choices = getattr(parameter.type, "choices", None)
    if choices:
        return " ".join(f"`{choice}`" for choice in choices)
    return str(parameter.metavar or parameter.type.name).lower()


def _values(about: FieldInfo) -> str:
    """The allowed values of a key: choices, or a type with its bounds."""
    choices, kinds, metadata = [], [], list(about.metadata)
    waiting = [about.annotation]
    while waiting:
        kind: Any = waiting.pop(0)
        if kind is type(None):
            continue
        if get_origin(kind) is None:
            kinds.append(kind.__name__)
        elif get_origin(kind) is list and kinds:
            kinds.append("list")
        elif get_origin(kind) is dict:
            kinds.append("table")
        elif str(get_origin(kind)) == "typing.Literal":
            choices += [f"`{choice}`" for choice in get_args(kind)]
        elif hasattr(kind, "__metadata__"):
            metadata += [bound for field in kind.__metadata__ for bound in getattr(field, "metadata", ())]
            waiting.append(get_args(kind)[0])
        else:
            waiting += get_args(kind)
    signs = [(bound, name) for bound in metadata for name in _SIGNS if hasattr(bound, name)]
    bounds = [f"{_SIGNS[name]} {_number(getattr(bound, name))}" for bound, name in signs]
    return " ".join(choices) or ", ".join([" or ".join(kinds), *bounds])


def _number(bound: float) -> str:
    power = int(bound).bit_length() - 1
    return f"2^{power}" if power > 10 and bound == 2**power else f"{bound:g}"


def _toml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else f'"{value}"' if isinstance(value, str) else str(value)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _unwrapped(text: str) -> str:
    """Paragraphs on one line each; an indented example stays as it is."""
    return re.sub(r"(?<=\S)\n(?=\S)", " ", text).strip() + "\n"


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(filled(page.read_text("utf-8")), "utf-8")
