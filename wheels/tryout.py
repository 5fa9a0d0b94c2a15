"""What a newcomer does with an installed fedspa, step by step, in an empty folder.

    python wheels/tryout.py      # by the Python of the environment that fedspa was installed into

It needs nothing but that environment: there is no compiler on the path, and no checkout on Python's. Every step is a
function; a step that fails ends the whole with exit code 1 and shows what was printed. A step whose packages are not
installed says so. A new command that a newcomer meets gets a step of its own at the end of STEPS.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

BIN = Path(sys.executable).parent  # where pip put the program
EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
SMALL = ["--set", "federation.rounds=3", "--set", "algorithm.local_steps=3"]

TABLE = """
[federation]
agents = 3
per_round = 3
rounds = 3

[data]
name = "visits.csv"
holdout = 0.2

[data.table]
agent = "clinic"

[data.table.columns]
age = {kind = "number", range = [0, 110]}
smoker = {kind = "flag"}
ill = {kind = "flag", target = true}

[algorithm]
local_steps = 3
batch = 20
local_lr = 1.0

[privacy]
epsilon = 2.0
delta = 1e-3
clip_value = 0.5
"""


RECORDS = """
import numpy as np
draw = np.random.default_rng(0)
np.savez("north/records.npz", x=draw.normal(size=(200, 5)).astype("float32"), y=draw.integers(0, 2, 200))
"""


class Missing(Exception):
    """A package that only some users need."""


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for step in STEPS:
            start = time.perf_counter()
            try:
                step()
            except Missing as package:
                print(f"{step.__name__:14} skipped: {package} is not installed")
                continue
            except AssertionError as error:
                print(f"{step.__name__}: {error}", file=sys.stderr)
                return 1
            print(f"{step.__name__:14} {time.perf_counter() - start:5.1f} s", flush=True)
        os.chdir("/")
    return 0


def version() -> None:
    """It names the instruction set of the compiled part: the wheel has one, and it loads here."""
    told = fedspa("--version")
    assert re.fullmatch(r"fedspa \S+ \(torch \S+, native (plain|avx2|avx512|neon)\)\n", told), told


def installed() -> None:
    where = python("import fedspa; print(fedspa.__file__)").strip()
    assert Path(where).is_relative_to(sys.prefix), f"fedspa comes from {where}, and not from this environment"


def doctor() -> None:
    outcome = json.loads(fedspa("doctor", "--json"))
    checks = {check["subject"]: check for check in outcome["checks"]}
    assert outcome["ready"], outcome
    assert checks["native"]["passed"], checks["native"]
    assert checks["compiler"]["detail"].startswith("no "), checks["compiler"]  # or this would prove less


def quickstart() -> None:
    assert "Guarantee" in fedspa("run", "--out", "first", *SMALL)
    assert "</html>" in Path("first/report.html").read_text("utf-8")


def own_table() -> None:
    """A CSV of one's own: checked, then trained on."""
    draw = random.Random(0)
    rows = [(draw.choice("abc"), draw.randint(18, 90), draw.choice(["yes", "no"])) for _ in range(300)]
    lines = [f"{clinic},{age},{smoker},{int(age + 30 * (smoker == 'yes') > 70)}" for clinic, age, smoker in rows]
    Path("visits.csv").write_text("\n".join(["clinic,age,smoker,ill", *lines]) + "\n")
    Path("visits.toml").write_text(TABLE)
    assert "valid" in fedspa("data", "check", "visits.csv", "--schema", "visits.toml")
    assert "Guarantee" in fedspa("run", "visits.toml", "--out", "visits")


def report() -> None:
    fedspa("report", "visits", "--out", "visits.html")
    assert "</html>" in Path("visits.html").read_text("utf-8")


def site_check() -> None:
    """A site from nothing to ready: its folder, its records, an app that it allows."""
    require("flwr")
    fedspa("server", "new", "server", "--name", "localhost")
    fedspa("site", "new", "north", "--superlink", "localhost:8443", "--certificate", "server/ca.crt")
    python(RECORDS)
    fedspa("new", "--flower", "app")
    fedspa("site", "pin", "north", "app")
    assert fedspa("site", "check", "north").startswith("north: ready\n")


def guarded_opacus() -> None:
    """The guard around a stock Opacus loop, as the example has it."""
    require("opacus")
    folder = Path("guarded")  # with a ledger of its own: that of this folder has the agents of the table
    folder.mkdir()
    shutil.copy(EXAMPLES / "guard-opacus" / "train.py", folder)
    printed = _run([sys.executable, "train.py", "--epochs", "1"], folder)
    assert "epoch 1" in printed, printed
    assert "digits" in fedspa("ledger", "show", str(folder / "ledger.sqlite"))


# In the order in which a newcomer meets them.
STEPS: tuple[Callable[[], None], ...] = (
    *(installed, version, doctor, quickstart, own_table, report, site_check, guarded_opacus),
)


def require(package: str) -> None:
    if find_spec(package) is None:
        raise Missing(package)


def fedspa(*words: str) -> str:
    return _run([str(BIN / "fedspa"), *words])


def python(code: str) -> str:
    return _run([sys.executable, "-c", code])


def _run(command: list[str], folder: Path | None = None) -> str:
    """What it prints. Only the environment's own programs are on its path, and nothing else is on Python's."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "FEDSPA", "PATH"))}
    kept["PATH"] = str(BIN)
    done = subprocess.run(command, env=kept, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
