"""`fedspa suggest`: numbers from numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import fedspa
from fedspa.cli import app
from fedspa.errors import ConfigError
from fedspa.mechanisms.gaussian.event import GaussianEvent
from fedspa.privacy.accounting import epsilon
from fedspa.tuning.suggest import suggest


def test_its_noise_keeps_epsilon_and_no_less_would() -> None:
    found = suggest(100, 600, 3930, 1.0, delta=1e-3, rounds=45)
    assert found.participations == 5

    def cost(noise: float) -> float:
        event = GaussianEvent("poisson", 600, 600, 1, noise)
        return epsilon({event: found.participations}, 1e-3, neighbours="add-remove")

    assert cost(found.noise_multiplier) <= 1.0 < cost(found.noise_multiplier * 0.999)


def test_sparsity_changes_bytes_and_neither_noise_nor_walk() -> None:
    whole, sparse = (suggest(100, 600, 3930, 1.0, compression=p) for p in (1.0, 0.05))
    assert sparse.noise_to_signal == whole.noise_to_signal
    assert sparse.upload_bytes < whole.upload_bytes / 5
    moved = [
        found.settings["algorithm.server_lr"] * found.settings["privacy.clip_value"] * p**0.5
        for found, p in ((whole, 1.0), (sparse, 0.05))
    ]
    assert moved[0] == pytest.approx(moved[1], rel=0.02)


def test_it_can_be_run_and_its_bytes_are_those_of_the_run(tmp_path: Path) -> None:
    found = suggest(10, 144, 650, 2.0, delta=1e-3, compression=0.2)
    settings = [f"{key}={json.dumps(value)}" for key, value in found.settings.items()]
    config = fedspa.load(
        {"privacy": {"noise": "seeded"}, "run": {"out": str(tmp_path / "run"), "threads": 1}}, settings
    )
    summary = fedspa.run(config).summary
    assert summary["noise_multiplier"] == found.noise_multiplier
    assert summary["dimension"] == found.dimension
    assert summary["payload_bytes"] == pytest.approx(found.upload_bytes, rel=0.1)
    assert summary["accuracy_last"] > 0.7


@pytest.mark.parametrize(
    ("asked", "word"), [(0.01, "nothing can be learned"), (1000.0, "hardly anything is protected"), (1.0, None)]
)
def test_it_warns_where_nothing_is_learned_or_protected(asked: float, word: str | None) -> None:
    found = suggest(10, 600, 3930, asked).warnings
    assert len(found) == (word is not None)
    assert word is None or found[0].startswith(word)


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({"agents": 0}, "--agents is 0"),
        ({"delta": 0.1}, "--delta is 0.1"),
        ({"compression": 2.0}, "--compression is 2"),
        ({"per_round": 11}, "--per-round is 11"),
    ],
)
def test_bad_numbers(given: dict[str, Any], word: str) -> None:
    numbers: dict[str, Any] = {"agents": 10, "records": 100, "dimension": 50, "epsilon": 1.0, **given}
    with pytest.raises(ConfigError, match=word):
        suggest(**numbers)


def test_on_the_command_line() -> None:
    words = ["suggest", "--agents", "10", "--records", "144", "--shape", "64", "--epsilon", "2"]
    shown = CliRunner().invoke(app, words).stdout
    assert "[algorithm]" in shown
    assert "Parameters  650" in shown
    told = json.loads(CliRunner().invoke(app, [*words, "--json"]).stdout)
    assert told["dimension"] == 650
    assert told["settings"]["algorithm.batch"] == 144
    refused = CliRunner().invoke(app, ["suggest", "--agents", "10", "--records", "144", "--epsilon", "2"])
    assert "--shape is missing" in str(refused.exception)
    cnn = CliRunner().invoke(app, [*words[:5], "--model", "mnist-cnn", "--epsilon", "2", "--json"])
    assert json.loads(cnn.stdout)["dimension"] == 21_840
