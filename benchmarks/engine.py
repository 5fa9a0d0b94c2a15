"""What a private local step costs: our engines beside Opacus, vmap(grad) and plain SGD, in one run.

    python benchmarks/engine.py [--cases mnist-p05,cifar-p10] [--repeats 7] [--cores 2] [--json] [--out FILE]

Every contender gets all cores in its best split: the native engine one thread an agent in one process, the others one
process a core with one torch thread each (`sgd-threads` is the other split, for comparison). They take turns within a
repeat, so that a busy machine hits them alike; compare ratios, not milliseconds of different runs. Times are
milliseconds per agent-step: wall (medians over the repeats, with the lowest and highest), and the CPU time of all
processes and threads over the number of cores, which is what the wall would be on an idle machine. A ratio is the
median of the repeats' own ratios, with the lowest and highest. Memory is the peak of one process's resident memory over
what it was before the first step.

Opacus is not a dependency: `pip install --no-deps opacus==1.6.0 opt-einsum==3.4.0` adds it, else it is left out.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ending import ends_with_children
from local_step.cases import CASES, CONTENDERS, THREAD_SPLIT, Case, available
from local_step.ours import Ours
from local_step.processes import Worker, a_process_a_core, peak_memory, torch_threads
from local_step.turns import Turn, in_process, in_turns, ratios, summary
from provenance import in_parts, stamp

# What is divided by what: the best contender of a kind over one of ours.
RIVALS = {
    "best Opacus / native": (("opacus-hooks", "opacus-functorch", "opacus-ew"), "native"),
    "best Opacus, l2 / native-l2": (
        ("opacus-hooks-l2", "opacus-functorch-l2", "opacus-ew-l2", "opacus-ghost-l2"),
        "native-l2",
    ),
    "vmap / native": (("vmap",), "native"),
    "vmap-l2 / native-l2": (("vmap-l2",), "native-l2"),
    "best plain SGD / native": (("sgd", "sgd-channels-last", "sgd-threads"), "native"),
    "grouped SGD / native": (("sgd-grouped",), "native"),
    "best plain SGD / native-plain-sgd": (("sgd", "sgd-channels-last", "sgd-threads"), "native-plain-sgd"),
    "generic / native": (("generic",), "native"),
    "native / native-plain-sgd": (("native",), "native-plain-sgd"),
    "native-l2 / native-plain-sgd": (("native-l2",), "native-plain-sgd"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--cores", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--out", type=Path, help="keep the results in this file, case by case, and go on from it")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    document = in_parts(
        "cases",
        arguments.cases.split(","),
        lambda name: measure(CASES[name], arguments.repeats, arguments.cores),
        {"cores": arguments.cores, "repeats": arguments.repeats},
        arguments.out,
        lambda: stamp("opacus"),
    )
    if arguments.json:
        print(json.dumps(document, indent=1))
        return
    for name, result in document["cases"].items():
        show(name, result)


def measure(case: Case, repeats: int, cores: int, contenders: Sequence[str] = CONTENDERS) -> dict[str, Any]:
    """All contenders on one case, in turns."""
    names = [name for name in contenders if available(name, case)]
    workers = [Worker(case, seed) for seed in range(cores)]
    turns = {name: turn(name, case, workers) for name in names}
    in_turns(turns, 1, cores)  # warms caches and is not counted
    wall, cpu = in_turns(turns, repeats, cores)
    for worker in workers:
        worker.close()
    rows = {name: summary(wall[name], cpu[name]) | {"peak_mib": peak_memory(name, case)} for name in names}
    return {
        "title": case.title,
        "contenders": rows,
        "ratios": {"wall": ratios(wall, RIVALS), "cpu": ratios(cpu, RIVALS)},
    }


def turn(name: str, case: Case, workers: Sequence[Worker]) -> Turn:
    """On all cores, in the split that suits this contender."""
    cores = len(workers)
    if name in THREAD_SPLIT:
        return in_process(Ours(name, case, 2 * cores, cores), case.fast_steps)  # two agents a thread
    if name == "sgd-threads":
        # Torch's threads wait for each other in every layer: beside other work a step can take a tenth of a second.
        return torch_threads(workers, name, max(1, case.slow_steps // 5))
    return a_process_a_core(workers, name, case.slow_steps)


def show(name: str, result: dict[str, Any]) -> None:
    print(f"\n{name:22}{'wall ms':>10}{'lowest':>10}{'highest':>10}{'cpu ms':>10}{'peak MiB':>10}")
    for contender, row in result["contenders"].items():
        print(f"{contender:22}" + "".join(f"{value:10.4g}" for value in row.values()))
    for what, cpu in result["ratios"]["cpu"].items():
        wall = result["ratios"]["wall"][what]
        print(
            f"  {what:36} cpu {cpu['median']:6.2f}   wall {wall['median']:6.2f} "
            f"({wall['lowest']:.2f} … {wall['highest']:.2f}; {wall['best']})"
        )


if __name__ == "__main__":
    ends_with_children()
    main()
