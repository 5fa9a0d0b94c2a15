"""A private local step of what people bring: our engines beside Opacus, vmap(grad) and plain SGD, in one run.

    python benchmarks/models.py [--rows vit,text] [--device cuda] [--repeats 3] [--json] [--out FILE]
    python benchmarks/models.py --merge A.json B.json --out FILE

B = 32 of 500 records, p = .1, `l2` clipping. Ours draw Poisson batches, and on a GPU ten agents wait for the largest of
ten; a rival's batches are of exactly B records, and so are those of `auto-fixed-l2`. Milliseconds per agent-step:
median, lowest and highest of the repeats, in which the contenders take turns. Compare ratios, not milliseconds of
different runs.

On a CPU our engines train agents as a round does, in one call and with all cores; a rival has the better of two splits,
a process per core or one process with a torch thread per core. On a GPU ours train ten agents in one call, a rival one
agent, and all have TF32. `auto` is what a run gets; engines that it did not choose stand beside it by name, and
`auto-plain-sgd` is its FedAvg step. Opacus's ghost and fast gradient clipping go by the norm of all coordinates, so
theirs are steps at p = 1; they count among its modes all the same. The first call of an engine is told apart: it
compiles, captures, and runs a frozen body on the records. Memory is the peak of one process over what it held before
its first step; on a GPU that of its tensors, and beside it what torch had reserved.

A contender that cannot take a model is skipped, and the result says why. Rivals are no dependencies.
`pip install --no-deps opacus==1.6.0 opt-einsum==3.4.0` adds Opacus, `pip install jax jax-privacy==2.0.0` adds
jax_privacy, and the folder of fastDP's repository on PYTHONPATH adds fastDP. The last two train every coordinate, as
ghost clipping does; `--compression 1` gives ours at p = 1 beside them.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import torch

from brought.rows import ROWS
from ending import ends_with_children
from fedspa.engine import EngineName
from local_step.cases import Case
from local_step.processes import Refused, Worker
from local_step.ready import Ready, ready
from local_step.turns import in_turns, ratios, summary
from provenance import in_parts, stamp

BATCH, RECORDS, COMPRESSION = 32, 500, 0.1  # what is kept; --batch and --compression set others
OPACUS = tuple(f"opacus-{mode}-l2" for mode in ("hooks", "functorch", "ew", "ghost", "fast"))
# The reference engine is there to be agreed with, in float64 and one example at a time.
ENGINES = tuple(f"{name}-l2" for name in get_args(EngineName) if name not in ("auto", "reference"))
OTHERS = ("fastdp-l2", "jax-l2")
CONTENDERS = ("auto-l2", "auto-fixed-l2", *ENGINES, "auto-plain-sgd", *OPACUS, *OTHERS, "vmap-l2", "sgd")
RIVALS = {
    "best Opacus / ours": (OPACUS, "auto-l2"),
    "best Opacus / ours, fixed size": (OPACUS, "auto-fixed-l2"),
    "fastDP / ours": (("fastdp-l2",), "auto-l2"),
    "jax_privacy / ours": (("jax-l2",), "auto-l2"),
    "vmap / ours": (("vmap-l2",), "auto-l2"),
    "SGD / ours": (("sgd",), "auto-l2"),
    "ours / our plain step": (("auto-l2",), "auto-plain-sgd"),
    "best Opacus / SGD": (OPACUS, "sgd"),
    **{f"{name} / ours": ((name,), "auto-l2") for name in ENGINES},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--contenders", default=",".join(CONTENDERS))
    parser.add_argument("--batch", type=int, default=BATCH)
    parser.add_argument("--compression", type=float, default=COMPRESSION)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, help="per turn; as many as take half a second, if not given")
    parser.add_argument("--agents", type=int, help="of ours in one call; 10 on a GPU, else two per core")
    parser.add_argument("--cores", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--quick", action="store_true", help="one step, one repeat: to see that it runs")
    parser.add_argument("--commit", help="of the code that runs, where a copy of it has no git")
    parser.add_argument("--merge", type=Path, nargs="+", help="measure nothing: join kept results of single rows")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--out", type=Path, help="keep the results in this file, row by row, and go on from it")
    arguments = parser.parse_args()
    document = merged(arguments.merge, arguments.out) if arguments.merge else measured(arguments)
    if arguments.json:
        print(json.dumps(document, indent=1))
        return
    for name, result in document["rows"].items():
        show(name, result)


def measured(arguments: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(1)
    gpu = arguments.device == "cuda"
    repeats, steps = (1, 1) if arguments.quick else (arguments.repeats, arguments.steps)
    agents = arguments.agents or (10 if gpu else 2 * arguments.cores)
    contenders = arguments.contenders.split(",")
    settings = {
        "device": torch.cuda.get_device_name() if gpu else "cpu",
        "cores": arguments.cores,
        "agents": agents,
        "repeats": repeats,
        "steps": steps,
        "batch": arguments.batch,
        "records": RECORDS,
        "compression": arguments.compression,
        "contenders": contenders,
    }
    return in_parts(
        "rows",
        arguments.rows.split(","),
        lambda name: measure(name, settings, arguments.device, agents, arguments.cores, repeats, steps),
        settings,
        arguments.out,
        lambda: stamp("opacus") | ({"commit": arguments.commit} if arguments.commit else {}),
    )


def measure(
    name: str, settings: dict[str, Any], device: str, agents: int, cores: int, repeats: int, steps: int | None
) -> dict[str, Any]:
    """All contenders on one model, in turns."""
    row, contenders = ROWS[name], settings["contenders"]
    case = Case(row.title, row, settings["batch"], RECORDS, settings["compression"], device=device)
    workers = [Worker(case, seed) for seed in range(cores if device == "cpu" else 0)]
    there: dict[str, Ready] = {}
    skipped: dict[str, str] = {}
    for name in contenders:
        auto = there["auto-l2"].facts["engine"] if "auto-l2" in there else None
        if name == f"{auto}-l2":
            skipped[name] = "it is what auto takes"
            continue
        start = time.perf_counter()
        try:
            there[name] = ready(name, case, agents, workers, cores, steps)
        except Refused as why:
            skipped[name] = str(why)
        told = skipped.get(name, f"ready after {time.perf_counter() - start:.1f} s")
        print(f"{row.title}: {name}: {told}", file=sys.stderr, flush=True)
    wall, cpu = in_turns({name: each.turn for name, each in there.items()}, repeats, cores)
    for worker in workers:
        worker.close()
    return {
        "title": row.title,
        "dimension": row.dimension,
        "frozen": row.frozen,
        "contenders": {name: summary(wall[name], cpu[name]) | each.facts for name, each in there.items()},
        "skipped": skipped,
        "ratios": {"wall": ratios(wall, RIVALS), "cpu": ratios(cpu, RIVALS)},
    }


def merged(parts: Sequence[Path], out: Path | None) -> dict[str, Any]:
    """Rows that were measured apart, in one document. They must come from one commit and one setting."""
    documents = [json.loads(path.read_text("utf-8")) for path in parts]
    first: dict[str, Any] = documents[0]
    for path, document in zip(parts, documents):
        commits = {each["provenance"]["commit"] for each in (first, document)}
        if document["settings"] != first["settings"] or len(commits) > 1:
            raise SystemExit(f"{path} comes from another commit or other settings than {parts[0]}: measure it again")
    rows = {name: row for document in documents for name, row in document["rows"].items()}
    first["rows"] = {name: rows[name] for name in ROWS if name in rows}
    if out is not None:
        out.write_text(json.dumps(first, indent=1) + "\n", "utf-8")
    return first


def show(name: str, result: dict[str, Any]) -> None:
    print(f"\n{name:18}{'wall ms':>10}{'lowest':>10}{'highest':>10}{'cpu ms':>10}{'peak MiB':>10}")
    for contender, row in result["contenders"].items():
        keys = ("median_ms", "lowest_ms", "highest_ms", "cpu_ms", "peak_mib")
        told = ", ".join(f"{key} {row[key]}" for key in ("engine", "split", "steps") if key in row)
        first = f", first call {row['first_call_s']:.3g} s" if "first_call_s" in row else ""
        print(f"{contender:18}" + "".join(f"{row[key]:10.4g}" for key in keys) + f"  {told}{first}")
    for contender, why in result["skipped"].items():
        print(f"{contender:18}         –  {why}")
    for what, ratio in result["ratios"]["wall"].items():
        cpu = result["ratios"]["cpu"][what]["median"]
        print(
            f"  {what:28} wall {ratio['median']:7.2f} ({ratio['lowest']:.2f} … {ratio['highest']:.2f}; "
            f"{ratio['best']})   cpu {cpu:7.2f}"
        )


if __name__ == "__main__":
    ends_with_children()
    main()
