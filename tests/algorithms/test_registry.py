"""What is to be known of an algorithm without running it."""

from __future__ import annotations

import subprocess
import sys

from fedspa.algorithms import ALGORITHMS
from fedspa.mechanisms import MECHANISMS


def test_configs_and_reports_need_no_torch() -> None:
    code = "import sys, fedspa.runs.config, fedspa.report.promise as p; p.cap_of; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_mechanism_is_some_algorithms_and_is_registered() -> None:
    variants = [each for known in ALGORITHMS.values() for each in (known, known.aggregated) if each is not None]
    used = {algorithm.mechanism.name for algorithm in variants if algorithm.mechanism is not None}
    assert used == set(MECHANISMS)
