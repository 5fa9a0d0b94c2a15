"""The algorithms by name. A new one is a file with an `Algorithm` in it, and a line here."""

from fedspa.algorithms.base import Agent, Algorithm, Terms
from fedspa.algorithms.cpsgd import CPSGD
from fedspa.algorithms.dpfed import DP_FED
from fedspa.algorithms.fedavg import FEDAVG
from fedspa.algorithms.fedspa import FED_SPA

ALGORITHMS: dict[str, Algorithm] = {algorithm.name: algorithm for algorithm in (FED_SPA, FEDAVG, DP_FED, CPSGD)}

__all__ = ["ALGORITHMS", "Agent", "Algorithm", "Terms"]
