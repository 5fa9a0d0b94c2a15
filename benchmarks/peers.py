"""The same federated job in Flower's simulation, in pfl-research, in plain PyTorch and in ours: whole jobs, by wall.

    python benchmarks/peers.py [--data DIR] [--rounds 8] [--only ours,plain] [--python P] [--json] [--out F]

FedAvg and a private job (Fed-SPA's mechanism at p = .05 in every local step, which peers do with Opacus): MNIST's CNN,
100 agents of 600 records, 10 per round, 60 local steps of 10 records. After each round everyone evaluates on 100
records: training is what is timed (`--tested 10000` for all of MNIST's). `--agents 1000 --records 60 --per-round 100
--steps 6` is the same data in ten times as many hands. Memory is what the whole machine had less of at its peak.
Every contender gets a process or thread per core and one torch thread in each. A job's wall time is start-up plus
rounds: the seconds of a round are the median over all rounds, start-up is the rest (imports, records, Ray, the end).
Contenders take turns, whole job by whole job. Beside other work the ratios mean little: Linux may share cores out by
session, and Flower's workers are sessions of their own where others are one.

Without --data the records are random, of MNIST's shape. A peer that --python (default: this one) cannot import is named
as skipped. An environment for all of them, apart because their pins contradict ours:

    python -m venv DIR && DIR/bin/pip install torch==2.13.0
    DIR/bin/pip install pfl==0.6.0 'flwr[simulation]==1.41.0'
    DIR/bin/pip install --no-deps opacus==1.6.0 opt-einsum==3.4.0
    python benchmarks/peers.py --python DIR/bin/python
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch

from ending import ends_with_children, ran
from fedspa.data.datasets import load
from provenance import ROOT, in_parts, stamp

HERE = Path(__file__).parent / "peers"
sys.path.insert(0, str(HERE))
from peer_job import SHAPE, Job, write, write_records  # noqa: E402

OURS = "ours"
# Contender → script, what it must be able to import, and its title.
PEERS = {
    OURS: ("peer_fedspa.py", ("fedspa",), "fedspa"),
    "plain": ("peer_plain.py", ("torch",), "plain PyTorch"),
    "pfl": ("peer_pfl.py", ("pfl",), "pfl-research"),
    "flower": ("peer_flower.py", ("flwr", "ray"), "Flower"),
}
LONGEST_S = 600


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="folder with MNIST's files; random records without")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--steps", type=int, default=60, help="local steps")
    parser.add_argument("--agents", type=int, default=100)
    parser.add_argument("--records", type=int, default=600, help="of an agent")
    parser.add_argument("--per-round", type=int, default=10)
    parser.add_argument("--tested", type=int, default=100, help="records that each round is evaluated on")
    parser.add_argument("--cores", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--only", default=",".join(PEERS))
    parser.add_argument("--jobs", default="fedavg,private")
    parser.add_argument("--python", default=sys.executable, help="the interpreter that runs the peers")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--out", type=Path, help="keep the results in this file, job by job, and go on from it")
    arguments = parser.parse_args()
    jobs = {
        name: Job(
            private=name == "private",
            agents=arguments.agents,
            per_round=arguments.per_round,
            records=arguments.records,
            rounds=arguments.rounds,
            steps=arguments.steps,
            processes=arguments.cores,
        )
        for name in arguments.jobs.split(",")
    }
    numbers = ("rounds", "repeats", "steps", "agents", "records", "per_round", "tested", "cores")
    settings = {name: getattr(arguments, name) for name in numbers}
    settings |= {"data": "random" if arguments.data is None else "mnist", "only": arguments.only}
    versions = peer_versions(arguments.python)
    with tempfile.TemporaryDirectory() as folder:
        make_records(Path(folder), arguments.data, arguments.agents * arguments.records, arguments.tested)
        document = in_parts(
            "jobs",
            jobs,
            lambda name: measure(
                Path(folder), jobs[name], arguments.only.split(","), arguments.python, arguments.repeats
            ),
            settings,
            arguments.out,
            lambda: stamp() | {"peers": versions},
        )
    if arguments.json:
        print(json.dumps(document, indent=1))
        return
    for name, result in document["jobs"].items():
        show(name, result)


def make_records(folder: Path, data: Path | None, records: int, tested: int) -> None:
    if data is not None:
        mnist = load("mnist", data)
        train, test = (mnist.train_x[:records], mnist.train_y[:records]), (mnist.test_x[:tested], mnist.test_y[:tested])
    else:
        generator = torch.Generator().manual_seed(0)
        train, test = (
            (torch.randn(count, *SHAPE, generator=generator), torch.randint(0, 10, (count,), generator=generator))
            for count in (records, tested)
        )
    write_records(folder, *train, *test)


def measure(folder: Path, job: Job, names: list[str], python: str, repeats: int) -> dict[str, Any]:
    """All contenders, in turns; those that cannot run are named with the reason."""
    write(folder, job)
    skipped = {name: why for name in names if (why := missing(name, job, python)) is not None}
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in names if name not in skipped}
    for _ in range(repeats):
        for name, done in runs.items():
            done.append(one_job(name, folder, python))
    rows = {name: summary(done, job.rounds) for name, done in runs.items()}
    return {"contenders": rows, "skipped": skipped, "ratios": ratios(rows)}


def missing(name: str, job: Job, python: str) -> str | None:
    wanted = list(PEERS[name][1])
    if name == OURS:
        return None
    if job.private:
        wanted.append("opacus")
    code = f"import importlib.util as u; print(*[m for m in {wanted!r} if u.find_spec(m) is None])"
    absent = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    return f"not installed: {', '.join(absent)}" if absent else None


def one_job(name: str, folder: Path, python: str) -> dict[str, Any]:
    """Wall seconds from the start of the process to its end, and what it says of its rounds."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT / "benchmarks"), str(HERE)]),
        "OMP_NUM_THREADS": "1",
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "RAY_DEDUP_LOGS": "0",
    }
    command = [sys.executable if name == OURS else python, str(HERE / PEERS[name][0]), str(folder)]
    with Memory() as memory:
        start = time.perf_counter()
        done = ran(command, env=environment, timeout=LONGEST_S)
        seconds = time.perf_counter() - start
    if done.returncode != 0:
        raise SystemExit(f"{name} failed with exit code {done.returncode}:\n{done.stderr[-3000:]}")
    # Processes of a peer's own may have written into its line, before and behind it.
    said: dict[str, Any] = json.JSONDecoder().raw_decode(done.stdout, done.stdout.index('{"round_s"'))[0]
    return {"wall_s": seconds, "peak_gib": memory.peak_gib, **said}


class Memory:
    """The most that the machine's available memory fell by: a peer's processes are many, and share pages."""

    def __enter__(self) -> Memory:
        self._before = self._least = _available_gib()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._over.wait(0.05):
            self._least = min(self._least, _available_gib())

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    @property
    def peak_gib(self) -> float:
        return self._before - self._least


def _available_gib() -> float:
    lines = Path("/proc/meminfo").read_text("utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable")) / 2**20


def summary(runs: list[dict[str, Any]], rounds: int) -> dict[str, float]:
    each = [seconds for run in runs for seconds in run["round_s"]]
    assert len(each) == rounds * len(runs)
    middle = statistics.median(each)
    wall = statistics.median(run["wall_s"] for run in runs)
    return {
        "round_s": middle,
        "lowest_round_s": min(each),
        "highest_round_s": max(each),
        "wall_s": wall,
        "start_s": wall - rounds * middle,
        "peak_gib": max(run["peak_gib"] for run in runs),
        "accuracy": statistics.fmean(run["accuracy"] for run in runs),
    }


def ratios(rows: dict[str, dict[str, float]]) -> dict[str, dict[str, Any]]:
    """The best peer's seconds over ours, for a round and for the whole job."""
    peers = [name for name in rows if name != OURS]
    found = {}
    for what in ("round_s", "wall_s") if peers and OURS in rows else ():
        best = min(peers, key=lambda name: rows[name][what])
        found[what] = {"best": best, "ratio": rows[best][what] / rows[OURS][what]}
    return found


def peer_versions(python: str) -> dict[str, str]:
    code = (
        "import json; from importlib import metadata as m\n"
        "print(json.dumps({d.name: d.version for d in m.distributions() if d.name in "
        "('torch', 'pfl', 'flwr', 'ray', 'opacus')}))"
    )
    said = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout
    versions: dict[str, str] = json.loads(said)
    return versions


def show(name: str, result: dict[str, Any]) -> None:
    heads = ("s a round", "lowest", "highest", "job s", "start s", "peak GiB", "accuracy")
    print(f"\n{name:16}" + "".join(f"{head:>10}" for head in heads))
    for contender, row in result["contenders"].items():
        print(f"{PEERS[contender][2]:16}" + "".join(f"{value:10.3f}" for value in row.values()))
    for contender, why in result["skipped"].items():
        print(f"{PEERS[contender][2]:16} skipped: {why}")
    for what, ratio in result["ratios"].items():
        print(f"  best peer / ours, {what:8} {ratio['ratio']:6.2f} ({PEERS[ratio['best']][2]})")


if __name__ == "__main__":
    ends_with_children()
    main()
