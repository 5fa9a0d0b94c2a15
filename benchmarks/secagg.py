"""What secure aggregation costs: a member's time and bytes, the server's time, and a round over loopback.

    python benchmarks/secagg.py [--members 10,100] [--count 50000] [--repeats 15] [--out FILE] [--json]

Beside the masks stands what they are added to: a member's answer to a round of Fed-SPA, with discrete Gaussian shares
(the CIFAR-10 CNN, one step on all of 500 records, one thread; ε = 1 and δ = 10⁻³ over five participations, a fifth of
the members colluding). Figures of one member are milliseconds of CPU time, so that other work on the machine adds
little to them; all are measured turn by turn. A member that has just started (`first_ms`) agrees with each other member
on a secret, which it then remembers. `loopback` is a whole round in seconds of wall time: members in a process of their
own, each with a connection of its own, against a server that adds up; with masks and without, of the same words. The
integers that travel there are as large as shares are, and are drawn faster.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import socket
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ending import ends_with_children
from fedspa.algorithms import chosen
from fedspa.algorithms.base import Agent, Terms
from fedspa.engine.native import NativeEngine
from fedspa.learning import models
from fedspa.learning.flat import FlatModel
from fedspa.mechanisms.base import CLIP_UNITS, Cohort, PlanRequest
from fedspa.mechanisms.discrete_gaussian.plan import FINE, SIGMA, DiscreteGaussianPlan, calibrated
from fedspa.secagg.keys import SecretKey
from fedspa.secagg.masking import MaskedSum, decode, encode, size, upload
from fedspa.secagg.session import Session
from fedspa.wire.payload import reduced, word_type
from provenance import in_parts, stamp

RECORDS, DIMENSION = 500, 537_610  # of the CIFAR-10 CNN
TAILS = 8  # standard deviations that a member's own noise does not pass
Integers = dict[str, NDArray[np.int64]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--members", default="10,100")
    parser.add_argument("--count", type=int, default=50_000, help="k, the integers of a message (default 50000)")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    settings = {"count": arguments.count, "repeats": arguments.repeats, "records": RECORDS, "nice": os.nice(0)}

    def measure(members: str) -> dict[str, Any]:
        return case(int(members), arguments.count, arguments.repeats)

    def stamped() -> dict[str, Any]:
        return stamp("numpy", "cryptography")

    names = arguments.members.split(",")
    document = in_parts("cases", names, measure, settings, arguments.out, stamped)
    if arguments.json:
        print(json.dumps(document, indent=1))
        return
    for members, found in document["cases"].items():
        print(f"\n{members} members")
        for name, value in found.items():
            print(f"  {name:24} {value}")


def case(n: int, count: int, repeats: int) -> dict[str, Any]:
    """Everything about a cohort of n."""
    secrets, session, values = cohort(n, count)
    sent = {name: upload(values[name], session, name, secrets[name]) for name in secrets}
    assert np.array_equal(summed(session, sent).values(), sum(values.values())), "the masked sum is not the plain sum"
    own, train = next(iter(secrets)), training(plan_of(n, count))
    key = sha256(b"0").digest()
    words = reduced(np.zeros(session.words, word_type(session.bits)), session.bits)
    words[:count] = reduced(values[own].astype(words.dtype), session.bits)
    times = turns(
        {
            "train": train,
            "first": lambda: upload(values[own], replace(session), own, SecretKey(key)),
            "member": lambda: upload(values[own], session, own, secrets[own]),
            "unmasked": lambda: encode(words, session),
            "server": lambda: summed(session, sent).values(),
        },
        repeats,
    )
    train_ms, member_ms, first_ms = (times[name]["median"] for name in ("train", "member", "first"))
    return {
        "bits": session.bits,
        "check_words": session.checks,
        "equal_to_the_bit": True,
        **{f"{name}_ms": each for name, each in times.items()},
        "server_ms_per_message": times["server"]["median"] / n,
        "share_of_training": (member_ms - times["unmasked"]["median"]) / train_ms,
        "share_of_training_first": (first_ms - times["unmasked"]["median"]) / train_ms,
        **lengths(session, signal(plan_of(n, count)) + TAILS * SIGMA),
        "loopback": loopback(n, count, max(3, repeats // 3)),
    }


def plan_of(n: int, count: int) -> DiscreteGaussianPlan:
    asked = PlanRequest(
        dimension=DIMENSION,
        active=count,
        agents=n,
        participations=5,
        sampling="poisson",
        batch=RECORDS,
        records=RECORDS,
        local_steps=1,
        neighbours="add-remove",
        delta=1e-3,
        clip="l2",
        clip_value=0.3,
        epsilon=1.0,
        options={"privacy.noise_multiplier": None},
        cohort=Cohort(n, n, n // 5),
    )
    return calibrated(asked)


def cohort(n: int, count: int) -> tuple[dict[str, SecretKey], Session, Integers]:
    """The members with their keys, their session, and integers of each."""
    secrets = {f"site-{i}": SecretKey(sha256(b"%d" % i).digest()) for i in range(n)}
    publics = {name: secret.public for name, secret in secrets.items()}
    plan, rng = plan_of(n, count), np.random.default_rng(0)
    sums = plan.aggregation
    session = Session("benchmark", 1, 1, publics, bytes(32), sums.low, sums.high, sums.count)
    most = signal(plan)
    values = {
        name: rng.integers(-most, most, count, endpoint=True) + np.rint(SIGMA * rng.standard_normal(count)).astype(int)
        for name in secrets
    }
    return secrets, session, values


def signal(plan: DiscreteGaussianPlan) -> int:
    """What a coordinate of one member's sum is held to, in units of the noise's grid."""
    return plan.reach * plan.bound // (FINE * CLIP_UNITS)


def lengths(session: Session, largest: int) -> dict[str, Any]:
    """Bytes per member: of the message, and of the same integers without masks and not compressed, by three counts.
    `largest` is what a member's integers do not pass."""
    count = session.count
    plain = {
        "words_of_the_sum": math.ceil(count * session.bits / 8),
        "fewest_bits_of_a_member": math.ceil(count * (2 * largest).bit_length() / 8),
        "int16": 2 * count,
    }
    masked = size(session)
    return {"bytes": masked, "plain_bytes": plain, "times_plain": {name: masked / each for name, each in plain.items()}}


def summed(session: Session, sent: dict[str, bytes]) -> MaskedSum:
    total = MaskedSum(session)
    for name, payload in sent.items():
        total.add(name, payload)
    return total


def training(plan: DiscreteGaussianPlan) -> Callable[[], object]:
    """One member's integers of a round, from its records."""
    module = models.build("cifar10-cnn", (3, 32, 32), 10, 0)
    theta = FlatModel(module).flatten()
    generator = torch.Generator().manual_seed(0)
    x, y = torch.rand(RECORDS, 3, 32, 32, generator=generator), torch.randint(0, 10, (RECORDS,), generator=generator)
    agent, terms = Agent(0, x, y, bytes(16), bytes(32)), Terms(1, "shared", bytes(16), 1.0, plan)
    algorithm, engine = chosen("fedspa", "secure-aggregation"), NativeEngine(module, 1)
    return lambda: list(algorithm.respond(theta, terms, [agent], engine))


def turns(works: dict[str, Callable[[], object]], repeats: int) -> dict[str, dict[str, float]]:
    """Milliseconds of CPU time; the first turn warms caches and is not counted."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for repeat in range(repeats + 1):
        for name, work in works.items():
            start = time.process_time()
            work()
            if repeat:
                times[name].append(1e3 * (time.process_time() - start))
    return {name: spread(each) for name, each in times.items()}


def spread(times: list[float]) -> dict[str, float]:
    return {"median": statistics.median(times), "lowest": min(times), "highest": max(times)}


def loopback(n: int, count: int, repeats: int) -> dict[str, Any]:
    """A round over TCP, from the first message asked for to the sum; each time checked against the plain sum."""
    found: dict[str, list[float]] = {"masked_s": [], "plain_s": []}
    context = multiprocessing.get_context("spawn")
    with socket.create_server(("127.0.0.1", 0), backlog=n) as server:
        here, there = context.Pipe()
        members = context.Process(target=play, args=(there, server.getsockname()[1], n, count))
        members.start()
        try:
            session: Session = here.recv()
            plain = here.recv()
            for name in ("masked_s", "plain_s") * repeats:
                start = time.perf_counter()
                here.send(name)
                total = received(server, session, name == "masked_s")
                found[name].append(time.perf_counter() - start)
                assert np.array_equal(total, plain), "what came over loopback is not the plain sum"
            here.send("end")
        finally:
            members.join(60)
    both = {name: spread(each) for name, each in found.items()}
    more = (both["masked_s"]["median"] - both["plain_s"]["median"]) / n
    return {**both, "more_ms_per_member": 1e3 * more}


def received(server: socket.socket, session: Session, masked: bool) -> NDArray[np.int64]:
    """The sum of what comes in. Without masks the same words are decoded and added, and nothing has to cancel."""
    total, words = MaskedSum(session), np.zeros(session.words, word_type(session.bits))
    for name in session.members:
        connection, _ = server.accept()
        with connection, connection.makefile("rb") as stream:
            payload = stream.read()
        if masked:
            total.add(name, payload)
        else:
            words += decode(payload, session)
    if masked:
        return total.values()
    signed: NDArray[np.int64] = reduced(words, session.bits)[: session.count].astype(np.int64)
    signed[signed > session.high] -= 2**session.bits
    return signed


def play(pipe: Any, port: int, n: int, count: int) -> None:
    """The members, one after the other, in a process of their own."""
    secrets, session, values = cohort(n, count)
    pipe.send(session)
    pipe.send(sum(values.values()))
    while (asked := pipe.recv()) != "end":
        for name, secret in secrets.items():
            if asked == "masked_s":
                payload = upload(values[name], session, name, secret)
            else:
                words = np.zeros(session.words, word_type(session.bits))
                words[:count] = values[name].astype(words.dtype)
                payload = encode(reduced(words, session.bits), session)
            with socket.create_connection(("127.0.0.1", port)) as connection:
                connection.sendall(payload)


if __name__ == "__main__":
    ends_with_children()
    main()
