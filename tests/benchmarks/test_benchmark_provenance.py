"""A long benchmark keeps each part, and goes on where it stopped where nothing has changed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import provenance


@pytest.mark.parametrize(
    ("commit", "settings", "again"),
    [
        ("abc", {"repeats": 1}, ["b"]),
        ("abc", {"repeats": 2}, ["a", "b"]),
        ("abcd", {"repeats": 1}, ["a", "b"]),
        ("abc+", {"repeats": 1}, ["a", "b"]),
    ],
)
def test_goes_on(tmp_path: Path, commit: str, settings: dict[str, Any], again: list[str]) -> None:
    out, measured = tmp_path / "kept.json", []

    def measure(name: str) -> int:
        measured.append(name)
        if len(measured) == 2:
            raise KeyboardInterrupt
        return len(measured)

    with pytest.raises(KeyboardInterrupt):
        provenance.in_parts("parts", "ab", measure, {"repeats": 1}, out, lambda: {"commit": "abc"})
    assert json.loads(out.read_text("utf-8"))["parts"] == {"a": 1}
    measured = ["", ""]
    document = provenance.in_parts("parts", "ab", measure, settings, out, lambda: {"commit": commit})
    assert measured[2:] == again
    assert json.loads(out.read_text("utf-8")) == document
    assert list(document["parts"]) == ["a", "b"]


def test_stamp_names_the_machine_and_the_code() -> None:
    stamp = provenance.stamp("no-such-package")
    assert stamp["hardware"]["cores"] >= 1
    assert stamp["versions"]["torch"]
    assert stamp["versions"]["no-such-package"] is None


def test_command_names_no_place_but_the_repositorys(tmp_path: Path) -> None:
    script = str(provenance.ROOT / "benchmarks" / "peers.py")
    typed = [script, "--data", str(tmp_path), "--python", str(tmp_path / "bin" / "python"), "--folder", "/dev/shm"]
    assert provenance.command(typed) == ("python benchmarks/peers.py --data DIR --python DIR/python --folder /dev/shm")
