"""List every string of the package that a user can read: errors, warnings, help texts, and what commands print.

    python docs/messages.py [FOLDER...]     # all of src/fedspa unless folders or files are named

Read the list in one sitting after a change of messages: the same thing should have the same name everywhere.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
CALLS = {"warn", "print", "echo", "say", "Option", "Argument", "Typer", "Field", "Check", "Unsupported", "Problem"}
LOGGING = {"debug", "info", "warning", "error"}


def messages(path: Path) -> Iterator[tuple[int, str]]:
    """Return (line, text) of each user-facing string of a module, in its order."""
    tree = ast.parse(path.read_text("utf-8"))
    found: dict[int, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            found[node.lineno] = _text(node.exc)
        elif isinstance(node, ast.Call) and _name(node.func) in CALLS | LOGGING:
            found.setdefault(node.lineno, _text(node))
        elif isinstance(node, ast.FunctionDef) and any(_is_command(decorator) for decorator in node.decorator_list):
            found.setdefault(node.lineno, " ".join((ast.get_docstring(node) or "").split()))
    return iter(sorted((line, text) for line, text in found.items() if " " in text))


def _is_command(decorator: ast.expr) -> bool:
    return isinstance(decorator, ast.Call) and _name(decorator.func) in {"command", "callback"}


def _name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _text(call: ast.Call) -> str:
    """Join the strings of a call's arguments; {…} stands for what is filled in."""
    parts = [_string(argument) for argument in (*call.args, *(keyword.value for keyword in call.keywords))]
    return " | ".join(part for part in parts if part)


def _string(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(_string(part) if isinstance(part, ast.Constant) else "{…}" for part in node.values)
    if isinstance(node, ast.BinOp):
        return _string(node.left) + _string(node.right)
    if isinstance(node, ast.IfExp):
        return f"{_string(node.body)} / {_string(node.orelse)}"
    return ""


if __name__ == "__main__":
    for start in [Path(name) for name in sys.argv[1:]] or [ROOT / "src" / "fedspa"]:
        for module in sorted(start.rglob("*.py")) if start.is_dir() else [start]:
            for line, text in messages(module):
                print(f"{module.resolve().relative_to(ROOT)}:{line}: {text}")
