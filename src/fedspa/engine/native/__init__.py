"""The native back end: whole local trainings in compiled code, one thread an agent, on a CPU."""

from fedspa.engine.native.engine import NativeEngine, supports

__all__ = ["NativeEngine", "supports"]
