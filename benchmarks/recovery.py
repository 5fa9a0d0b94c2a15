"""What recovery from silence costs: rounds of secure aggregation over loopback in which members fall silent.

    python benchmarks/recovery.py [--members 100] [--silent 20] [--rounds 30] [--count 50000] [--out FILE]

The members are in a process of their own, each question and answer on a connection of its own. In each round
`--silent` members, drawn afresh, fall silent at a moment that is drawn for each: before the upload, the exclude, the
commit or the open. `privacy.members` is what is left, and nobody colludes. Each sum is compared with the plain sum of
the survivors' integers. Beside it the same uploads, without recovery and without silence. Times are wall time of a
round; `member_ms` is CPU time of all that a member computes, and `server_ms` that of the server.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import pickle
import random
import socket
import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import secagg
from ending import ends_with_children
from fedspa.secagg import recovery
from fedspa.secagg.masking import MaskedSum, size, upload
from fedspa.secagg.recovery import Progress, RecoverableSum, Step, answer, survivors_in
from fedspa.secagg.session import Session, threshold_of
from provenance import stamp

MOMENTS: tuple[Step | str, ...] = ("upload", *recovery.STEPS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--members", type=int, default=100)
    parser.add_argument("--silent", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--count", type=int, default=50_000, help="k, the integers of a message (default 50000)")
    parser.add_argument("--out", type=Path, default=None)
    arguments = parser.parse_args()
    found = measured(arguments.members, arguments.silent, arguments.rounds, arguments.count)
    settings = {key: getattr(arguments, key) for key in ("members", "silent", "rounds", "count")}
    text = json.dumps({"provenance": stamp("numpy", "cryptography"), "settings": settings, **found}, indent=1) + "\n"
    if arguments.out is not None:
        arguments.out.write_text(text)
    print(text)


def sessions(n: int, silent: int, count: int, t: int) -> tuple[Session, Session]:
    """The session of round t with recovery, and without."""
    _, session, _ = secagg.cohort(n, count)
    plain = replace(session, round=t)
    return replace(plain, threshold=threshold_of(n, 0), least=n - silent), plain


def measured(n: int, silent: int, rounds: int, count: int) -> dict[str, Any]:
    _, _, values = secagg.cohort(n, count)
    recovering, plain = sessions(n, silent, count, 0)
    wall: dict[str, list[float]] = {"recovered": [], "plain": []}
    server, member, uplink, survivors, moments = [], [], [], [], []
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    players = context.Process(target=play, args=(there, n, silent, count, os.getpid()))
    players.start()
    try:
        port = here.recv()
        for t in range(rounds):
            recovering, plain = sessions(n, silent, count, t)
            drawn = random.Random(t)
            falls = {name: drawn.choice(MOMENTS) for name in drawn.sample(list(values), silent)}
            here.send(("round", t, falls))
            here.recv()
            total, began, cpu = RecoverableSum(recovering), time.perf_counter(), time.process_time()
            for name in values:
                if (message := asked(port, ("upload", name, b""))) is not None:
                    total.add(name, message)

            def ask(step: Step, questions: Mapping[str, bytes]) -> Iterator[tuple[str, bytes]]:
                for name, body in questions.items():
                    if (reply := asked(port, (step, name, body))) is not None:
                        yield name, reply

            total.recover(ask)
            summed = total.values()
            wall["recovered"].append(time.perf_counter() - began)
            server.append(time.process_time() - cpu)
            assert np.array_equal(summed, sum(values[name] for name in total._survivors)), "not the plain sum"
            survivors.append(total.members)
            moments.append(dict(sorted((step, list(falls.values()).count(step)) for step in set(falls.values()))))
            here.send(("cost",))
            spent, sent = here.recv()
            member.append(spent / n)
            uplink.append(max(sent.values()))

            here.send(("plain", t, {}))
            here.recv()
            whole, began = MaskedSum(plain), time.perf_counter()
            for name in values:
                message = asked(port, ("upload", name, b""))
                assert message is not None
                whole.add(name, message)
            whole.values()
            wall["plain"].append(time.perf_counter() - began)
        here.send(("end",))
    finally:
        players.join(10)
        if players.is_alive():
            players.terminate()
    without = size(plain)
    return {
        "rounds_completed": len(survivors),
        "equal_to_the_bit": True,
        "survivors": [min(survivors), max(survivors)],
        "round_s": {name: secagg.spread(each) for name, each in wall.items()},
        "server_ms": secagg.spread([1e3 * each for each in server]),
        "member_ms": secagg.spread([1e3 * each for each in member]),
        "bytes_of_a_member": statistics.median(uplink),
        "bytes_without_recovery": without,
        "times_bytes": statistics.median(uplink) / without,
    }


def asked(port: int, question: tuple[str, str, bytes]) -> bytes | None:
    """The answer to a question, or None where the member is silent."""
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(pickle.dumps(question))
        connection.shutdown(socket.SHUT_WR)
        with connection.makefile("rb") as stream:
            return stream.read() or None


def play(pipe: Any, n: int, silent: int, count: int, parent: int) -> None:
    """All members: each answers on the connection that it is asked on, or closes it."""
    secrets, _, values = secagg.cohort(n, count)
    names = tuple(secrets)
    for secret in secrets.values():  # what each two members share never changes
        for other in secrets.values():
            secret.shared(other.public)
    with socket.create_server(("127.0.0.1", 0), backlog=n) as server:
        server.settimeout(0.2)
        pipe.send(server.getsockname()[1])
        session, falls, progress = sessions(n, silent, count, 0)[0], {}, dict.fromkeys(names, Progress(names))
        spent, sent = 0.0, dict.fromkeys(names, 0)
        while os.getppid() == parent:
            if pipe.poll():
                what, *rest = pipe.recv()
                if what == "end":
                    return
                if what == "cost":
                    pipe.send((spent, sent))
                    continue
                t, falls = rest
                session = sessions(n, silent, count, t)[what == "plain"]
                progress = dict.fromkeys(names, Progress(tuple(session.members)))
                spent, sent = 0.0, dict.fromkeys(names, 0)
                pipe.send("ready")
                continue
            try:
                connection, _ = server.accept()
            except TimeoutError:
                continue
            with connection, connection.makefile("rb") as stream:
                step, name, body = pickle.loads(stream.read())
                if name in falls and MOMENTS.index(step) >= MOMENTS.index(falls[name]):
                    continue
                began = time.process_time()
                if step != "upload":
                    survivors = survivors_in(session, step, body)
                    progress[name] = progress[name].advanced(session, name, step, survivors)
                    reply = answer(session, name, secrets[name], progress[name], step, body)
                elif session.threshold:
                    reply = recovery.upload(values[name], session, name, secrets[name], os.urandom(32))
                else:
                    reply = upload(values[name], session, name, secrets[name])
                spent += time.process_time() - began
                sent[name] += len(reply)
                connection.sendall(reply)


if __name__ == "__main__":
    ends_with_children()
    main()
