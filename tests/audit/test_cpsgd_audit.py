"""The audit of cpSGD: sound code passes, each planted mistake is caught by the check that is there for it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedspa.audit.cpsgd import CpsgdSetting, CpsgdTarget, audit, synthetic
from fedspa.audit.cpsgd_plants import CPSGD_PLANTS, plant
from fedspa.cli import app
from fedspa.errors import ConfigError

CAUGHT_BY = {
    "sensitivity": "pair: Δ₁, coordinate",
    "noise": "noise: law, coordinate",
    "noise-missing": "noise: law, coordinate",
    "clip": "pair: Δ∞, coordinate",
    "rounding": "rounding, coordinate",
    "seed": "keys",
    "seed-reused": "keys",
    "sampling": "sampler: rounds",
}


def setting(draws: int = 800) -> CpsgdSetting:
    """Seeded, so that the tests below are decided once and for all; one variant, to be quick."""
    full = synthetic(noise_mode="seeded", draws=draws)
    return replace(full, variants=full.variants[:1])


def test_the_real_thing_holds_in_every_variant() -> None:
    report = audit(synthetic(noise_mode="seeded", draws=200), CpsgdTarget())
    assert report.holds
    assert len(report.checks) == 3 * 7 + 4
    assert {check.name.split(",")[0] for check in report.checks} >= {"pair: Δ∞", "noise: law", "rounding", "keys"}


@pytest.mark.parametrize("name", CPSGD_PLANTS)
def test_a_planted_mistake_is_caught(name: str) -> None:
    report = audit(setting(), plant(name, CpsgdTarget()))
    failed = {check.name for check in report.checks if not check.holds}
    assert CAUGHT_BY[name] in failed


def test_every_plant_has_its_check() -> None:
    assert CAUGHT_BY.keys() == set(CPSGD_PLANTS)


def test_what_has_no_claim_is_not_audited() -> None:
    plan = setting().variants[0]
    with pytest.raises(ConfigError, match="no guarantee"):
        CpsgdSetting((replace(plan, trials=2),))
    with pytest.raises(ConfigError, match="secure aggregation"):
        CpsgdSetting((replace(plan, adversary="secure-aggregation"),))
    with pytest.raises(ConfigError, match="--draws"):
        replace(setting(), draws=10)


def test_on_the_command_line(tmp_path: Path) -> None:
    runner = CliRunner()
    result = runner.invoke(
        app, ["audit", "--algorithm", "cpsgd", "--plant", "noise", "--draws", "200", "--json"], catch_exceptions=False
    )
    assert result.exit_code == 1
    assert json.loads(result.output)["plant"] == "noise"
    (tmp_path / "run.toml").write_text(
        '[federation]\nagents = 4\nper_round = 4\nrounds = 2\n[algorithm]\nname = "cpsgd"\nlocal_steps = 1\n'
        '[privacy]\ntrials = 9000\nsampling = "fixed"\nclip = "coordinate"\nclip_value = 0.1\n'
    )
    result = runner.invoke(
        app, ["audit", "--config", str(tmp_path / "run.toml"), "--draws", "100", "--json"], catch_exceptions=False
    )
    assert result.exit_code == 0, result.output
    assert json.loads(result.output)["holds"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--algorithm", "cpsgd", "--clip", "l2"], "--clip"),
        (["--algorithm", "cpsgd", "--neighbours", "replace-one"], "--neighbours"),
        (["--algorithm", "cpsgd", "--plant", "mean"], "allowed for cpsgd"),
        (["--algorithm", "fedavg"], "--algorithm"),
    ],
)
def test_flags_that_mean_nothing_are_refused(flags: list[str], words: str) -> None:
    result = CliRunner().invoke(app, ["audit", *flags])
    assert isinstance(result.exception, ConfigError)
    assert words in str(result.exception)
