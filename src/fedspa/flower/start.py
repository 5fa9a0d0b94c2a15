"""Flower's own programs for a site or the server: the SuperNode, the SuperLink, and the `flwr` command.

In Flower the server ships the code that agents run. Control of that code is control of what leaves, whatever policy
and ledger say. Here the agent's operator reviews an app and pins the digest of its bundle (`fedspa site pin`); an app
of any other content is answered with Flower's own "invalid FAB" and never unpacked.

Flower's public option for this, `--trusted-entities`, accepts only signatures that a SuperLink fetched from Flower's
hub together with the app, so that neither a site nor its server can sign one, and there is no public hook for another
check. `pin` therefore replaces that check where Flower makes it, and refuses to start where a version of Flower no
longer makes it there: `tests/flower` runs with each version that is supported.
"""

from __future__ import annotations

import errno
import hashlib
import inspect
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedspa import toml
from fedspa.errors import ConfigError, FedspaError, did_you_mean, os_errors_as, quoted, real_path
from fedspa.flower.folders import ServerFolder, SiteFolder

if TYPE_CHECKING:
    from flwr.supercore.fab import Fab

NAME = "fedspa"  # of the SuperLink, in the server's own Flower config
_SECONDS = 300
_FRAME = str.maketrans(dict.fromkeys("─│╭╮╰╯", " "))  # which flwr draws around its words


def environment(folder: Path) -> dict[str, str]:
    """Return the environment of Flower's processes: they keep their files in the folder, ask nobody outside for
    anything, and look for work often. What is set already stays."""
    own = {
        "FLWR_HOME": str(folder / "flwr"),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.05",
        "FEDSPA_LOG_FORMAT": "text",
    }
    # A node starts `flower-superexec` by its name, which lies beside this Python.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    return {**own, **os.environ, "PATH": path}


def node_arguments(site: SiteFolder) -> list[str]:
    """Return the flags of `flower-supernode`."""
    return [
        *("--superlink", site.superlink, "--root-certificates", str(site.certificate)),
        *("--auth-supernode-private-key", str(site.key)),
        *("--port", str(site.port), "--node-config", site.node_config),
    ]


def superlink_arguments(server: ServerFolder) -> list[str]:
    """Return the flags of `flower-superlink`."""
    return [
        *("--host", server.host, "--port", str(server.port), "--enable-supernode-auth"),
        *("--ssl-ca-certfile", str(server.authority), "--ssl-certfile", str(server.certificate)),
        *("--ssl-keyfile", str(server.key), "--database", str(server.database)),
    ]


def run_site(site: SiteFolder) -> None:
    """Run the site's node until SIGTERM or Ctrl-C. It takes the apps that were pinned, and no other."""
    digests = site.digests()
    if not digests:
        raise ConfigError(
            f"{site.apps} names no app, so that there is nothing to run; read the app and pin it: fedspa site pin "
            f"{site.path} APP"
        )
    if not site.ledger.exists():
        raise ConfigError(f"{site.ledger} is missing; put it back: it is made once, by `fedspa site new`")
    _check_port("127.0.0.1", site.port, f"set another port in {site.path}/site.toml")
    _enter(site.path)
    from flwr.supernode.cli import flower_supernode

    pin(frozenset(digests))
    send_leftovers_first()
    sys.argv = ["flower-supernode", *node_arguments(site)]
    flower_supernode()


def run_server(server: ServerFolder) -> None:
    """Run the SuperLink until SIGTERM or Ctrl-C."""
    _check_port(server.host, server.port, f"set another port in {server.path}/server.toml")
    _enter(server.path)
    server.runs.mkdir(exist_ok=True)
    from flwr.superlink.cli import flower_superlink

    sys.argv = ["flower-superlink", *superlink_arguments(server)]
    flower_superlink()


def _check_port(host: str, port: int, fix: str) -> None:
    """Raise where another process listens on the port: Flower's own error would name neither port nor file."""
    try:
        socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError as error:
        why = error.strerror or str(error)
        if error.errno == errno.EADDRINUSE:
            why = "it is running already, or another program has the port"
        raise ConfigError(f"port {port} of {host} cannot be used: {why}; {fix}") from None


def flwr(server: ServerFolder, *arguments: str) -> str:
    """Return what a `flwr` command that talks to this server prints; a FedspaError with its message where it fails."""
    home = server.path / "flwr"
    with os_errors_as(FedspaError, str(home), "make the server's folder writable"):
        home.mkdir(exist_ok=True)
        config = home / "config.toml"
        # Made anew each time: the folder may have been moved, or be mounted elsewhere.
        authority = json.dumps(str(server.authority))
        text = f'[superlink.{NAME}]\naddress = "{server.address}"\nroot-certificates = {authority}\n'
        if not config.exists() or config.read_text("utf-8") != text:
            config.write_text(text, "utf-8")
    own = environment(server.path) | {"FLWR_HOME": str(home)}
    program = shutil.which("flwr", path=own["PATH"])
    if program is None:
        raise ConfigError("there is no flwr beside this Python; pip install 'fedspa[flower]'")
    try:
        done = subprocess.run(
            [program, *arguments], env=own, cwd=server.path, capture_output=True, text=True, timeout=_SECONDS
        )
    except subprocess.TimeoutExpired:
        raise FedspaError(
            f"flwr {arguments[0]} had no answer within {_SECONDS} s; see whether the SuperLink is healthy: fedspa "
            f"server status {server.path}"
        ) from None
    if done.returncode != 0:
        said = " ".join((done.stdout + done.stderr).translate(_FRAME).split())
        raise FedspaError(f"flwr {arguments[0]} failed: {said[-600:]}")
    return done.stdout


def _enter(folder: Path) -> None:
    """Change to the folder, in which functions of its owner are found, and set the environment for Flower."""
    with os_errors_as(ConfigError, str(folder)):
        os.chdir(folder)
    os.environ.update(environment(folder))


TESTED = "1.42.0"  # the newest Flower that the tests ran with


def pin(allowed: frozenset[str]) -> None:
    """Have a SuperNode of this process take an app only if its content has one of these digests."""
    from flwr.supernode import start_client_internal as internal

    pull: Callable[..., int | None] = internal._pull_and_store_message
    asked = tuple(inspect.signature(getattr(internal, "_verify_fab", pull)).parameters)
    if (
        not {"get_fab", "trusted_entities"} <= set(inspect.signature(pull).parameters)
        or "_verify_fab" not in pull.__code__.co_names
        or asked != ("fab", "trusted_entities")
    ):
        raise ConfigError(
            f"flwr {version('flwr')} checks apps in another way than the versions that fedspa knows, and a site runs "
            f"no app unchecked; install flwr {TESTED}: pip install 'flwr=={TESTED}'"
        )

    def pinned_pull(*, get_fab: Callable[[str, int], Fab], **others: Any) -> int | None:
        def get(digest: str, run: int) -> Fab:
            return replace(get_fab(digest, run), verifications={"valid_license": "pinned"})

        # Not empty: Flower then asks `_verify_fab` before it unpacks anything, and answers for us where that says no.
        return pull(get_fab=get, **(others | {"trusted_entities": {"pinned": "by digest"}}))

    def verify(fab: Fab, trusted_entities: dict[str, str]) -> bool:
        return hashlib.sha256(fab.content).hexdigest() in allowed

    flower: Any = internal
    flower._pull_and_store_message, flower._verify_fab = pinned_pull, verify


def send_leftovers_first() -> None:
    """Have Flower's loop send the replies that it has before it asks for another message.

    The loop sends only after it has received, and takes any reply for the one it waits for: a node that still has a
    reply for a run that ended (a SuperLink that was restarted) would send every later reply one message late, so that
    its updates are paid for and never in time.
    """
    from flwr.supernode import start_client_internal as internal

    pull: Callable[..., int | None] = internal._pull_and_store_message

    def pull_or_send(*, state: Any, **others: Any) -> int | None:
        # The number of a run that nobody has: not None, which would mean that there is nothing to send.
        entries = list(state.msg_store.values())
        unsent = any(entry.message.metadata.reply_to_message_id and not entry.is_retrieved for entry in entries)
        return 0 if unsent else pull(state=state, **others)

    flower: Any = internal
    flower._pull_and_store_message = pull_or_send


def digest_of(app: Path) -> str:
    """Return the digest of an app as it is shipped: of its folder, or of a bundle that `flwr build` made."""
    from click import ClickException
    from flwr.cli.build import build_fab_from_disk
    from flwr.cli.config_utils import load_and_validate

    with os_errors_as(ConfigError, str(app), "name the folder of an app, or its .fab"):
        if app.is_file():
            if not zipfile.is_zipfile(app):
                raise ConfigError(
                    f"{app} is no Flower app: not a bundle that `flwr build` made; name the folder, or its .fab"
                )
            return hashlib.sha256(app.read_bytes()).hexdigest()
        try:
            load_and_validate(real_path(app) / "pyproject.toml")
            return hashlib.sha256(build_fab_from_disk(app)).hexdigest()
        except (ValueError, ClickException) as error:
            raise ConfigError(f"{app} is no Flower app: {' '.join(str(error).split())[:300]}") from None


_LOOK = 2.0  # seconds between two looks at a run


def register(server: ServerFolder, keys: Iterable[Path]) -> dict[str, bool]:
    """Each public key in the server's folder of nodes by its name, and whether it was new. `keys` are copied there."""
    with os_errors_as(ConfigError, str(server.nodes)):
        server.nodes.mkdir(exist_ok=True)
    for key in keys:
        target = server.nodes / key.name
        with os_errors_as(ConfigError, str(key), "give a public key, as node.key.pub"):
            if not target.exists():
                shutil.copyfile(key, target)
            elif target.read_bytes() != key.read_bytes():
                raise ConfigError(f"{target} exists already with another key; give this one another name, as NAME.pub")
    found = sorted(server.nodes.glob("*.pub"))
    if not found:
        raise ConfigError(f"{server.nodes} has no public key; put each site's node.key.pub there, as north.pub")
    done = {}
    for path in found:
        try:
            flwr(server, "supernode", "register", str(path), NAME)
            done[path.stem] = True
        except FedspaError as error:
            if "already in use" not in str(error):
                raise
            done[path.stem] = False
    return done


def train(
    server: ServerFolder, app: Path, config: str, name: str | None, follow: Callable[[Path], None]
) -> tuple[bool, str]:
    """Return whether a run of the app in folder `app` was completed, and what came of it in one line. `follow` is
    called with the run's folder every two seconds."""
    _check_keys(app, config)
    out = server.runs / (name or datetime.now(UTC).strftime("%Y%m%d-%H%M%S"))
    resumed = "flower.resume=true" in config.replace(" ", "")
    if out.exists() and not resumed:
        raise ConfigError(f"{out} is there already; take another --name, or resume it: -c 'flower.resume=true'")
    if "run.out" in config:
        raise ConfigError("run.out stands in the config; the server keeps its runs in runs/: give --name instead")
    words = f"{config} run.out={json.dumps(str(out))}".strip()
    answer = _answer(server, "run", str(real_path(app)), NAME, "-c", words)
    if not answer.get("success"):
        why = " ".join(str(answer.get("error-message", answer)).split())
        raise FedspaError(
            f"the run was not taken: {why}; give the folder of a Flower app, and see `fedspa server status`"
        )
    number = str(answer["run-id"])
    while not (status := _status(server, number)).startswith("finished"):
        follow(out)
        time.sleep(_LOOK)
    follow(out)
    if status == "finished:completed" and (out / "summary.json").exists():
        return True, f"run {number}: completed; see {out}, or `fedspa report {out}`"
    return False, f"run {number}: {status}; {_last_words(server, number)}"


def _check_keys(app: Path, config: str) -> None:
    """Raise where `config` overrides a key that the app's own config does not have: Flower takes no other."""
    path = real_path(app) / "pyproject.toml"
    found: Any = toml.read(path, "the pyproject.toml of a Flower app")
    for part in ("tool", "flwr", "app", "config"):
        found = found.get(part) if isinstance(found, dict) else None
    known = set(_flat_keys(found)) if isinstance(found, dict) else set()
    for key in re.findall(r"(?:^|\s)([\w.-]+)\s*=", config):
        if key not in known:
            raise ConfigError(
                f"{key} is no key of [tool.flwr.app.config] in {path}{did_you_mean(key, known)}; add it there with its "
                "value, or name one of its keys"
            )


def _flat_keys(table: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _flat_keys(value, f"{prefix}{key}.")
        else:
            yield prefix + key


def _status(server: ServerFolder, number: str) -> str:
    listed = _answer(server, "list", NAME, "--run-id", number)
    return str(listed["runs"][0]["status"])


def _answer(server: ServerFolder, *arguments: str) -> Any:
    """Return what a `flwr` command answers a program."""
    said = flwr(server, *arguments, "--format", "json")
    try:
        return json.loads(said)
    except ValueError:
        raise FedspaError(
            f"flwr {arguments[0]} answered {quoted(said)}, which is no JSON; `fedspa doctor` names the flwr to use"
        ) from None


def _last_words(server: ServerFolder, number: str) -> str:
    """Return the reason for a run's end that its app logged."""
    lines = flwr(server, "log", number, NAME, "--show").splitlines()
    said = [line.partition("Error: ")[2] for line in lines if "Error: " in line]
    return said[-1] if said else "see the server's log"
