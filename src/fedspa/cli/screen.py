"""Tables on a narrow screen: nothing of them is left out."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

WIDTH = 80  # every table fits it


def show(table: Table, screen: Console) -> None:
    """Print a table at 80 columns where the screen has fewer, and let the terminal fold its lines. Squeezed to the
    screen it would lose whole columns, and the last ones are ε and whether it holds."""
    own = screen.width
    screen.width = max(own, WIDTH)
    try:
        screen.print(table, crop=False)
    finally:
        screen.width = own
