"""Checks of a site before it joins: everything that would make it refuse every run, or lose what it spent."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import chdir
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import load_ssh_public_key

from fedspa.agent.ledger.ledger import Ledger
from fedspa.agent.ledger.report import verify
from fedspa.agent.participate import Outbox, check_newest
from fedspa.agent.policy import Policy
from fedspa.errors import Check, ConfigError, DataError, FedspaError, LedgerError, real_path, run_checks
from fedspa.examples import count, layout, leaves
from fedspa.flower.folders import (
    ServerFolder,
    SiteFolder,
    address_parts,
    days_left,
    names_of,
    node_key_problem,
    read_certificate,
    server_key_problem,
)
from fedspa.flower.monitor import answers_tls
from fedspa.flower.site import Site, bad_records, read_site
from fedspa.flower.terms import VERSION
from fedspa.flower.trainer import SiteExamples, Trainer, trainer_for
from fedspa.learning.tasks.named import resolve
from fedspa.privacy.event import noise_modes, seeded_warning, shown
from fedspa.runs import checkpoint
from fedspa.secagg.keys import fingerprint

logger = logging.getLogger("fedspa.agent")
FLWR = ((1, 41), (2, 0))  # from, and below: as pyproject.toml has it
_NEEDED_BYTES = 50 * 2**20
_IN_MEMORY = frozenset({"tmpfs", "ramfs"})
_OVER_A_NETWORK = frozenset({"nfs", "nfs4", "cifs", "smb3", "9p", "fuse.sshfs", "ceph", "glusterfs"})


def examine(site: SiteFolder, *, server: bool = False) -> list[Check]:
    """Run every check of a site's folder; with `server`, also whether the SuperLink can be reached."""
    checks: dict[str, Callable[[SiteFolder], Iterator[Check]]] = {
        "policy": _policy,
        "node": _node,
        "ledger": _ledger,
        "node key": _node_key,
        "certificate": _certificate,
        "apps": _apps,
        **({"server": _server} if server else {}),
        "versions": lambda _: versions(),
    }
    with chdir(site.path):  # where a function of the site's own is found
        return run_checks({subject: partial(check, site) for subject, check in checks.items()})


def versions() -> Iterator[Check]:
    """Return what two ends must have in common."""
    version = metadata.version("flwr")
    fits = FLWR[0] <= tuple(int(part) for part in version.split(".")[:2]) < FLWR[1]
    wanted = "" if fits else "; fedspa supports 1.41 and later versions below 2: pip install 'fedspa[flower]'"
    yield Check("flwr", fits, version + wanted)
    yield Check("editions", None, f"terms {VERSION}, {checkpoint.written_editions()}: both ends must print the same")


def check_node(node: Mapping[str, Any]) -> list[Check]:
    """Return what there is to say of a node-config that can be served; an error of one line where none could."""
    if not logger.handlers:
        logger.addHandler(logging.NullHandler())  # bad records are reported below, once
    site = read_site(node, {})
    held = site.held(0)
    trainer = _require_use(site, held)
    own = site.own_records()
    learned = f"classes 0 to {site.own_classes - 1}" if site.own_classes is not None else f"task {site.task}"
    found = [("agent", site.agent), ("records", f"{count(own.y)} of shape {layout(held.record.x)}, {learned}")]
    if site.unit == "person":
        found.append(("persons", f"{count(held.examples.y)}, of each at most {_most(held)} records"))
    slots = f"{site.max_records} places for {site.unit}s, a public number that is meant to stay"
    none = "not named: under Poisson sampling, records are never taken together"
    found += [("max_records", none if site.max_records is None else slots), ("device", str(site.device))]
    if trainer is not None:
        found.append(("engine", f"{trainer.engine.name} ({trainer.training.choice.why})"))
        found += (("faster", hint) for hint in trainer.training.choice.hints)
    if site.member is not None:
        roster = site.member.roster
        found.append(("site key", f"{fingerprint(site.member.secret.public)}, for sums with others"))
        found.append(("roster", f"{len(roster.members)} members, digest {roster.digest[:16]}…"))
    found += (("ledger", line) for line in _spent(site))
    with Ledger.read(site.ledger) as ledger:  # what the ε above does not count
        notes = [("ledger", str(loss)) for loss in ledger.losses()]
    if own.bad:
        notes.append(("bad records", bad_records(own, site.own_classes, site.node["data"])))
    return [
        *(Check(subject, True, detail) for subject, detail in found),
        *(Check(subject, None, detail) for subject, detail in notes),
    ]


def _policy(site: SiteFolder) -> Iterator[Check]:
    policy = Policy.load(site.policy)
    terms = f"at δ = {policy.delta:g}, {policy.neighbours}"
    yield Check("policy", True, f"ε up to {policy.epsilon:g} over all runs, {terms}")


def _node(site: SiteFolder) -> Iterator[Check]:
    try:
        Policy.load(site.policy)
    except FedspaError:
        yield Check("node", None, "not checked: fix the policy first")
        return
    try:
        yield from check_node(site.node)
    except DataError as error:
        yield Check("records", False, str(error))


def _spent(site: Site) -> Iterator[str]:
    if not site.ledger.exists():
        raise LedgerError(
            f"{site.ledger} is missing; restore it: `fedspa site new` creates it, once, and nothing else does"
        )
    with Ledger.open(site.ledger, create=False) as ledger:
        check_newest(ledger, Outbox(site.ledger, site.agent), site.agent)
        events, first = ledger.spent(site.agent), ledger.first_plan(site.agent)
        totals = [(limit, limit.total(events, first)) for limit in site.policy.cap.limits]
    for unit in {event.unit for event in events} - {site.unit}:
        raise LedgerError(
            f"{site.ledger}: what {site.agent!r} spent there is for each {unit}, and this node-config protects each "
            f"{site.unit}; an agent's entries have one unit"
        )
    for limit, total in totals:
        terms = ", ".join(filter(None, (f"δ = {limit.delta:g}", limit.neighbours, total.by, limit.words)))
        yield f"ε = {shown(total.epsilon)} spent of {limit.epsilon:g} ({terms})"
    if (words := seeded_warning(noise_modes(events))) is not None:  # a simulation's ledger
        yield words


def _ledger(site: SiteFolder) -> Iterator[Check]:
    """Return whether what is written there stays: verified, on a disk of this machine, with free space."""
    path = site.ledger
    if path.exists():
        problems = verify(path)
        yield Check("ledger file", not problems, problems[0] if problems else f"{path}: verified, with its anchor")
    folder, kind = path.parent, filesystem(path.parent)
    if not os.access(folder, os.W_OK):
        yield Check("ledger disk", False, f"{folder} cannot be written by this user; change its owner")
    elif kind in _IN_MEMORY:
        yield Check("ledger disk", False, f"{folder} is on a memory file system ({kind}); move the ledger to a disk")
    elif kind in _OVER_A_NETWORK:
        yield Check("ledger disk", False, f"{folder} lies on another machine ({kind}); SQLite needs a local disk")
    elif (free := shutil.disk_usage(folder).free) < _NEEDED_BYTES:
        yield Check("ledger disk", False, f"{folder} has {free >> 20} MiB left; free disk space")
    elif kind == "overlay":
        yield Check("ledger disk", None, f"{folder} is lost with its container; mount a volume there")
    else:
        yield Check("ledger disk", True, f"{folder} ({kind or 'unknown kind'}), {free >> 30} GiB left")


def _node_key(site: SiteFolder) -> Iterator[Check]:
    problem = node_key_problem(site.key)
    yield Check("node key", problem is None, problem or f"{site.key}, readable by its owner only")


def _certificate(site: SiteFolder) -> Iterator[Check]:
    left = days_left(read_certificate(site.certificate))
    why = f"valid for {left} days" if left >= 0 else f"ended {-left} days ago; ask for the server's new one"
    yield Check("certificate", left >= 0, f"{site.certificate}, {why}")


def _apps(site: SiteFolder) -> Iterator[Check]:
    digests = site.digests()
    none = f"none pinned: read the app that you are sent, then `fedspa site pin {site.path} APP`"
    yield Check("apps", bool(digests), ", ".join(f"{digest[:12]}…" for digest in digests) or none)


def _server(site: SiteFolder) -> Iterator[Check]:
    problem = answers_tls(*address_parts(site.superlink), str(site.certificate))
    yield Check("server", problem is None, problem or f"{site.superlink} answers, with the right certificate")


def filesystem(path: Path) -> str | None:
    """Return what kind of file system `path` lies on, where the system tells (Linux)."""
    try:
        lines = Path("/proc/mounts").read_text("utf-8").splitlines()
    except OSError:
        return None
    # "device /mount/point type options", blanks in names as \\040; the last of the longest is what is seen.
    mounts = [(Path(fields[1].replace("\\040", " ")), fields[2]) for fields in map(str.split, lines)]
    within = [(len(point.parts), kind) for point, kind in mounts if real_path(path).is_relative_to(point)]
    return max(reversed(within), key=lambda mount: mount[0])[1] if within else None


def _require_use(site: Site, held: SiteExamples) -> Trainer | None:
    """An error where no run could be served: each of them would be refused. What trains the site's own model, where it
    names one, under the sampling that its policy allows or prefers."""
    if site.policy.unit not in (None, site.unit):
        raise ConfigError(
            f"the policy asks for unit = {site.policy.unit!r}, and the records of this node-config are protected for "
            f"each {site.unit}: every run would be refused"
        )
    if site.model is None:
        return None
    task = resolve(site.task, held.record.y, site.own_classes, held.key)
    most = None if site.unit == "record" else _most(held)
    isolation = site.isolation_for("poisson" if site.policy.neighbours == "add-remove" else "fixed")
    return trainer_for(site.model, held.record, task, most, "auto", 1, False, 0, site.device, isolation)


def _most(held: SiteExamples) -> int:
    """Return how many records the person with the most has, of those that count."""
    return next(leaves(held.examples.y)).shape[1]


def examine_server(server: ServerFolder) -> list[Check]:
    """Run every check of a server's folder."""
    checks: dict[str, Callable[[ServerFolder], Iterator[Check]]] = {
        "certificate": _server_certificate,
        "key": _server_key,
        "folder": _server_folder,
        "nodes": _server_nodes,
        "versions": lambda _: versions(),
    }
    return run_checks({subject: partial(check, server) for subject, check in checks.items()})


def _server_certificate(server: ServerFolder) -> Iterator[Check]:
    certificate, authority = map(read_certificate, (server.certificate, server.authority))
    left = min(map(days_left, (certificate, authority)))
    names = ", ".join(names_of(certificate)) or "no name, so that no site can check it"
    why = f"valid for {left} days" if left >= 0 else f"ended {-left} days ago: put a new one there, and ca.crt at sites"
    yield Check("certificate", left >= 0, f"{server.certificate}: {names}; {why}")
    try:
        certificate.verify_directly_issued_by(authority)
        yield Check("authority", True, f"{server.authority} signed it; every site needs this file")
    except Exception:  # of many kinds: another name, another key, a signature that is none
        yield Check("authority", False, f"{server.authority} did not sign it; put the right one there")


def _server_key(server: ServerFolder) -> Iterator[Check]:
    problem = server_key_problem(server.key, server.certificate)
    yield Check("key", problem is None, problem or f"{server.key}, readable by its owner only")


def _server_folder(server: ServerFolder) -> Iterator[Check]:
    places = {server.database.parent, server.runs.parent if not server.runs.exists() else server.runs}
    closed = [str(place) for place in places if not os.access(place, os.W_OK)]
    can = f"{server.database} and {server.runs} can be written"
    yield Check("folder", not closed, f"{closed[0]} cannot be written by this user" if closed else can)


def _server_nodes(server: ServerFolder) -> Iterator[Check]:
    found = sorted(server.nodes.glob("*.pub"))
    for path in found:
        try:
            load_ssh_public_key(path.read_bytes())
        except (OSError, ValueError, UnsupportedAlgorithm):
            yield Check("nodes", False, f"{path} holds no public key; ask the site for its node.key.pub")
            return
    names = ", ".join(path.stem for path in found) or "no site's key yet: put them there as NAME.pub"
    yield Check("nodes", True if found else None, f"{server.nodes}: {names}")
