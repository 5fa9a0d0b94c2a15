"""The back end for any module that torch can trace: a batch's per-example gradients as one straight program."""

from fedspa.engine.traced.engine import TracedEngine, trace_engine

__all__ = ["TracedEngine", "trace_engine"]
