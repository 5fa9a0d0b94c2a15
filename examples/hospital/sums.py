"""The same clinics under secure aggregation: the server reads sums only, and each adds a share of the noise.

    python sums.py [FOLDER]

Makes what run.py makes in FOLDER (default: ./deployment-sums), and for each site a key and the roster of all. Trains
while a site is killed and comes back, offers a run that the sites' policies refuse, shows every ledger, and stops all.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from hospital.records import PER_SITE, SITES
from loopback import BIN, Deployment
from run import HERE, POLICY, clock, fresh, lines, set_up, wait_for_rounds

from fedspa.privacy.event import shown

# The noise of two sites must count, and what is left if all others are with the server is capped, too.
TRUST = POLICY + "min_honest = 2\nmax_worst_case = 15.0\n"
# One step on all records of a site, and one mask for all: sums are over the same coordinates.
SUMS: dict[str, Any] = {
    "federation.rounds": 8,
    "algorithm.mask": "shared",
    "algorithm.local_steps": 1,
    "algorithm.batch": PER_SITE,
    "algorithm.local_lr": 4.0,
    "privacy.epsilon": 1.0,
    "privacy.adversary": "secure-aggregation",
    "privacy.members": 2,
    "flower.quorum": "",
    "flower.round_timeout": 60.0,
}


def main(folder: Path) -> None:
    say = clock()
    with Deployment(folder) as deployment:
        deployment.start_superlink()
        join(deployment)
        say("each site has a key, and all have the same roster")
        for site in SITES:
            deployment.start_node(site)

        out, config = folder / "first", SUMS | {"flower.roster": str(folder / "roster.toml")}
        run = deployment.submit(HERE, config | {"run.out": str(out)})
        wait_for_rounds(out, 2)
        deployment.kill("south")
        say("south is killed while a round is under way: that round gives no sum, and the others go on as two")
        deployment.start_node_when_allowed("south")
        say("south is back")
        say(f"first run: {deployment.wait(run, 300)['status']}; {reached(out)}")

        out = folder / "second"
        lax = config | {"run.out": str(out), "privacy.colluders": 1, "flower.start_timeout": 30.0}
        run = deployment.submit(HERE, lax)
        say(f"second run, which counts on the noise of one site: {deployment.wait(run, 120)['status']}")
        say(f"  {said(deployment.output(run))}; {lines(out / 'asked.jsonl')} questions were asked")

        for site in SITES:
            say(f"{site}:")
            subprocess.run([BIN / "fedspa", "site", "ledger", folder / site], check=True)
    say("everything is stopped")


def join(deployment: Deployment) -> None:
    """What the sites' people would do together, once: a key each, and one roster for all."""
    folder, roster = deployment.folder, "[members]\n"
    keys = {site: folder / f"{site}.key" for site in SITES}
    for site in SITES:
        made = deployment.fedspa("site", "keygen", keys[site])
        roster += f'{site} = "{made.split()[2]}"\n'  # the public half; people compare fingerprints by telephone
    (folder / "roster.toml").write_text(roster)  # the server's copy
    for site in SITES:
        own = folder / f"{site}-roster.toml"
        own.write_text(roster)
        deployment.fedspa("site", "roster", own, "--key", keys[site], "--name", site)
        set_up(deployment, site, TRUST, key=keys[site], roster=own)


def reached(out: Path) -> str:
    summary: dict[str, Any] = json.loads((out / "summary.json").read_text())
    sums = [json.loads(line)["agents"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    return (
        f"accuracy {summary['accuracy_last']:.3f}, ε ≤ {shown(summary['epsilon'])} against the server and "
        f"{shown(summary['epsilon_worst_case'])} against all others together, "
        f"sums over {', '.join(map(str, sums))} sites, "
        f"dropped: {summary['dropped'] or 'nothing'}"
    )


def said(output: str) -> str:
    """The server's last word on why it ended."""
    return next(line for line in reversed(output.splitlines()) if "FedspaError" in line).partition("FedspaError: ")[2]


if __name__ == "__main__":
    main(fresh(sys.argv[1] if len(sys.argv) > 1 else "deployment-sums"))
