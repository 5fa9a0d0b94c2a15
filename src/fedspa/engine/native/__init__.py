"""The native back end: whole local trainings in compiled code, one thread an agent, on a CPU."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedspa.engine.native.engine import NativeEngine, supports

__all__ = ["NativeEngine", "supports"]


def __getattr__(name: str) -> Any:
    """Looked up on first use: the engine imports torch, which takes seconds, and `fedspa --version` asks only what the
    library beside it is."""
    if name not in (*__all__, "engine"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    engine = import_module(f"{__name__}.engine")
    return engine if name == "engine" else getattr(engine, name)
