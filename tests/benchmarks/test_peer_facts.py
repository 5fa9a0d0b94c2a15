"""What docs/peers.md says of other projects can be read again, and a line that no longer holds is named."""

from __future__ import annotations

import re
import zipfile
from pathlib import Path

import peer_facts

ROOT = Path(__file__).parents[2]


def wheel(folder: Path, version: str, **files: str) -> None:
    with zipfile.ZipFile(folder / f"nvflare-{version}-py3-none-any.whl", "w") as packed:
        for name, text in files.items():
            packed.writestr(f"nvflare/app_common/filters/{name}.py", text)


SUMS = "if event == START_RUN:\n    self._reset_accountant()\nself._privacy_spent += epsilon\n"


def test_facts_are_read_from_wheels_and_checkouts(tmp_path: Path) -> None:
    wheel(tmp_path, peer_facts.VERSIONS["nvflare"], svt_privacy=SUMS)
    lines, good = peer_facts.check(tmp_path)
    assert good
    assert sum("not there" in line for line in lines) == len(peer_facts.VERSIONS) - 1
    (tmp_path / "jax_privacy/jax_privacy").mkdir(parents=True)
    (tmp_path / "jax_privacy/jax_privacy/accounting.py").write_text("import dp_accounting")
    lines, good = peer_facts.check(tmp_path)
    assert not good
    assert [line for line in lines if "NOT HOLD" in line] == ["jax_privacy  DOES NOT HOLD  canary scores"]


def test_what_no_longer_holds_is_named(tmp_path: Path) -> None:
    """What the page says is missing has come, or its file is gone: no fact holds by default."""
    wheel(tmp_path, "2.9.0", svt_privacy=SUMS + "max_epsilon = 1")
    lines, good = peer_facts.check(tmp_path)
    assert not good
    assert "nvflare      DOES NOT HOLD  no limit on ε" in lines
    wheel(tmp_path, "2.9.0", other="")
    lines, good = peer_facts.check(tmp_path)
    assert sum("NOT HOLD" in line for line in lines) == 3


def test_another_version_is_named(tmp_path: Path) -> None:
    wheel(tmp_path, "3.0.0", svt_privacy=SUMS)
    lines, good = peer_facts.check(tmp_path)
    assert not good
    assert "is not the version 2.9.0 of the page" in lines[4]


def test_the_pages_have_the_versions_that_were_read() -> None:
    page, readme = ((ROOT / name).read_text("utf-8") for name in ("docs/peers.md", "README.md"))
    (heading,) = re.findall(r"^\| \| fedspa 0\.1 \|.*", page, re.M)
    assert re.findall(r"\d+(?:\.\d+)+", heading)[1:] == list(peer_facts.VERSIONS.values())
    (short,) = re.findall(r"^\| \| fedspa \|.*", readme, re.M)
    for number in re.findall(r"\d+(?:\.\d+)+", short):
        assert number in {version.removesuffix(".0") for version in peer_facts.VERSIONS.values()}
