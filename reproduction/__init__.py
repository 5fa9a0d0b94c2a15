"""The paper's tables and figure, run again: `python -m reproduction --help` in the repository's root; see README.md."""

import sys
from pathlib import Path

# Statistics over seeds and provenance are those of the benchmarks.
sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
