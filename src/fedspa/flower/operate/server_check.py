"""The server is looked at before it is started."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import load_ssh_public_key

from fedspa.errors import FedspaError
from fedspa.flower.check import Finding, versions
from fedspa.flower.operate import credentials
from fedspa.flower.operate.folders import ServerFolder


def examine(server: ServerFolder) -> list[Finding]:
    """Every question to a server's folder."""
    questions: dict[str, Callable[[ServerFolder], Iterator[Finding]]] = {
        "certificate": _certificate,
        "key": _key,
        "folder": _folder,
        "nodes": _nodes,
        "versions": lambda _: versions(),
    }
    found: list[Finding] = []
    for subject, question in questions.items():
        try:
            found += question(server)
        except FedspaError as error:
            found.append(Finding(subject, False, str(error)))
    return found


def _certificate(server: ServerFolder) -> Iterator[Finding]:
    certificate, authority = map(credentials.read_certificate, (server.certificate, server.authority))
    left = min(map(credentials.days_left, (certificate, authority)))
    names = ", ".join(credentials.names_of(certificate)) or "no name, so that no site can check it"
    why = f"valid for {left} days" if left >= 0 else f"ended {-left} days ago: put a new one there, and ca.crt at sites"
    yield Finding("certificate", left >= 0, f"{server.certificate}: {names}; {why}")
    try:
        certificate.verify_directly_issued_by(authority)
        yield Finding("authority", True, f"{server.authority} signed it; every site needs this file")
    except Exception:  # of many kinds: another name, another key, a signature that is none
        yield Finding("authority", False, f"{server.authority} did not sign it; put the right one there")


def _key(server: ServerFolder) -> Iterator[Finding]:
    problem = credentials.server_key_problem(server.key, server.certificate)
    yield Finding("key", problem is None, problem or f"{server.key}, readable by its owner only")


def _folder(server: ServerFolder) -> Iterator[Finding]:
    places = {server.database.parent, server.runs.parent if not server.runs.exists() else server.runs}
    closed = [str(place) for place in places if not os.access(place, os.W_OK)]
    can = f"{server.database} and {server.runs} can be written"
    yield Finding("folder", not closed, f"{closed[0]} cannot be written by this user" if closed else can)


def _nodes(server: ServerFolder) -> Iterator[Finding]:
    found = sorted(server.nodes.glob("*.pub"))
    for path in found:
        try:
            load_ssh_public_key(path.read_bytes())
        except (OSError, ValueError, UnsupportedAlgorithm):
            yield Finding("nodes", False, f"{path} holds no public key; ask the site for its node.key.pub")
            return
    told = ", ".join(path.stem for path in found) or "no site's key yet: put them there as NAME.pub"
    yield Finding("nodes", True if found else None, f"{server.nodes}: {told}")
