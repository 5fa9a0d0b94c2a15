"""What `run.engine` may be."""

from __future__ import annotations

from typing import Literal

EngineName = Literal["auto", "native", "stacked", "traced", "generic", "reference"]
