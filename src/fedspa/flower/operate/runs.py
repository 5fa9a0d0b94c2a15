"""What the server's people ask of a running SuperLink: to take nodes, and to train with them."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from fedspa.errors import ConfigError, FedspaError, quoted, real_path, worded
from fedspa.flower.operate.folders import ServerFolder
from fedspa.flower.operate.start import NAME, flwr

_LOOK = 2.0  # seconds between two looks at a run


def register(server: ServerFolder, keys: Iterable[Path]) -> dict[str, bool]:
    """Each public key in the server's folder of nodes by its name, and whether it was new. `keys` are copied there."""
    with worded(ConfigError, lambda why: f"{server.nodes}: {why}"):
        server.nodes.mkdir(exist_ok=True)
    for key in keys:
        target = server.nodes / key.name
        with worded(ConfigError, partial("{}: {}; give a public key, as node.key.pub".format, key)):
            if not target.exists():
                shutil.copyfile(key, target)
            elif target.read_bytes() != key.read_bytes():
                raise ConfigError(f"{target} is there with another key; name this one otherwise, as NAME.pub")
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


def train(server: ServerFolder, app: Path, config: str, name: str | None) -> tuple[bool, str]:
    """Whether a run of the app in folder `app` was completed, and what came of it in one line."""
    out = server.runs / (name or datetime.now(UTC).strftime("%Y%m%d-%H%M%S"))
    resumed = "flower.resume=true" in config.replace(" ", "")
    if out.exists() and not resumed:
        raise ConfigError(f"{out} is there already; take another --name, or go on with it: -c 'flower.resume=true'")
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
        time.sleep(_LOOK)
    if status == "finished:completed" and (out / "summary.json").exists():
        return True, f"run {number}: completed; see {out}, or `fedspa report {out}`"
    return False, f"run {number}: {status}; {_last_words(server, number)}"


def _status(server: ServerFolder, number: str) -> str:
    listed = _answer(server, "list", NAME, "--run-id", number)
    return str(listed["runs"][0]["status"])


def _answer(server: ServerFolder, *arguments: str) -> Any:
    """What a `flwr` command answers a program."""
    said = flwr(server, *arguments, "--format", "json")
    try:
        return json.loads(said)
    except ValueError:
        raise FedspaError(
            f"flwr {arguments[0]} answered {quoted(said)}, which is no JSON; `fedspa doctor` names the flwr to use"
        ) from None


def _last_words(server: ServerFolder, number: str) -> str:
    """Why a run ended, as its app said."""
    lines = flwr(server, "log", number, NAME, "--show").splitlines()
    said = [line.partition("Error: ")[2] for line in lines if "Error: " in line]
    return said[-1] if said else "see the server's log"
