"""Federated learning under record-level local differential privacy, with sparse uploads.

import fedspa

result = fedspa.run({"privacy": {"epsilon": 2.0}})
print(result.summary["accuracy_last"], result.summary["epsilon"])

Whatever is wrong with what a run was given is a `fedspa.FedspaError` of one line.
"""

from __future__ import annotations

TYPE_CHECKING = False  # known to type checkers by its name; typing itself takes longer to import than all of this
if TYPE_CHECKING:
    from typing import Any

    from fedspa import guard
    from fedspa.data.dataset import Dataset
    from fedspa.data.given import from_agents, from_arrays, from_examples, from_partitioner, from_table
    from fedspa.errors import FedspaError, MixingWarning, SeededNoiseWarning
    from fedspa.learning.check import check
    from fedspa.learning.fix import fix
    from fedspa.learning.sound import Problem
    from fedspa.running import RunResult
    from fedspa.running import simulate as run
    from fedspa.runs.config import Config, load
    from fedspa.tuning.tune import tune

# Name → where it lives. Looked up on first use: torch takes seconds to import, and `fedspa --help` does not need it.
_PUBLIC = {
    "Config": ("fedspa.runs.config", "Config"),
    "Dataset": ("fedspa.data.dataset", "Dataset"),
    "FedspaError": ("fedspa.errors", "FedspaError"),
    "MixingWarning": ("fedspa.errors", "MixingWarning"),
    "Problem": ("fedspa.learning.sound", "Problem"),
    "RunResult": ("fedspa.running", "RunResult"),
    "SeededNoiseWarning": ("fedspa.errors", "SeededNoiseWarning"),
    "check": ("fedspa.learning.check", "check"),
    "fix": ("fedspa.learning.fix", "fix"),
    "from_agents": ("fedspa.data.given", "from_agents"),
    "from_arrays": ("fedspa.data.given", "from_arrays"),
    "from_examples": ("fedspa.data.given", "from_examples"),
    "from_partitioner": ("fedspa.data.given", "from_partitioner"),
    "from_table": ("fedspa.data.given", "from_table"),
    "guard": ("fedspa.guard", ""),
    "load": ("fedspa.runs.config", "load"),
    "run": ("fedspa.running", "simulate"),
    "tune": ("fedspa.tuning.tune", "tune"),
}

__all__ = [
    "Config",
    "Dataset",
    "FedspaError",
    "MixingWarning",
    "Problem",
    "RunResult",
    "SeededNoiseWarning",
    "check",
    "fix",
    "from_agents",
    "from_arrays",
    "from_examples",
    "from_partitioner",
    "from_table",
    "guard",
    "load",
    "run",
    "tune",
]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'fedspa' has no attribute {name!r}; it has {', '.join(__all__)}")
    from importlib import import_module

    module, attribute = _PUBLIC[name]
    return getattr(import_module(module), attribute) if attribute else import_module(module)
