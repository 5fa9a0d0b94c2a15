"""What the ledger costs: a reserve at 1,000 and at 1,000,000 entries, and a simulated round of ten agents.

    python benchmarks/ledger.py [--entries 1000000] [--folder DIR] [--json]
    python benchmarks/ledger.py --run quickstart            # its share of a whole simulated run
    python benchmarks/ledger.py --run mnist --data DIR --rounds 6

Both ledgers are measured in one run, turn by turn, so that the disk's moods hit them alike; the mean includes SQLite's
checkpoints. The `fsync` line is the disk's own share: one append and fsync of what a reserve writes.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import UUID, uuid5

from ending import ends_with_children
from fedspa import configs
from fedspa.agent.ledger.ledger import Ledger
from fedspa.mechanisms.gaussian.plan import GaussianEvent
from provenance import stamp

EVENT = GaussianEvent("poisson", 10, 600, 300, 1.83)
AGENTS_A_ROUND = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--entries", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=3000)
    parser.add_argument("--folder", type=Path, default=None, help="where to write; the disk to measure")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--run", help="measure the share of this run instead: a config, or `quickstart`")
    parser.add_argument("--data", default="data", help="data.dir of that run")
    parser.add_argument("--rounds", type=int, help="federation.rounds of that run")
    parser.add_argument("--runs", type=int, default=5, help="how often that run is repeated, each in a new process")
    arguments = parser.parse_args()
    if arguments.run is not None:
        share = share_of_a_run(arguments.run, arguments.data, arguments.rounds, arguments.runs)
        print(json.dumps({"provenance": stamp(), **share}, indent=1))
        return
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        result = measure(Path(folder), arguments.entries, arguments.repeats)
    if arguments.json:
        print(json.dumps({"provenance": stamp(), "entries": arguments.entries, **result}, indent=1))
    else:
        for name, value in result.items():
            print(f"{name:32} {value:.4g}")


def measure(folder: Path, entries: int, repeats: int) -> dict[str, float]:
    with Ledger.open(folder / "small.sqlite") as small, Ledger.open(folder / "large.sqlite") as large:
        fill(small, 1_000)
        start = time.perf_counter()
        fill(large, entries)
        filling = time.perf_counter() - start
        at_small, at_large = [], []
        for number in range(repeats):
            message = scattered(-1 - number)
            at_small.append(seconds(lambda: small.reserve("agent", EVENT, "run", message)))  # noqa: B023
            at_large.append(seconds(lambda: large.reserve("agent", EVENT, "run", message)))  # noqa: B023
        opening = seconds(lambda: Ledger.open(folder / "large.sqlite").close())
        spending = seconds(lambda: large.spent("agent"))
    with Ledger.open(folder / "simulated.sqlite") as simulated:
        rounds = [seconds(lambda: take_part(simulated, number)) for number in range(max(1, repeats // 3))]  # noqa: B023
    return {
        "reserve_small_mean_ms": 1e3 * statistics.fmean(at_small),
        "reserve_large_mean_ms": 1e3 * statistics.fmean(at_large),
        "reserve_small_median_ms": 1e3 * statistics.median(at_small),
        "reserve_large_median_ms": 1e3 * statistics.median(at_large),
        "ratio_mean": statistics.fmean(at_large) / statistics.fmean(at_small),
        "ratio_median": statistics.median(at_large) / statistics.median(at_small),
        "fsync_median_ms": 1e3 * statistics.median(syncs(folder / "bytes", repeats)),
        "round_of_ten_mean_ms": 1e3 * statistics.fmean(rounds),
        "open_large_ms": 1e3 * opening,
        "spent_large_ms": 1e3 * spending,
        "bytes_an_entry": (folder / "large.sqlite").stat().st_size / (entries + repeats),
        "fill_entries_a_second": entries / filling,
    }


def share_of_a_run(config: str, data: str, rounds: int | None, runs: int) -> dict[str, Any]:
    """What the books cost of a whole run: medians of runs in processes of their own, as a user starts them."""
    context = multiprocessing.get_context("spawn")
    found = []
    for _ in range(runs):
        with context.Pool(1) as pool:
            found.append(pool.apply(one_run, (config, data, rounds)))
    return {
        **{name: statistics.median(run[name] for run in found) for name in found[0] if name != "engine"},
        "lowest_share": min(run["share"] for run in found),
        "highest_share": max(run["share"] for run in found),
        "engine": found[0]["engine"],
    }


def one_run(config: str, data: str, rounds: int | None) -> dict[str, Any]:
    """`ledger_s` opens, reserves and releases; `settle_s` forces the disk before a checkpoint that counts on it."""
    import fedspa
    from fedspa.runs.run_ledger import RunLedger

    spent: defaultdict[str, float] = defaultdict(float)

    def timed(owner: type, name: str) -> Callable[..., Any]:
        method = getattr(owner, name)

        def wrapped(*arguments: Any, **options: Any) -> Any:
            start = time.perf_counter()
            try:
                return method(*arguments, **options)
            finally:
                spent["settle_s" if name == "settle" else "ledger_s"] += time.perf_counter() - start

        return wrapped

    for owner, names in ((RunLedger, ("__init__", "settle")), (Ledger, ("reserve_many", "release_many"))):
        for name in names:
            setattr(owner, name, timed(owner, name))
    with tempfile.TemporaryDirectory() as folder:
        overrides = [f"run.out={json.dumps(folder + '/run')}", f"data.dir={json.dumps(data)}"]
        overrides += [f"federation.rounds={rounds}"] if rounds is not None else []
        summary = fedspa.run(fedspa.load(None if config == "quickstart" else configs.find(config), overrides)).summary
    seconds = summary["seconds"]
    share = {"share": spent["ledger_s"] / seconds, "settle_share": spent["settle_s"] / seconds}
    return {**spent, "run_s": seconds, **share, "rounds": summary["rounds"], "engine": summary["engine"]}


def fill(ledger: Ledger, entries: int) -> None:
    """One agent's entries, many to a transaction. Names are random, the worst case for the index (the measured reserves
    land anywhere in it), but put in by order, which fills faster."""
    names = sorted(scattered(number) for number in range(entries))
    batch = 10_000
    for first in range(0, entries, batch):
        with ledger.transaction():
            for name in names[first : first + batch]:
                ledger.reserve("agent", EVENT, "run", name)


def scattered(number: int) -> str:
    return str(uuid5(UUID(int=0), str(number)))


def take_part(ledger: Ledger, number: int) -> None:
    """The ledger's share of one simulated round: reserve before training, release after."""
    agents = [f"agent-{(number * AGENTS_A_ROUND + agent) % 100}" for agent in range(AGENTS_A_ROUND)]
    ledger.reserve_many(dict.fromkeys(agents, EVENT), "run", f"round-{number}")
    ledger.release_many(dict.fromkeys(agents, "seeded"), "run", f"round-{number}")


def syncs(path: Path, repeats: int) -> list[float]:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    pages = bytes(6 * 4096)

    def write() -> None:
        os.write(descriptor, pages)
        os.fsync(descriptor)

    try:
        return [seconds(write) for _ in range(repeats)]
    finally:
        os.close(descriptor)


def seconds(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


if __name__ == "__main__":
    ends_with_children()
    main()
