"""The documentation's tables and measured sentences, from the kept results. No figure in them is typed by hand.

    python benchmarks/engine.py --out benchmarks/results/engine.json     and so on, see benchmarks/README.md
    python benchmarks/tables.py                                         writes them into the pages

A page has `<!-- table: NAME -->` before and `<!-- end -->` behind each; what lies between is replaced.
In a sentence both stand on one line. A test holds
pages and results together.
"""

from __future__ import annotations

import json
import re
import statistics
import textwrap
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

from fedspa.privacy.event import shown_digits
from intervals import half_interval
from sentences import SENTENCES

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
CONTENDERS = {
    "auto-l2": '**ours**, by `run.engine = "auto"`',
    "auto-fixed-l2": "the same, batches of exactly B",
    "auto-plain-sgd": "our plain step (FedAvg)",
    "native": "**native**",
    "native-l2": "**native, `l2`**",
    "native-plain-sgd": "native, plain SGD (FedAvg)",
    "generic": "generic",
    "generic-l2": "generic, `l2`",
    "traced-l2": "traced, `l2`",
    "generic-plain-sgd": "generic, plain SGD (FedAvg)",
    "opacus-hooks": "Opacus, hooks",
    "opacus-functorch": "Opacus, functorch",
    "opacus-ew": "Opacus, expanded weights",
    "vmap": "`vmap(grad)`",
    "opacus-hooks-l2": "Opacus, hooks, `l2`",
    "opacus-functorch-l2": "Opacus, functorch, `l2`",
    "opacus-ew-l2": "Opacus, expanded weights, `l2`",
    "opacus-ghost-l2": "Opacus, ghost clipping, `l2`",
    "opacus-fast-l2": "Opacus, fast gradient clipping, `l2`",
    "vmap-l2": "`vmap(grad)`, `l2`",
    "sgd": "PyTorch SGD, not private",
    "sgd-channels-last": "the same, channels last",
    "sgd-threads": "the same, one process, one torch thread per core",
    "sgd-grouped": "the same, ten agents as one grouped convolution",
}
PEERS = {
    "ours": "**fedspa**",
    "plain": "plain PyTorch, one process per core",
    "pfl": "pfl-research",
    "flower": "Flower",
}
# Of docs/tuning.md: beside the accuracy.
COLUMNS: dict[str, tuple[str, Callable[[dict[str, Any]], str]]] = {
    "noise_multiplier": ("noise multiplier", lambda row: f"{row['noise_multiplier']:.3g}"),
    "noise_of_mean": ("multiplier / B", lambda row: f"{row['noise_multiplier'] / row['value']:.3f}"),
    "upload_bytes": ("bytes per upload", lambda row: f"{row['upload_bytes']:.0f}"),
    "run_bytes": ("bytes per run", lambda row: f"{row['run_bytes']:.0f}"),
}
QUANTITIES = {"agents": "agents", "d": "d", "k": "k", "tau": "τ", "B": "B"}


def main() -> None:
    for name, (page, _) in TABLES.items():
        path = ROOT / page
        path.write_text(put(path.read_text("utf-8"), name), "utf-8")


def put(text: str, name: str) -> str:
    """The page with this table as the kept result has it."""
    pattern = re.compile(rf"(<!-- table: {re.escape(name)} -->\n?).*?(<!-- end -->)", re.DOTALL)
    found = pattern.findall(text)
    if len(found) != 1:
        raise SystemExit(f"the page of table {name!r} has {len(found)} places for it; it must have one")
    return pattern.sub(lambda match: f"{match[1]}{table(name)}{match[2]}", text)


def table(name: str) -> str:
    try:
        return TABLES[name][1]()
    except FileNotFoundError as missing:
        kept_in = Path(missing.filename).name
        return f"Not measured yet: `benchmarks/results/{kept_in}` is missing.\n"


def kept(name: str) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text("utf-8"))
    return result


def origin(provenance: dict[str, Any]) -> str:
    """One line on where the figures come from."""
    hardware = provenance["hardware"]
    versions = provenance["versions"] | provenance.get("peers", {})
    named = ", ".join(f"{name} {version}" for name, version in versions.items() if version is not None)
    return (
        f"`{provenance['command']}` at {provenance['commit']}, {provenance['date'][:10]}, {hardware['cores']} cores of "
        f"{hardware['cpu']} (load {provenance['load'][0]:.1f}), {named}.\n\n"
    )


def markdown(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def figure(value: float) -> str:
    """Three significant digits."""
    return f"{float(f'{value:.3g}'):g}" if value < 1000 else f"{value:,.0f}"


def spread(entry: dict[str, float]) -> str:
    return f"{figure(entry['median'])} ({figure(entry['lowest'])} … {figure(entry['highest'])})"


def by_case(cases: Collection[dict[str, Any]], cell: Callable[[dict[str, Any]], str]) -> str:
    measured = dict.fromkeys(name for case in cases for name in case["contenders"])
    present = [
        *(name for name in CONTENDERS if name in measured),
        *(name for name in measured if name not in CONTENDERS),
    ]
    rows = [
        [
            CONTENDERS.get(name, name),
            *(cell(case["contenders"][name]) if name in case["contenders"] else "–" for case in cases),
        ]
        for name in present
    ]
    return markdown(["", *(case["title"] for case in cases)], rows)


def engine_time() -> str:
    result = kept("engine")
    table = by_case(result["cases"].values(), lambda row: f"{figure(row['median_ms'])} ({figure(row['cpu_ms'])})")
    return origin(result["provenance"]) + table


def engine_memory() -> str:
    return by_case(kept("engine")["cases"].values(), memory)


def memory(row: dict[str, Any]) -> str:
    return figure(row["peak_mib"])


def engine_ratios() -> str:
    return by_ratio(kept("engine")["cases"].values(), both)


def by_ratio(cases: Collection[dict[str, Any]], cell: Callable[[dict[str, Any], str], str]) -> str:
    names = dict.fromkeys(what for case in cases for what in case["ratios"]["wall"])
    rows = [
        [what, *(cell(case["ratios"], what) if what in case["ratios"]["wall"] else "–" for case in cases)]
        for what in names
    ]
    return markdown(["", *(case["title"] for case in cases)], rows)


def both(ratios: dict[str, Any], what: str) -> str:
    return f"{spread(ratios['wall'][what])}; {figure(ratios['cpu'][what]['median'])}"


def wall(ratios: dict[str, Any], what: str) -> str:
    return spread(ratios["wall"][what])


def models_time(file: str) -> str:
    """With the engine that was chosen, and its first call."""
    result = kept(file)

    def cell(row: dict[str, Any]) -> str:
        times = spread({key: row[f"{key}_ms"] for key in ("median", "lowest", "highest")})
        return times + (f", {row['engine']}, first call {figure(row['first_call_s'])} s" if "engine" in row else "")

    where = "" if result["settings"]["device"] == "cpu" else f"{result['settings']['device']}: "
    return where + origin(result["provenance"]) + by_case(models(file), cell)


def gpu_rivals(name: str) -> str:
    """Our steps on a GPU beside those of all rivals, in one run."""
    result = kept(name)
    rivals = {"best Opacus": "best Opacus / ours", "fastDP": "fastDP / ours", "jax_privacy": "jax_privacy / ours"}
    rows = []
    for row in result["rows"].values():
        found, ratios = row["contenders"], row["ratios"]["wall"]
        ours = found["auto-l2"]
        times = spread({key: ours[f"{key}_ms"] for key in ("median", "lowest", "highest")})
        cells = [f"{row['title']} ({row['dimension']:,})", times, f"{ours['peak_mib']:,.0f}"]
        for ratio in rivals.values():
            if ratio in ratios:
                theirs = found[ratios[ratio]["best"]]["median_ms"]
                cells.append(f"{figure(theirs)}, {figure(ratios[ratio]['median'])} ×")
            else:
                cells.append("–")
        rows.append(cells)
    head = ["", "ours, ms", "peak, MiB", *(f"{rival}, ms" for rival in rivals)]
    return f"{result['settings']['device']}: " + origin(result["provenance"]) + markdown(head, rows)


def gpu_steps() -> str:
    """What a step of ours takes on a GPU, and in how many kernels."""
    result = kept("gpu-steps")
    rows = []
    for row in result["rows"].values():
        rows.append([
            f"{row['title']} ({row['dimension']:,})",
            spread({key: row[f"{key}_ms"] for key in ("median", "lowest", "highest")}),
            figure(row["busy_us"] / 1e3 / row["agents"]),
            str(row["kernels"]),
        ])  # fmt: skip
    head = ["", "ms", "GPU busy, ms", "kernels of a step"]
    return f"{result['settings']['device']}: " + origin(result["provenance"]) + markdown(head, rows)


def models(file: str) -> list[dict[str, Any]]:
    return [row | {"title": f"{row['title']} ({row['dimension']:,})"} for row in kept(file)["rows"].values()]


def scale() -> str:
    result = kept("scale")
    rows = [
        [
            QUANTITIES[name],
            f"{entry['rows'][0]['value']:,} … {entry['rows'][-1]['value']:,}",
            f"{figure(entry['rows'][0]['ms'])} … {figure(entry['rows'][-1]['ms'])}",
            f"{entry['time_slope']:.2f}",
            f"{figure(entry['rows'][0]['mib'])} … {figure(entry['rows'][-1]['mib'])}",
            f"{entry['memory_slope']:.2f}",
        ]
        for name, entry in result["varied"].items()
    ]
    head = ["varied", "from … to", "ms per round", "slope", "peak MiB", "slope"]
    return origin(result["provenance"]) + markdown(head, rows)


def peers(name: str) -> str:
    result = kept(name)
    rows = []
    for title, job in result["jobs"].items():
        own = job["contenders"]["ours"]
        for contender, row in job["contenders"].items():
            rows.append(
                [
                    title,
                    PEERS[contender],
                    f"{figure(row['round_s'])} ({figure(row['lowest_round_s'])} … {figure(row['highest_round_s'])})",
                    figure(row["round_s"] / own["round_s"]),
                    figure(row["start_s"]),
                    figure(row["wall_s"]),
                    figure(row["wall_s"] / own["wall_s"]),
                    figure(row["peak_gib"]) if "peak_gib" in row else "–",
                ]
            )
        rows += [[title, f"{PEERS[contender]}: {why}", *["–"] * 6] for contender, why in job["skipped"].items()]
    head = ["job", "", "s per round", "× ours", "start-up, s", "whole job, s", "× ours", "peak GiB"]
    return origin(result["provenance"]) + markdown(head, rows)


def ledger_calls() -> str:
    disk, memory = kept("ledger-disk"), kept("ledger-memory")
    entries = f"{disk['entries']:,} entries"
    rows = {
        "`reserve` at 1,000 entries": ("reserve_small_mean_ms", "ms"),
        f"`reserve` at {entries}": ("reserve_large_mean_ms", "ms"),
        "ratio": ("ratio_mean", ""),
        "one append and fsync": ("fsync_median_ms", "ms"),
        "a simulated round: reserve and release for ten agents": ("round_of_ten_mean_ms", "ms"),
        f"opening it at {entries}": ("open_large_ms", "ms"),
        "size of an entry": ("bytes_an_entry", "bytes"),
    }
    cells = [
        [what, *(f"{figure(kind[key])} {unit}".strip() for kind in (disk, memory))]
        for what, (key, unit) in rows.items()
    ]
    head = ["", *(f"`{kind['provenance']['command']}`" for kind in (disk, memory))]
    return origin(disk["provenance"]) + markdown(head, cells)


def ledger_share() -> str:
    runs = [kept(name) for name in ("ledger-quickstart", "ledger-mnist")]
    rows = [
        [
            f"`{run['provenance']['command']}`",
            str(round(run["rounds"])),
            f"{run['ledger_s']:.3f} s",
            f"{run['settle_s']:.3f} s",
            f"{run['run_s']:.2f} s",
            f"{100 * run['share']:.2g} % ({100 * run['lowest_share']:.2g} … {100 * run['highest_share']:.2g})",
        ]
        for run in runs
    ]
    head = ["", "rounds", "ledger", "fsync before checkpoints", "run", "ledger's share"]
    return origin(runs[0]["provenance"]) + markdown(head, rows)


def moved_key(result: dict[str, Any], key: str, columns: Iterable[str]) -> str:
    """Accuracy, and what else, against one key of the quickstart's config."""
    chosen = [COLUMNS[column] for column in columns]
    rows = [
        [f"{row['value']:g}", f"{row['accuracy']:.1f} ± {row['interval']:.1f}", *(cell(row) for _, cell in chosen)]
        for row in result["rows"]
        if row["key"] == key
    ]
    return markdown([f"`{key}`", "accuracy, %", *(head for head, _ in chosen)], rows)


def choosing(key: str, *columns: str) -> Callable[[], str]:
    return lambda: moved_key(kept("choosing"), key, columns)


def scale_out() -> str:
    result = kept("scale-out")
    named = {"text": "a text transformer, `generic`", "asleep": "engines that sleep"}
    rows = [
        [named[case], str(row["workers"]), spread(row["ratio"]), *(figure(each) for each in row["seconds"].values())]
        for case, row in result["cases"].items()
    ]
    return origin(result["provenance"]) + markdown(["", "workers", "÷ one worker", "s with one", "s with them"], rows)


def persons() -> str:
    result = kept("persons")
    named = dict.fromkeys(kind for case in result["cases"].values() for kind in case)
    rows = [
        [case, *(f"{figure(row[kind]['ms'])} (× {figure(row[kind]['ratio'])})" for kind in named)]
        for case, row in result["cases"].items()
    ]
    return origin(result["provenance"]) + markdown(["CPU ms per step", *named], rows)


def secagg() -> str:
    result = kept("secagg")
    cases = result["cases"]
    rows: dict[str, Callable[[dict[str, Any]], str]] = {
        "bits of a word": lambda row: str(row["bits"]),
        "a member's masks and message": lambda row: f"{spread(row['member_ms'])} ms",
        "the same just after its start": lambda row: f"{spread(row['first_ms'])} ms",
        "the same message without masks": lambda row: f"{spread(row['unmasked_ms'])} ms",
        "its integers, from its records": lambda row: f"{spread(row['train_ms'])} ms",
        "masks ÷ integers (just after its start)": lambda row: (
            f"{100 * row['share_of_training']:.2g} % ({100 * row['share_of_training_first']:.2g} %)"
        ),
        "the server, per message": lambda row: f"{figure(row['server_ms_per_message'])} ms",
        "bytes of a message": lambda row: f"{row['bytes']:,}",
        "÷ the same words without masks": lambda row: figure(row["times_plain"]["words_of_the_sum"]),
        "÷ the integers as int16": lambda row: figure(row["times_plain"]["int16"]),
        "÷ in the fewest bits that hold a member's": lambda row: figure(row["times_plain"]["fewest_bits_of_a_member"]),
        "a round over loopback": lambda row: f"{spread(row['loopback']['masked_s'])} s",
        "the same without masks": lambda row: f"{spread(row['loopback']['plain_s'])} s",
    }
    cells = [[what, *(cell(row) for row in cases.values())] for what, cell in rows.items()]
    head = [f"k = {result['settings']['count']:,}", *(f"{members} members" for members in cases)]
    return origin(result["provenance"]) + markdown(head, cells)


def recovery() -> str:
    result = kept("recovery")
    settings = result["settings"]
    rows = [
        ["rounds that gave a sum", f"{result['rounds_completed']} of {settings['rounds']}", "–"],
        ["members added up", " to ".join(map(str, result["survivors"])), str(settings["members"])],
        ["bytes of a member", f"{result['bytes_of_a_member']:,.0f}", f"{result['bytes_without_recovery']:,}"],
        ["÷ without recovery", figure(result["times_bytes"]), "1"],
        ["a member's CPU time", f"{spread(result['member_ms'])} ms", "–"],
        ["the server's CPU time", f"{spread(result['server_ms'])} ms", "–"],
        ["a round over loopback", *(f"{spread(result['round_s'][name])} s" for name in ("recovered", "plain"))],
    ]
    head = [f"k = {settings['count']:,}, {settings['members']} members", f"{settings['silent']} silent", "none silent"]
    return origin(result["provenance"]) + markdown([*head[:2], f"without recovery, {head[2]}"], rows)


def defaults(name: str, *arms: str) -> str:
    """Mean score of each arm over the seeds, of the tasks that have all of them."""
    result = kept(name)
    rows = []
    for task, described in result["settings"]["tasks"].items():
        found = [result["scores"].get(f"{task} {arm}") for arm in (*arms, "fedavg")]
        if None not in found:
            *cells, ceiling = (
                {epsilon: f"{statistics.mean(each):.3f}" for epsilon, each in arm.items()} for arm in found
            )
            by_epsilon = (" / ".join(cell[epsilon] for cell in cells) for epsilon in ("1", "3", "8"))
            rows.append([f"{task}, {described}", *by_epsilon, ceiling["1"]])
    header = [" / ".join(arms), "ε = 1", "ε = 3", "ε = 8", "FedAvg, without privacy"]
    return origin(result["provenance"]) + markdown(header, rows)


def statistics_of_adult() -> str:
    """Coverage and relative errors of released statistics."""
    result = kept("statistics-adult")
    views = {"local": "each site's upload", "secure-aggregation": "sums only"}
    errors = ("records", "age mean", "hours-per-week mean", "capital-gain mean", "salary count of <=50K")
    rows = []
    for view, name in views.items():
        found = result[view]
        coverage = [f"{found['coverage'][kind]:.1%}" for kind in ("count", "share", "mean", "standard", "quantile")]
        rows.append([name, *coverage, *(f"{found['relative_error'][key]:.2%}" for key in errors)])
    header = ["the server sees", "counts", "shares", "means", "standard deviations", "quantiles"]
    header += [f"error: {key}" for key in errors]
    return origin(result["provenance"]) + markdown(header, rows)


def evaluation_of_adult() -> str:
    """How near private AUC comes to the true one."""
    result = kept("evaluation-adult")
    rows = [
        ["all sites", f"{result['error_of_all']:.4f}", f"{result['coverage_of_all']:.1%}", "100%"],
        [
            f"one site, {result['records_of_a_site']:.0f} records held out",
            f"{result['error_of_a_site']:.4f}",
            f"{result['coverage_of_a_site']:.1%}",
            f"{result['stated_of_a_site']:.0%}",
        ],
    ]
    header = [f"AUC {result['auc']:.3f}", "mean absolute error", "intervals that hold it", "releases that state one"]
    return origin(result["provenance"]) + markdown(header, rows)


def sst2() -> str:
    """Sentiment of sentences by public word embeddings."""
    result = kept("sst2")
    rows = [
        [
            name,
            "–" if row["epsilon_worst_case"] is None else shown_digits(row["epsilon_worst_case"]),
            f"{row['dimension']:,}",
            shown(row),
        ]
        for name, row in result["rows"].items()
    ]
    return origin(result["provenance"]) + markdown(["SST-2", "worst-case ε", "d", "accuracy, %"], rows)


def local_optimizers() -> str:
    """Accuracy of plain steps and Adam at the agents, tuned alike."""
    result = kept("local-optimizers")
    rows = []
    for name in dict.fromkeys(part.split()[0] for part in result["runs"]):
        found = [result["runs"][f"{name} {optimizer}"] for optimizer in ("sgd", "adam")]
        rows.append(
            [name, *(f"{shown(each)} (rate {each['local_lr']:g}, clip {each['clip_value']:g})" for each in found)]
        )
    return origin(result["provenance"]) + markdown(["accuracy, %", "plain steps", "Adam"], rows)


def lora_noise() -> str:
    """The loss that noise adds on B, and on both factors."""
    result = kept("lora")
    rows = []
    for part, on_b in result["runs"].items():
        what, *numbers, kind = part.split(", ")
        if what == "noise" and kind == "B":
            both = result["runs"][", ".join([what, *numbers, "A and B"])]
            rows.append([*numbers, f"{on_b:.3f}", f"{both:.3f}", f"{both / on_b:.1f}"])
    return origin(result["provenance"]) + markdown(["rank", "ν", "on B", "on A and B", "ratio"], rows)


def lora_training() -> str:
    """What training wins with B alone, and with both factors."""
    rows = [
        [
            f"ε = {part.split(', ')[1]}",
            part.split(", ")[2],
            f"{found['dimension']:,}",
            f"{found['rate']:g}",
            f"{found['mean']:.3f} ± {found['half_interval']:.3f}",
        ]
        for part, found in kept("lora")["runs"].items()
        if part.startswith("training")
    ]
    return markdown(["", "trained", "d", "rate", "fall of the loss"], rows)


def large_bodies() -> str:
    """A private step of adapters on large frozen bodies, on one GPU."""
    result = kept("large-bodies")
    rows = []
    for part, found in result["runs"].items():
        body, contender = part.split()
        if "failed" in found:
            reason = textwrap.shorten(found["failed"].replace("|", "\\|"), 120, placeholder=" …")
            rows.append([body, contender, f"does not run: {reason}", "–"])
        else:
            rows.append([body, contender, f"{found['ms_per_agent_step']:.1f}", f"{found['peak_mib'] / 1024:.1f}"])
    return (
        f"{result['settings']['device']}. "
        + origin(result["provenance"])
        + markdown(["frozen body", "", "ms per agent-step", "peak memory, GiB"], rows)
    )


def standardising() -> str:
    """Adult by public ranges and by released statistics."""
    result = kept("standardising")
    arms: dict[str, dict[str, Any]] = {}
    for part, found in result["runs"].items():
        run, _, arm = part.rpartition(", ")
        arms.setdefault(run, {})[arm] = found
    names = next(iter(arms.values()))
    rows = [
        [run, *(f"{shown(each['accuracy'])} / {shown(each['auc'])}" for each in found.values())]
        for run, found in arms.items()
        if len(found) == len(names)
    ]
    return origin(result["provenance"]) + markdown(["accuracy, % / AUC, %", *names], rows)


def shown(found: dict[str, Any]) -> str:
    """Mean ± half of its 95 % confidence interval, in percent."""
    return f"{100 * found['mean']:.1f} ± {100 * found['half_interval']:.1f}"


def over_seeds(values: list[float]) -> str:
    if len(values) < 2:
        return f"{values[0]:.1f} (1)" if values else "–"
    return f"{statistics.mean(values):.1f} ± {half_interval(values):.1f} ({len(values)})"


def zoo_outcomes() -> dict[str, str]:
    """The outcome of each model type that was measured, with its reason."""
    return {name: row["outcome"] for name, row in kept("zoo")["types"].items()}


def zoo() -> str:
    result, counts = kept("zoo"), dict[tuple[str, str], Counter[str]]()
    for name, outcome in zoo_outcomes().items():
        source, head, _ = name.split("/")
        kind = outcome.partition(":")[0].partition(" by ")[0]
        for row in ((source, head.lower().replace("_", " ")), ("**all**", "")):
            counts.setdefault(row, Counter())[kind] += 1
    kinds = ["runs", "fixed", "refused", "WRONG", "DIED", "not compared", "not measured", "not built"]
    present = [kind for kind in kinds if counts[("**all**", "")][kind] or kind in ("refused", "WRONG")]
    total = counts.pop(("**all**", ""))
    rows = [
        [*row, *(str(found[kind] or "–") for kind in present)]
        for row, found in [*sorted(counts.items()), (("**all**", ""), total)]
    ]
    missing = [f"{name} does not load ({why})" for name, why in result["settings"]["missing"].items()]
    said = "Not tried: " + "; ".join(missing) + ".\n\n" if missing else ""
    return origin(result["provenance"]) + said + markdown(["source", "head or kind", *present], rows)


def zoo_differences() -> str:
    rows = [row for row in kept("zoo")["types"].values() if "engine_float32" in row]
    exact = [row["float64"] for row in rows if row["float64"] is not None]
    return (
        f"in float64 by at most {max(exact):.1g} of the largest entry ({len(exact)} types), in float32 by at most "
        f"{max(row['engine_float32'] for row in rows):.1g}, where plain autograd in float32 differs by at most "
        f"{max(row['plain_float32'] for row in rows):.1g}"
    )


def zoo_reasons() -> str:
    """Every type that ran neither as it is nor fixed, but those that could not be built tiny."""
    rows = [
        [f"`{name}`", textwrap.shorten(outcome.replace("|", "\\|"), 240, placeholder=" …")]
        for name, outcome in zoo_outcomes().items()
        if not outcome.startswith(("runs", "fixed", "not built"))
    ]
    return markdown(["type", "outcome"], rows)


# Name → the page that has it, and what it holds.
TABLES: dict[str, tuple[str, Callable[[], str]]] = {
    "engine-time": ("benchmarks/speed.md", engine_time),
    "engine-ratios": ("docs/engines.md", engine_ratios),
    "engine-memory": ("benchmarks/speed.md", engine_memory),
    "models-time": ("benchmarks/speed.md", lambda: models_time("models")),
    "models-ratios": ("docs/engines.md", lambda: by_ratio(models("models"), wall)),
    "models-memory": ("benchmarks/speed.md", lambda: by_case(models("models"), memory)),
    "gpu": ("docs/engines.md", lambda: gpu_rivals("models-gpu")),
    "gpu-256": ("benchmarks/speed.md", lambda: gpu_rivals("models-gpu-256")),
    "gpu-steps": ("benchmarks/speed.md", gpu_steps),
    "zoo": ("docs/models.md", zoo),
    "zoo-differences": ("docs/models.md", zoo_differences),
    "zoo-reasons": ("docs/models.md", zoo_reasons),
    "scale": ("benchmarks/speed.md", scale),
    "peers": ("docs/engines.md", lambda: peers("peers")),
    "peers-1000": ("docs/engines.md", lambda: peers("peers-1000")),
    "defaults": ("docs/tuning.md", lambda: defaults("defaults", "default", "sums")),
    "defaults-tuned": ("docs/tuning.md", lambda: defaults("defaults-tuned", "default", "tuned")),
    "statistics-adult": ("docs/statistics.md", statistics_of_adult),
    "sst2": ("docs/fine-tuning.md", sst2),
    "lora-noise": ("docs/fine-tuning.md", lora_noise),
    "lora-training": ("docs/fine-tuning.md", lora_training),
    "large-bodies": ("docs/fine-tuning.md", large_bodies),
    "local-optimizers": ("docs/tuning.md", local_optimizers),
    "standardising": ("docs/statistics.md", standardising),
    "evaluation-adult": ("docs/statistics.md", evaluation_of_adult),
    "choosing-origin": ("docs/tuning.md", lambda: origin(kept("choosing")["provenance"])),
    "choosing-epsilon": ("docs/tuning.md", choosing("privacy.epsilon", "noise_multiplier")),
    "choosing-clip": ("docs/tuning.md", choosing("privacy.clip_value")),
    "choosing-p": ("docs/tuning.md", choosing("algorithm.compression", "upload_bytes", "run_bytes")),
    "choosing-B": ("docs/tuning.md", choosing("algorithm.batch", "noise_multiplier", "noise_of_mean")),
    "choosing-tau": ("docs/tuning.md", choosing("algorithm.local_steps", "noise_multiplier")),
    "choosing-T": ("docs/tuning.md", choosing("federation.rounds", "noise_multiplier", "run_bytes")),
    "persons": ("docs/engines.md", persons),
    "scale-out": ("docs/engines.md", scale_out),
    "secagg": ("docs/secagg.md", secagg),
    "recovery": ("docs/secagg.md", recovery),
    "ledger-calls": ("docs/ledger.md", ledger_calls),
    "ledger-share": ("docs/ledger.md", ledger_share),
    **SENTENCES,
}


if __name__ == "__main__":
    main()
