"""`fedspa audit` of each config of docs/accuracy.md, kept as one JSON:

python benchmarks/audits.py --data DIR --json reproduction/results/audits.json
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from accuracy import CONFIGS
from ending import ends_with_children, ran
from provenance import ROOT, stamp
from reproduction.rows import find_config


def audit(name: str, data: Path) -> dict[str, Any]:
    """Its JSON, whether the claim held or not."""
    arguments = ["--config", str(find_config(name)), "--set", f"data.dir={json.dumps(str(data.resolve()))}"]
    command = [sys.executable, "-m", "fedspa", "audit", *arguments, "--json"]
    found = ran(command, cwd=ROOT)
    if found.returncode > 1:
        raise SystemExit(found.stderr)
    report: dict[str, Any] = json.loads(found.stdout)
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of the image data")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    origin, audits = stamp(), {}
    for name in CONFIGS:
        audits[name] = audit(name, arguments.data)
        print(f"{name}: {'holds' if audits[name]['holds'] else 'does not hold'}", flush=True)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"provenance": origin, "audits": audits}, indent=1) + "\n")


if __name__ == "__main__":
    ends_with_children()
    main()
