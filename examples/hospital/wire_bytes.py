"""What a node-round costs on the wire, beside its payload: bytes counted between SuperNodes and SuperLink, under TLS.

    python wire_bytes.py [FOLDER]

Each site connects through a counting relay. Idle traffic (polls, heartbeats) is measured first and stated apart.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
from collections import Counter
from pathlib import Path

from loopback import Deployment, free_port
from run import HERE, SITES, fresh, set_up

ROUNDS = 6
RUNS = {
    "hospital (d = 62, k = 31, int)": {},
    "every coordinate as f32 (k = 62)": {"algorithm.compression": 1.0, "algorithm.coding": "f32"},
    "mlp (d = 2114, k = 1057, int)": {"model.name": "mlp"},
}


class Relay:
    """Passes bytes between a port of its own and the SuperLink's, and counts them."""

    def __init__(self, target: int) -> None:
        self.port = free_port()
        self.bytes: Counter[str] = Counter()
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", self.port))
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                node, _ = self._listener.accept()
            except OSError:
                return
            link = socket.create_connection(("127.0.0.1", self._target))
            for source, sink, way in ((node, link, "up"), (link, node, "down")):
                threading.Thread(target=self._pass, args=(source, sink, way), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket, way: str) -> None:
        try:
            while data := source.recv(65536):
                self.bytes[way] += len(data)
                sink.sendall(data)
        except OSError:
            pass
        finally:
            source.close()
            sink.close()

    def close(self) -> None:
        self._listener.close()


def count(relays: dict[str, Relay]) -> dict[str, int]:
    return {way: sum(relay.bytes[way] for relay in relays.values()) for way in ("up", "down")}


def main(folder: Path) -> None:
    with Deployment(folder) as deployment:
        deployment.start_superlink()
        relays = {}
        for site in SITES:
            relays[site] = Relay(deployment.port)
            set_up(deployment, site, superlink=f"127.0.0.1:{relays[site].port}")
            deployment.start_node(site)
        assert all(deployment.accepted(site) for site in SITES)
        time.sleep(5)
        start, began = count(relays), time.monotonic()
        time.sleep(30)
        seconds, end = time.monotonic() - began, count(relays)
        idle = {way: (end[way] - start[way]) / seconds for way in ("up", "down")}
        print(f"idle: {idle['up'] / len(SITES):.0f} B/s up, {idle['down'] / len(SITES):.0f} B/s down a node")
        for name, changes in RUNS.items():
            out = folder / f"run-{len(list(folder.glob('run-*')))}"
            start, began = count(relays), time.monotonic()
            config = {"run.out": str(out), "federation.rounds": ROUNDS, "privacy.epsilon": 1.0, **changes}
            finished = deployment.wait(deployment.submit(HERE, config), 300)
            seconds, end = time.monotonic() - began, count(relays)
            lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
            rounds = sum(line["agents"] for line in lines)
            payload = sum(line["uplink_bytes"] for line in lines) / rounds
            print(f"{name}: {rounds} node-rounds in {seconds:.0f} s; bytes per node and round: payload {payload:.0f}")
            for way, key in (("up", "inbound-bytes"), ("down", "outbound-bytes")):
                messages = finished["network-traffic"][key] / rounds
                wire, polls = (end[way] - start[way]) / rounds, idle[way] * seconds / rounds
                print(f"  {way}: messages {messages:.0f} (Flower's count), wire {wire:.0f}, idle share {polls:.0f}")
    for relay in relays.values():
        relay.close()


if __name__ == "__main__":
    main(fresh(sys.argv[1] if len(sys.argv) > 1 else "wire-bytes"))
