"""What a thief of a site's disk, or of the server's, finds there beside the records themselves (SECURITY.md)."""

from __future__ import annotations

import pytest

pytest.importorskip("flwr", reason="needs the extra: pip install 'fedspa[flower]'")

import sqlite3
from pathlib import Path

import numpy as np

from fedspa.randomness import streams


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_no_key_of_the_noise_is_on_a_sites_disk(deployment, train, tmp_path, monkeypatch):
    drawn: list[bytes] = []
    urandom = streams.os.urandom

    def recorded(count: int) -> bytes:
        drawn.append(urandom(count))
        return drawn[-1]

    monkeypatch.setattr(streams.os, "urandom", recorded)
    train(deployment, federation__rounds=2)
    keys = [key for key in drawn if len(key) == streams.KEY_BYTES]
    keys += [streams.derive_key(key, label) for key in keys for label in ("noise", "sampling")]
    found = files(tmp_path)
    assert len(keys) >= 4 * 2
    assert {"site-0/ledger.sqlite", "run/summary.json"} <= found.keys()
    assert any("outbox" in name for name in found)
    for name, content in found.items():
        assert not any(key in content or key.hex().encode() in content for key in keys), name


def test_a_ledger_holds_no_data_gradient_or_model(deployment, train, tmp_path):
    """It has columns for names, events, counts, times and digests, and for nothing else."""
    train(deployment, federation__rounds=2)
    columns: set[str] = set()
    connection = sqlite3.connect(tmp_path / "site-0/ledger.sqlite")
    tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    for table in tables:
        columns |= {row[1] for row in connection.execute(f"PRAGMA table_info({table})")}
        for row in connection.execute(f"SELECT * FROM {table}"):
            assert all(value is None or isinstance(value, int) or len(value) < 500 for value in row), table
    connection.close()
    counts = {"id", "sequence", "number", "count", "entries", "known_entries", "announced", "first", "last"}
    names = {"agent", "run", "message", "event", "text", "name"}
    assert columns == {*counts, *names, "hash", "digest", "reserved_at", "released_at", "accepted_at"}
    with np.load(tmp_path / "site-0/records.npz") as held:
        rows = [row.tobytes() for row in held["x"] if np.any(row)]
    for name, content in files(tmp_path / "site-0").items():
        if not name.endswith(".npz"):
            assert not any(row in content for row in rows), name


def test_a_deployments_server_keeps_nothing_of_the_agents_records(deployment, train, tmp_path):
    """No digest of theirs either: a run after which every record of a site was replaced has the same facts."""
    from fedspa.runs.checkpoint import load_latest

    train(deployment, federation__rounds=2)
    with np.load(deployment.nodes[100]["data"]) as held:
        x, y = held["x"], held["y"]
    np.savez(deployment.nodes[100]["data"], x=1 - x, y=y[::-1])
    train(deployment, run__out=str(tmp_path / "other"))
    first, second = (load_latest(tmp_path / name / "checkpoint") for name in ("run", "other"))
    assert first is not None
    assert second is not None
    assert first.facts == second.facts
    assert first.extra.keys() == second.extra.keys()
