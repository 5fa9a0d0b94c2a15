"""Starting a node or the SuperLink: Flower's own programs, in this process, with the flags that the folder means."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from fedspa.errors import ConfigError, FedspaError, worded
from fedspa.flower.operate.folders import ServerFolder, SiteFolder

NAME = "fedspa"  # of the SuperLink, in the server's own Flower config
_SECONDS = 300
_FRAME = str.maketrans(dict.fromkeys("─│╭╮╰╯", " "))  # which flwr draws around its words


def environment(folder: Path) -> dict[str, str]:
    """What Flower's processes are told beside their flags: to keep their files in the folder, to ask nobody outside for
    anything, and to look for work often. What is set already stays."""
    own = {
        "FLWR_HOME": str(folder / "flwr"),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.05",
    }
    # A node starts `flower-superexec` by its name, which lies beside this Python.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    return {**own, **os.environ, "PATH": path}


def node_arguments(site: SiteFolder) -> list[str]:
    """The flags of `flower-supernode`."""
    return [
        *("--superlink", site.superlink, "--root-certificates", str(site.certificate)),
        *("--auth-supernode-private-key", str(site.key)),
        *("--port", str(site.port), "--node-config", site.node_config),
    ]


def superlink_arguments(server: ServerFolder) -> list[str]:
    """The flags of `flower-superlink`."""
    return [
        *("--host", server.host, "--port", str(server.port), "--enable-supernode-auth"),
        *("--ssl-ca-certfile", str(server.authority), "--ssl-certfile", str(server.certificate)),
        *("--ssl-keyfile", str(server.key), "--database", str(server.database)),
    ]


def run_site(site: SiteFolder) -> None:
    """Be the site's node until it is told to end. It runs the apps that were pinned, and no other."""
    digests = site.digests()
    if not digests:
        raise ConfigError(
            f"{site.apps} names no app, so that there is nothing to run; read the app and pin it: fedspa site pin "
            f"{site.path} APP"
        )
    if not site.ledger.exists():
        raise ConfigError(f"{site.ledger} is missing; put it back: it is made once, by `fedspa site new`")
    _enter(site.path)
    from fedspa.flower import supernode

    supernode.serve(frozenset(digests), node_arguments(site))


def run_server(server: ServerFolder) -> None:
    """Be the SuperLink until it is told to end."""
    _enter(server.path)
    server.runs.mkdir(exist_ok=True)
    from flwr.superlink.cli import flower_superlink

    sys.argv = ["flower-superlink", *superlink_arguments(server)]
    flower_superlink()


def flwr(server: ServerFolder, *arguments: str) -> str:
    """What a `flwr` command prints, of one that talks to this server; a FedspaError with its words where it fails."""
    home = server.path / "flwr"
    with worded(FedspaError, lambda why: f"{home}: {why}; make the server's folder writable"):
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
    """Be in the folder, where a function of its owner's own is found, with the environment for Flower."""
    with worded(ConfigError, lambda why: f"{folder}: {why}"):
        os.chdir(folder)
    os.environ.update(environment(folder))
