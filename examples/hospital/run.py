"""Three clinics train one model, each under its own budget; one of them is killed and comes back. Under four minutes.

    python run.py [FOLDER]

Makes certificates, keys, records, policies and ledgers in FOLDER (default: ./deployment), starts one SuperLink and
three SuperNodes on loopback, trains, kills a site, restarts it, trains again, shows every ledger, stops everything.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from hospital.records import SITES, of_site
from loopback import BIN, Deployment

from fedspa.privacy.event import shown

HERE = Path(__file__).resolve().parent
# What each site's records may ever pay. One run costs at most ε = 3: the west agrees to one and not to two.
CAPS = {"north": 10.0, "south": 8.0, "west": 3.5}
POLICY = """\
epsilon = {epsilon}
delta = 1e-3
neighbours = "add-remove"
min_noise_multiplier = 0.8
max_local_steps = 20
max_rounds = 30
max_compression = 1.0
clippings = ["l2"]
"""


def clock() -> Callable[[str], None]:
    """Says things with the seconds since now before them."""
    started = time.monotonic()
    return lambda text: print(f"[{time.monotonic() - started:5.1f} s] {text}", flush=True)


def main(folder: Path) -> None:
    say = clock()
    with Deployment(folder) as deployment:
        deployment.start_superlink()
        say(f"SuperLink on 127.0.0.1:{deployment.port}, TLS, authenticated nodes only")
        for site in SITES:
            set_up(deployment, site)
            deployment.start_node(site)
        say("each site has checked its folder, and runs the app that it pinned, and no other")
        say(f"three sites, with caps ε = {', '.join(f'{cap:g} ({site})' for site, cap in CAPS.items())}")

        out = folder / "first"
        run = deployment.submit(HERE, {"run.out": str(out)})
        wait_for_rounds(out, 2)
        deployment.kill("south")
        say("south is killed while a round is under way; the others go on")
        deployment.start_node_when_allowed("south")
        say("south is back, with the ledger it had")
        say(f"first run: {deployment.wait(run, 300)['status']}; {reached(out)}")

        out = folder / "second"
        run = deployment.submit(HERE, {"run.out": str(out), "federation.rounds": 3, "privacy.epsilon": 1.5})
        say(f"second run: {deployment.wait(run, 120)['status']}; {reached(out)}")

        for site in SITES:
            say(f"{site}:")
            subprocess.run([BIN / "fedspa", "ledger", "show", folder / site], check=True)
    say("everything is stopped")


def set_up(
    deployment: Deployment, site: str, limits: str = POLICY, superlink: str | None = None, **more: str | Path
) -> None:
    """What the site's own people would do, once: folder, records, policy, review of the app, check. `more` are further
    keys of its node."""
    home = deployment.new_site(site, superlink)
    x, y = of_site(site)
    np.savez(home / "records.npz", x=x, y=y)
    (home / "policy.toml").write_text(limits.format(epsilon=CAPS[site]))
    # A public number that the site will not reach: engines may then compute a Poisson batch's records together.
    keys = "max_records = 1000\n" + "".join(f"{key} = {json.dumps(str(value))}\n" for key, value in more.items())
    text = (home / "site.toml").read_text()
    (home / "site.toml").write_text(text.replace("\n[superlink]", f"{keys}\n[superlink]"))
    deployment.fedspa("site", "pin", home, HERE)
    deployment.fedspa("site", "check", home)
    deployment.register(site)


def wait_for_rounds(out: Path, rounds: int, timeout: float = 120.0) -> None:
    """Until so many rounds are done and the next one is under way."""
    end = time.monotonic() + timeout
    while lines(out / "metrics.jsonl") < rounds or lines(out / "asked.jsonl") <= rounds:
        if time.monotonic() > end:
            raise TimeoutError(f"{out}: {lines(out / 'metrics.jsonl')} rounds after {timeout:g} s")
        time.sleep(0.1)


def lines(file: Path) -> int:
    return len(file.read_text().splitlines()) if file.exists() else 0


def reached(out: Path) -> str:
    summary: dict[str, Any] = json.loads((out / "summary.json").read_text())
    return (
        f"accuracy {summary['accuracy_last']:.3f}, ε ≤ {shown(summary['epsilon'])} a site by the server's own count, "
        f"dropped: {summary['dropped'] or 'nothing'}"
    )


def fresh(name: str) -> Path:
    folder = Path(name).resolve()
    if folder.exists():
        sys.exit(f"{folder} is there already, perhaps with keys and ledgers; remove it or name another folder")
    return folder


if __name__ == "__main__":
    main(fresh(sys.argv[1] if len(sys.argv) > 1 else "deployment"))
