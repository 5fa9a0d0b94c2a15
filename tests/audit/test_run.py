"""The audit's result, its runner and its command line."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from fedspa.audit.audited import Audited, Setting, of_config
from fedspa.audit.gaussian import GAUSSIAN
from fedspa.audit.probes import part_question
from fedspa.audit.statistics import Check, Finding, Question, Report, certain
from fedspa.cli import app
from fedspa.data import dataset
from fedspa.data.columns import checked
from fedspa.learning.tasks.totals import Block, Layout


def _check(name, unit, claimed, seen, holds=True, confidence=0.99):
    return Check(name, unit, claimed, seen, confidence, holds, "")


def test_headline_is_the_nearest_attack_while_all_hold():
    report = Report(
        (
            _check("pair", "mu", 1.0, 1.0, confidence=1.0),
            _check("far", "epsilon", 2.0, 0.1),
            _check("near", "mu", 1.0, 0.9),
            _check("shape", "deviation", 1.0, 0.99),
        ),
        1e-4,
    )
    assert report.holds
    assert report.headline.name == "near"


def test_headline_is_a_breach_before_a_departure():
    report = Report(
        (
            _check("shape", "deviation", 1.0, 50.0, holds=False),
            _check("breach", "mu", 1.0, 1.2, holds=False),
            _check("near", "mu", 1.0, 0.9),
        ),
        1e-4,
    )
    assert not report.holds
    assert report.headline.name == "breach"


def test_a_count_above_a_claim_of_zero_is_the_worst_there_is():
    report = Report((_check("a", "count", 0.0, 1.0, holds=False), _check("b", "deviation", 1.0, 9.0, holds=False)), 0.1)
    assert report.headline.name == "a"


def test_json_has_the_four_figures_and_the_checks():
    report = Report((_check("near", "mu", 1.0, 0.9),), 1e-4, ("a note",))
    parsed = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert parsed["claimed"] == 1.0
    assert parsed["lower_bound"] == 0.9
    assert parsed["confidence"] == 0.99
    assert parsed["holds"] is True
    assert parsed["notes"] == ["a note"]
    assert set(parsed["checks"][0]) >= {"name", "claimed", "lower_bound", "confidence", "holds", "detail"}


def _audit(*arguments):
    return CliRunner().invoke(app, ["audit", "--draws", "300", *arguments])


def test_an_audit_of_recovery_says_that_its_exchanges_are_not_attacked():
    sums = ["privacy.adversary=secure-aggregation", "privacy.members=8", "algorithm.mask=shared"]
    sums += ["algorithm.local_steps=1", "algorithm.batch=144"]
    _, _, plain = of_config(None, sums, 100, 0)
    mechanism, target, recovered = of_config(None, [*sums, "privacy.recovery=true"], 100, 0)
    assert plain.notes == ()
    (note,) = mechanism.audit(recovered, target).notes
    assert "not on its exchanges" in note


def test_a_configs_keys_can_be_set(tmp_path):
    """Of a mask by layers too: what is audited is the plan of the run."""
    path = tmp_path / "run.toml"
    path.write_text('[model]\nname = "mlp"\n[algorithm]\nmask = "fixed"\ncompression = [0, 1, 0.1, 1]\n')
    sets = ["privacy.noise_multiplier=1.5", "privacy.clip_value=0.25", 'run.engine="generic"']
    _, target, setting = of_config(path, sets, 300, 0)
    assert (target.plan.active, target.plan.dimension) == (64 + 64 + 10, 4810)
    assert (target.plan.noise_multiplier, target.plan.clip_value) == (1.5, 0.25)
    assert (setting.engine, setting.draws) == ("generic", 300)


def test_the_three_faults_of_the_self_test_are_caught():
    result = _audit("--self-test", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found.keys() == {"sensitivity", "noise", "seed"}
    assert all(each["caught"] for each in found.values())
    assert "keys" in found["seed"]["by"]


def test_a_fault_that_is_not_caught_and_a_claim_that_does_not_hold_give_exit_code_1(monkeypatch):
    harmless = replace(GAUSSIAN, questions=lambda *_: [certain("a", "count", 0.0, 0.0, "")])
    monkeypatch.setattr("fedspa.audit.gaussian.GAUSSIAN", harmless)
    result = _audit("--self-test")
    assert result.exit_code == 1
    assert result.output.count("NOT CAUGHT") == 3
    broken = replace(GAUSSIAN, questions=lambda *_: [certain("a", "mu", 1.0, 2.0, "why")])
    monkeypatch.setattr("fedspa.audit.gaussian.GAUSSIAN", broken)
    result = _audit()
    assert result.exit_code == 1
    assert result.output.startswith("VIOLATED: 1 of 1 checks failed.")
    assert "a: why" in result.output


def test_the_runner_shares_the_rate_out_by_what_questions_declare():
    asked = [
        Question("a", "deviation", lambda alpha: Finding(alpha, 0.0, ""), share=share) for share in (0.0, 1.0, 1.0, 2.0)
    ]
    report = Audited("any", dict, lambda *_: asked).audit(Setting(), {})
    assert [1 - check.confidence for check in report.checks] == pytest.approx([0, 0.25e-4, 0.25e-4, 0.5e-4], abs=1e-12)
    assert report.checks[3].claimed == 0.5e-4


# The audit of a release: what one record or person adds, held on production and with a known fault in it.

COLUMNS = {
    "age": {"kind": "number", "range": [0, 100]},
    "weight": {"kind": "number", "range": [0, 200], "missing": "indicator"},
    "seen": {"kind": "date", "range": ["2020-01-01", "2020-12-31"], "parts": ["days", "month"]},
    "ward": {"kind": "category", "categories": ["a", "b", "c"]},
}

TARGETS: dict[str, dict[str, Any]] = {
    "classes": {"ill": {"kind": "flag", "target": True}},
    "number": {"cost": {"kind": "number", "range": [0, 9], "target": True}},
    "flags": {name: {"kind": "flag", "target": True} for name in ("a", "b")},
}


def part(kind: str = "classes", unit: Any = "record", **options: Any) -> Any:
    layout = Layout.of(checked({"columns": {**COLUMNS, **TARGETS[kind]}}), options)
    return part_question(layout, unit, 3, torch.Generator().manual_seed(0)).answer(0.0)


@pytest.mark.parametrize("unit", ["record", "person"])
@pytest.mark.parametrize("kind", TARGETS)
def test_one_part_stays_within_the_bound(kind: str, unit: str) -> None:
    assert part(kind, unit).holds
    assert part(kind, unit).lower_bound > 0.5  # the extremes come near
    assert part("classes", unit, by_class=True, shares={"age": 4.0}).holds


@pytest.mark.parametrize("unit", ["record", "person"])
def test_a_range_that_is_not_enforced_is_caught(monkeypatch: pytest.MonkeyPatch, unit: str) -> None:
    honest = Block.vectors

    def unclamped(self: Block, x: Tensor, y: Tensor) -> Tensor:
        found = honest(self, x, y)
        if self.kind == "moments" and not self.of_target:
            found[:, 0] = self.weight / 2**0.5 * x[:, self.start]
        return found

    monkeypatch.setattr(Block, "vectors", unclamped)
    assert not part(unit=unit).holds


def test_a_person_who_is_counted_twice_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = dataset.grouped

    def twice(x: Any, y: Any, of: Any, most: int, draws: Any) -> Any:
        return honest(x, y, 2 * of + np.arange(len(of)) % 2, most, draws)

    monkeypatch.setattr(dataset, "grouped", twice)
    assert not part(unit="person").holds
