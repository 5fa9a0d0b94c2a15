"""Federated learning under record-level local differential privacy, with sparse uploads.

    import fedspa

    result = fedspa.run({"privacy": {"epsilon": 2.0}})
    print(result)                       # the score, the guarantee in one line, the run's folder
    result.predict(x)                   # answers of the trained module, which is result.module

Data of your own: `from_arrays`, `from_examples`, `from_agents`, `from_partitioner`, `from_table`. A module of your own:
`run(config, data=…, module=…)`; `check` says whether it can be trained privately, `fix` mends what it can. `tune` finds
settings within the same budget. `load_model` and `RunResult.load` bring a finished run back.

Whatever is wrong with what was given is a `fedspa.FedspaError` of one line. Warnings are `fedspa.FedspaWarning`s.
"""

from __future__ import annotations

TYPE_CHECKING = False  # known to type checkers by its name; typing itself takes longer to import than all of this
if TYPE_CHECKING:
    from typing import Any

    from fedspa import guard
    from fedspa.data.dataset import Dataset
    from fedspa.data.given import from_agents, from_arrays, from_examples, from_partitioner, from_table
    from fedspa.errors import FedspaError, FedspaWarning, MixingWarning, RunWarning, SeededNoiseWarning
    from fedspa.learning.fix import fix
    from fedspa.learning.layers import Problem
    from fedspa.learning.validate import check
    from fedspa.result import RunResult, load_model
    from fedspa.running import run
    from fedspa.runs.config import Config, load
    from fedspa.tuning.tune import tune

# Name → where it lives. Looked up on first use: torch takes seconds to import, and `fedspa --help` does not need it.
_PUBLIC = {
    "Config": "fedspa.runs.config",
    "Dataset": "fedspa.data.dataset",
    "FedspaError": "fedspa.errors",
    "FedspaWarning": "fedspa.errors",
    "MixingWarning": "fedspa.errors",
    "Problem": "fedspa.learning.layers",
    "RunResult": "fedspa.result",
    "RunWarning": "fedspa.errors",
    "SeededNoiseWarning": "fedspa.errors",
    "check": "fedspa.learning.validate",
    "fix": "fedspa.learning.fix",
    "from_agents": "fedspa.data.given",
    "from_arrays": "fedspa.data.given",
    "from_examples": "fedspa.data.given",
    "from_partitioner": "fedspa.data.given",
    "from_table": "fedspa.data.given",
    "guard": "fedspa.guard",
    "load": "fedspa.runs.config",
    "load_model": "fedspa.result",
    "run": "fedspa.running",
    "tune": "fedspa.tuning.tune",
}

__all__ = [
    "Config",
    "Dataset",
    "FedspaError",
    "FedspaWarning",
    "MixingWarning",
    "Problem",
    "RunResult",
    "RunWarning",
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
    "load_model",
    "run",
    "tune",
]
__version__ = "0.2.0"


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'fedspa' has no attribute {name!r}; it has {', '.join(__all__)}")
    from importlib import import_module

    module = import_module(_PUBLIC[name])
    return module if module.__name__ == f"fedspa.{name}" else getattr(module, name)


def __dir__() -> list[str]:
    return sorted(__all__)
