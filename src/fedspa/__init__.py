"""Federated learning under record-level local differential privacy, with sparse uploads.

    import fedspa

    result = fedspa.run({"privacy": {"epsilon": 2.0}})
    print(result)                       # the score, the guarantee in one line, the run's folder
    result.predict(x)                   # answers of the trained module, which is result.module

Data of your own: `from_arrays`, `from_examples`, `from_agents`, `from_table`, `from_texts`. A
module of your own: `run(config, data=…, module=…)`; `check` says whether it can be trained privately, `fix` repairs
what it can. `tune` finds settings within the same budget. `load_model` and `RunResult.load` bring a finished run back.

Whatever is wrong with what was given is a `fedspa.FedspaError` of one line. Warnings are `fedspa.FedspaWarning`s.
"""

from __future__ import annotations

TYPE_CHECKING = False  # known to type checkers by its name; typing itself takes longer to import than all of this
if TYPE_CHECKING:
    from typing import Any

    from fedspa import guard as guard
    from fedspa.analytics.evaluation import Evaluation as Evaluation
    from fedspa.analytics.evaluation import evaluate as evaluate
    from fedspa.analytics.statistics import Statistics as Statistics
    from fedspa.analytics.statistics import statistics as statistics
    from fedspa.data.adapters import from_agents as from_agents
    from fedspa.data.adapters import from_arrays as from_arrays
    from fedspa.data.adapters import from_examples as from_examples
    from fedspa.data.adapters import from_table as from_table
    from fedspa.data.dataset import Dataset as Dataset
    from fedspa.data.texts import from_texts as from_texts
    from fedspa.errors import FedspaError as FedspaError
    from fedspa.errors import FedspaWarning as FedspaWarning
    from fedspa.errors import MixingWarning as MixingWarning
    from fedspa.errors import RunWarning as RunWarning
    from fedspa.errors import SeededNoiseWarning as SeededNoiseWarning
    from fedspa.learning.fix import fix as fix
    from fedspa.learning.fix import freeze as freeze
    from fedspa.learning.layers import Problem as Problem
    from fedspa.learning.validate import check as check
    from fedspa.result import RunResult as RunResult
    from fedspa.result import load_model as load_model
    from fedspa.running import run as run
    from fedspa.runs.config import Config as Config
    from fedspa.runs.config import load as load
    from fedspa.tuning.tune import tune as tune

# Name → where it lives. Looked up on first use: torch takes seconds to import, and `fedspa --help` does not need it.
_PUBLIC = {
    "Config": "fedspa.runs.config",
    "Dataset": "fedspa.data.dataset",
    "Evaluation": "fedspa.analytics.evaluation",
    "FedspaError": "fedspa.errors",
    "FedspaWarning": "fedspa.errors",
    "MixingWarning": "fedspa.errors",
    "Problem": "fedspa.learning.layers",
    "RunResult": "fedspa.result",
    "RunWarning": "fedspa.errors",
    "SeededNoiseWarning": "fedspa.errors",
    "Statistics": "fedspa.analytics.statistics",
    "check": "fedspa.learning.validate",
    "evaluate": "fedspa.analytics.evaluation",
    "fix": "fedspa.learning.fix",
    "freeze": "fedspa.learning.fix",
    "from_agents": "fedspa.data.adapters",
    "from_arrays": "fedspa.data.adapters",
    "from_examples": "fedspa.data.adapters",
    "from_table": "fedspa.data.adapters",
    "from_texts": "fedspa.data.texts",
    "guard": "fedspa.guard",
    "load": "fedspa.runs.config",
    "load_model": "fedspa.result",
    "run": "fedspa.running",
    "statistics": "fedspa.analytics.statistics",
    "tune": "fedspa.tuning.tune",
}

__all__ = [*_PUBLIC]
__version__ = "0.2.0"


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'fedspa' has no attribute {name!r}; it has {', '.join(__all__)}")
    from importlib import import_module

    module = import_module(_PUBLIC[name])
    return module if module.__name__ == f"fedspa.{name}" else getattr(module, name)


def __dir__() -> list[str]:
    return sorted(__all__)
