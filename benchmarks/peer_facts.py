"""What docs/limits.md says of other projects, read again from their code: which lines still hold.

    pip download --no-deps --dest FOLDER flwr==1.42.0 opacus==1.6.0 pfl==0.6.0 nvflare==2.9.0 fedbiomed==6.4.1
    python benchmarks/peer_facts.py FOLDER

FOLDER has the packages' wheels; a checkout of a repository there, under the project's name, serves as well. Each fact
is a pattern that some file has, or that no file has. Exit code 1: a fact does not hold, or a package is of another
version.
"""

from __future__ import annotations

import argparse
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

# As the headings of docs/limits.md have them; the README leaves out a last zero.
VERSIONS = {
    "flwr": "1.42.0",
    "opacus": "1.6.0",
    "pfl": "0.6.0",
    "fl4health": "0.4.2",
    "nvflare": "2.9.0",
    "fedbiomed": "6.4.1",
    "jax_privacy": "2.2",
}


class Fact(NamedTuple):
    """`pattern` stands in some file whose path matches `files`; in none of them where it is not `found`."""

    project: str
    says: str
    files: str
    pattern: str
    found: bool = True


FACTS = (
    Fact(
        "flwr", "RDP over rounds", r"privacy_accounting/rdp_accountant\.py", r"class RdpPrivacyAccountant|class \w*Rdp"
    ),
    Fact("flwr", "a limit on ε", r"strategy/dp_fixed_clipping\.py", r"raise PrivacyBudgetExhausted"),
    Fact("flwr", "no amplification", r"strategy/dp_fixed_clipping\.py", r"is not SamplingMethod\.NO_AMPLIFICATION"),
    Fact("flwr", "no ε for adaptive clipping", r"strategy/dp_adaptive_clipping\.py", r"accountant", False),
    Fact("flwr", "one release in LocalDpMod", r"mod/localdp_mod\.py", r"self\.sensitivity = sensitivity"),
    Fact("flwr", "no budget of a client's own", r"/clientapp/", r"privacy_accounting|max_epsilon", False),
    Fact("flwr", "NumPy's generator", r"supercore/differential_privacy\.py", r"np\.random\.normal"),
    Fact(
        "opacus", "RDP, PRV, GDP", r"accountants/__init__\.py", r"(?s)(?=.*GaussianAccountant)(?=.*PRVAcc)(?=.*RDPAcc)"
    ),
    Fact("opacus", "secure_mode", r"opacus/privacy_engine\.py", r"secure_mode: bool"),
    Fact(
        "pfl", "PLD, PRV, RDP", r"privacy/privacy_accountant\.py", r"(?s)(?=.*class PLD)(?=.*class PRV)(?=.*class RDP)"
    ),
    Fact(
        "fl4health", "RDP over clients and records", r"privacy/fl_accountants\.py", r"class FlInstanceLevelAccountant"
    ),
    Fact("fl4health", "sparse uploads", r"sparse_coo_parameter_exchanger\.py", r"class SparseCooParameterExchanger"),
    Fact("nvflare", "sum of ε", r"filters/svt_privacy\.py", r"self\._privacy_spent \+= "),
    Fact("nvflare", "reset at each start", r"filters/svt_privacy\.py", r"(?s)START_RUN.{0,80}_reset_accountant"),
    Fact("nvflare", "no limit on ε", r"filters/svt_privacy\.py", r"max_epsilon|budget.{0,20}exceed", False),
    Fact(
        "fedbiomed",
        "ε is never read",
        r"privacy/_dp_controller\.py",
        r"_assess_budget_locally.*\n.*\n+.*TODO: This function",
    ),
    Fact("jax_privacy", "accounting by dp_accounting", r"jax_privacy/accounting\.py", r"dp_accounting"),
    Fact("jax_privacy", "canary scores", r"jax_privacy/auditing\.py", r"class CanaryScoreAuditor"),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="with wheels or checkouts of the projects")
    lines, good = check(parser.parse_args().folder)
    print("\n".join(lines))
    return 0 if good else 1


def check(folder: Path) -> tuple[list[str], bool]:
    """A line for each fact, and whether all that could be read hold."""
    lines, good = [], True
    for project, version in VERSIONS.items():
        source = sources(folder, project)
        if source is None:
            lines.append(f"{project:12} not there")
            continue
        name, texts = source
        if f"-{version}" not in name and name != project:
            lines.append(f"{project:12} {name} is not the version {version} of the page")
            good = False
        for fact in FACTS:
            if fact.project == project:
                right = holds(fact, texts)
                lines.append(f"{project:12} {'holds' if right else 'DOES NOT HOLD':14} {fact.says}")
                good &= right
    return lines, good


def holds(fact: Fact, texts: Mapping[str, str]) -> bool:
    read = [text for path, text in texts.items() if re.search(fact.files, path)]
    return bool(read) and any(re.search(fact.pattern, text) for text in read) is fact.found


def sources(folder: Path, project: str) -> tuple[str, dict[str, str]] | None:
    """The name of the project's wheel or checkout in `folder`, and its Python files."""
    if (checkout := folder / project).is_dir():
        paths = sorted(checkout.rglob("*.py"))
        return project, {f"/{path.relative_to(checkout).as_posix()}": path.read_text("utf-8") for path in paths}
    for wheel in sorted(folder.glob(f"{project}-*.whl")):
        with zipfile.ZipFile(wheel) as packed:
            names = [name for name in packed.namelist() if name.endswith(".py")]
            return wheel.name, {f"/{name}": packed.read(name).decode("utf-8") for name in names}
    return None


if __name__ == "__main__":
    raise SystemExit(main())
