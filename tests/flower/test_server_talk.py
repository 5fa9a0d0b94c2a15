"""What the server's people are told where `flwr` fails, hangs or answers something else: one line, no traceback."""

from __future__ import annotations

import pytest

pytest.importorskip("flwr", reason="needs the extra: pip install 'fedspa[flower]'")

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedspa.errors import FedspaError
from fedspa.flower.operate import folders, runs, start

Flwr = Callable[[int, str], None]


@pytest.fixture
def server(tmp_path: Path) -> folders.ServerFolder:
    files = {key: tmp_path / key for key in ("authority", "certificate", "key", "database", "nodes", "runs")}
    files["nodes"].mkdir()
    (files["nodes"] / "north.pub").write_text("ecdsa-sha2-nistp384 AAAA")
    return folders.ServerFolder(tmp_path, "0.0.0.0", 8443, **files)


@pytest.fixture
def flwr(monkeypatch: pytest.MonkeyPatch) -> Flwr:
    """Has every `flwr` command end with this code and these words."""

    def ends(code: int, said: str) -> None:
        done = subprocess.CompletedProcess([], code, said, "")
        monkeypatch.setattr(start.subprocess, "run", lambda *_, **__: done)

    return ends


def test_words_stand_without_the_frame_around_them(server: folders.ServerFolder, flwr: Flwr) -> None:
    flwr(1, "╭─ Error ──╮\n│ The SuperLink │\n│ is away. │\n╰──────────╯\n")
    with pytest.raises(FedspaError, match=r"^flwr supernode failed: Error The SuperLink is away\.$"):
        runs.register(server, [])


def test_a_superlink_that_never_answers(server: folders.ServerFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    def hangs(words: list[str], *, timeout: float, **_: Any) -> None:
        raise subprocess.TimeoutExpired(words, timeout)

    monkeypatch.setattr(start.subprocess, "run", hangs)
    with pytest.raises(FedspaError, match=r"flwr supernode had no answer within 300 s; .* fedspa server status"):
        runs.register(server, [])


def test_an_answer_that_is_none(server: folders.ServerFolder, flwr: Flwr) -> None:
    flwr(0, "Welcome to another Flower\n")
    with pytest.raises(FedspaError, match=r"flwr run answered 'Welcome to another Flower.*', which is no JSON"):
        runs.train(server, server.path, "", None)
