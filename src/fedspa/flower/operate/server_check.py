"""Checks of the server's folder before it starts."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import load_ssh_public_key

from fedspa.checks import Check, run_checks
from fedspa.flower.check import versions
from fedspa.flower.operate import credentials
from fedspa.flower.operate.folders import ServerFolder


def examine(server: ServerFolder) -> list[Check]:
    """Run every check of a server's folder."""
    checks: dict[str, Callable[[ServerFolder], Iterator[Check]]] = {
        "certificate": _certificate,
        "key": _key,
        "folder": _folder,
        "nodes": _nodes,
        "versions": lambda _: versions(),
    }
    return run_checks({subject: partial(check, server) for subject, check in checks.items()})


def _certificate(server: ServerFolder) -> Iterator[Check]:
    certificate, authority = map(credentials.read_certificate, (server.certificate, server.authority))
    left = min(map(credentials.days_left, (certificate, authority)))
    names = ", ".join(credentials.names_of(certificate)) or "no name, so that no site can check it"
    why = f"valid for {left} days" if left >= 0 else f"ended {-left} days ago: put a new one there, and ca.crt at sites"
    yield Check("certificate", left >= 0, f"{server.certificate}: {names}; {why}")
    try:
        certificate.verify_directly_issued_by(authority)
        yield Check("authority", True, f"{server.authority} signed it; every site needs this file")
    except Exception:  # of many kinds: another name, another key, a signature that is none
        yield Check("authority", False, f"{server.authority} did not sign it; put the right one there")


def _key(server: ServerFolder) -> Iterator[Check]:
    problem = credentials.server_key_problem(server.key, server.certificate)
    yield Check("key", problem is None, problem or f"{server.key}, readable by its owner only")


def _folder(server: ServerFolder) -> Iterator[Check]:
    places = {server.database.parent, server.runs.parent if not server.runs.exists() else server.runs}
    closed = [str(place) for place in places if not os.access(place, os.W_OK)]
    can = f"{server.database} and {server.runs} can be written"
    yield Check("folder", not closed, f"{closed[0]} cannot be written by this user" if closed else can)


def _nodes(server: ServerFolder) -> Iterator[Check]:
    found = sorted(server.nodes.glob("*.pub"))
    for path in found:
        try:
            load_ssh_public_key(path.read_bytes())
        except (OSError, ValueError, UnsupportedAlgorithm):
            yield Check("nodes", False, f"{path} holds no public key; ask the site for its node.key.pub")
            return
    names = ", ".join(path.stem for path in found) or "no site's key yet: put them there as NAME.pub"
    yield Check("nodes", True if found else None, f"{server.nodes}: {names}")
