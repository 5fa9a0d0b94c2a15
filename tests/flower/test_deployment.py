"""One real deployment on loopback: TLS, authenticated nodes, and everything that can die, dying.

The processes are those of examples/hospital, so the example is tested with it.
"""

from __future__ import annotations

import json
import re
import shutil
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fedspa.agent.ledger.ledger import Ledger
from fedspa.agent.ledger.report import verify
from fedspa.flower.folders import make_node_key

HOSPITAL = Path(__file__).parents[2] / "examples/hospital"
ROUNDS = 4


def until(condition: Callable[[], bool], timeout: float = 90.0) -> None:
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.1)


def entries(folder: Path, site: str) -> int:
    with Ledger.open(folder / site / "ledger/ledger.sqlite", create=False) as ledger:
        return sum(ledger.spent(site).values())


def pass_a_minute(deployment, dead: str) -> None:
    """As if the SuperLink, which is down, had been away for as long as it waits for a node's or a run's heartbeat."""
    (number,) = re.findall(rb"SuperNode ID: (\d+)", deployment.log(dead).read_bytes())
    signed = int.from_bytes(int(number).to_bytes(8, "big"), "big", signed=True)
    with closing(sqlite3.connect(deployment.folder / "server/superlink.db")) as database, database:
        node = database.execute("UPDATE node SET online_until = 0 WHERE node_id = ?", (signed,))
        run = database.execute("UPDATE task SET active_until = running_at WHERE finished_at IS NULL")
    assert (node.rowcount, run.rowcount) == (1, 1)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_strangers_stay_out_and_a_run_survives_the_death_of_a_node_and_of_the_server(disk, hospital):
    loopback, script = hospital
    out = disk / "run"
    sites = script.SITES[:2]
    sizes = {"federation.agents": 2, "federation.per_round": 2, "federation.rounds": ROUNDS, "flower.quorum": 1}
    config = {"run.out": str(out), "flower.round_timeout": 15.0} | sizes
    with loopback.Deployment(disk) as deployment:
        deployment.start_superlink()
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda site: script.set_up(deployment, site), sites))
        for site in sites:
            deployment.start_node(site)
        # With them: a node whose key nobody registered, and one without TLS.
        shutil.copytree(disk / "north", disk / "stranger")
        for part in ("node.key", "node.key.pub"):
            (disk / "stranger" / part).unlink()
        make_node_key(disk / "stranger/node.key")
        settings = disk / "stranger/site.toml"
        settings.write_text(re.sub(r"\nport = \d+", f"\nport = {loopback.free_port()}", settings.read_text()))
        deployment.start_node("stranger")
        deployment.start(
            *("plain", loopback.BIN / "flower-supernode", "--insecure", "--max-retries", "1"),
            *("--superlink", f"127.0.0.1:{deployment.port}", "--port", str(loopback.free_port())),
        )
        assert all(deployment.accepted(site) for site in sites)
        assert not deployment.accepted("stranger")
        assert b"Exit Code: 305" in deployment.log("stranger").read_bytes()
        assert not deployment.accepted("plain", timeout=8)
        assert b"SuperNode ID" not in deployment.log("plain").read_bytes()
        for name in ("stranger", "plain"):
            deployment.kill(name)

        # A site dies in the second round, or in the one after that which came too early for it: on a busy machine its
        # app may take longer to start than a round waits.
        first = deployment.submit(HOSPITAL, config)
        until(lambda: script.lines(out / "asked.jsonl") >= 2 and entries(disk, "south") > 0)
        deployment.kill("south")

        # The server dies in a later one.
        until(lambda: script.lines(out / "metrics.jsonl") >= 2 and script.lines(out / "asked.jsonl") >= 3)
        until(lambda: all(entries(disk, site) > 0 for site in sites))
        deployment.kill("superlink")
        assert not (out / "summary.json").exists()
        before = {site: entries(disk, site) for site in sites}
        pass_a_minute(deployment, dead="south")

        deployment.start_superlink()
        second = deployment.submit(HOSPITAL, config | {"flower.resume": True, "flower.start_timeout": 5.0})
        deployment.start_node_when_allowed("south")
        until((out / "summary.json").exists, 200)  # cheaper to ask for than the run's status
        finished = deployment.wait(second, 30)
        assert finished["status"] == "finished:completed", deployment.output(second)[-3000:]
        assert first != second
        assert finished["network-traffic"]["total-bytes"] > 0
    assert deployment.processes() == []

    metrics = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["round"] for line in metrics] == list(range(ROUNDS))
    assert all(torch.isfinite(value).all() for value in load_file(out / "model.safetensors").values())
    summary = json.loads((out / "summary.json").read_text())
    # 119 held-out records; the larger class alone gives 0.77. Of 40 runs in one process with these settings, in which
    # south answered the first round only, the least gave 0.815, four less than 0.85, and the median was 0.908.
    assert summary["accuracy_last"] > 0.77
    asked = [json.loads(line) for line in (out / "asked.jsonl").read_text().splitlines()]
    rounds = {number: {line["round"] for line in asked if number in line["agents"]} for number in range(2)}
    spent = {site: entries(disk, site) for site in sites}
    for site in sites:
        assert verify(disk / site / "ledger/ledger.sqlite") == []
        assert spent[site] >= before[site] > 0
    # No spend is lost: all that was taken was paid for, and the server's own count is no smaller than the ledgers'.
    assert sum(line["agents"] for line in metrics) <= sum(spent.values())
    bounds = sorted(len(found) for found in rounds.values())
    assert all(paid <= bound for paid, bound in zip(sorted(spent.values()), bounds))
    assert summary["participations_max"] == max(len(found) for found in rounds.values()) <= ROUNDS
