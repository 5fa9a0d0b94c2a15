"""Tasks that nothing protects. An engine reads no dimension off their steps."""

from __future__ import annotations

from dataclasses import replace

from fedspa.engine.local import LocalTask
from fedspa.mechanisms.base import NoPlan
from fedspa.privacy.event import Sampling


def plain(sampling: Sampling, batch: int, local_steps: int) -> NoPlan:
    return NoPlan(1, 1, sampling, batch, local_steps)


def unprotected(task: LocalTask) -> LocalTask:
    """The same steps without clipping and noise."""
    return replace(task, steps=plain(task.sampling, task.batch, task.local_steps))
