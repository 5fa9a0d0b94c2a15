"""A third mechanism, from outside the package, goes through the audit: a record's bit in a sum with Laplace noise.

Nothing in `fedspa.audit` or the command line knows of it but the registry, into which the test puts it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats
from typer.testing import CliRunner

from fedspa.audit import targets
from fedspa.audit.bounds import epsilon_lower
from fedspa.audit.questions import columns, law_question, threshold_attack
from fedspa.audit.result import Finding, Question, certain
from fedspa.audit.run import Audited
from fedspa.audit.setting import Setting
from fedspa.cli import app
from fedspa.errors import ConfigError
from fedspa.runs import setup


@dataclass(frozen=True)
class ToyPlan:
    scale: float
    audited = "toy"


@dataclass(frozen=True)
class ToyTarget:
    """`numbers` releases of the sum `bits`, each with noise of scale `share` times the plan's."""

    plan: ToyPlan
    share: float = 1.0

    def releases(self, bits: int, setting: Setting, label: str, numbers: int) -> NDArray[np.float64]:
        uniform = setting.stream("toy", label).uniform(numbers) - 0.5
        noise = -np.sign(uniform) * np.log1p(-2 * np.abs(uniform)) * self.plan.scale * self.share
        return np.asarray(bits + noise)


def questions(setting: Setting, target: ToyTarget) -> Iterator[Question]:
    yield certain("toy: distance", "levels", 1.0, 1.0, "one bit against the other")
    silent = target.releases(0, setting, "silent", 16 * setting.draws)
    yield law_question("toy: law", stats.laplace(scale=target.plan.scale), [silent], "")
    yield columns("toy: coordinates", silent.reshape(-1, 16))
    sides = [target.releases(bit, setting, f"bit {bit}", setting.draws) for bit in (1, 0)]
    bound = partial(epsilon_lower, 0.0)
    attack = threshold_attack("toy: ε", "epsilon", 1 / target.plan.scale, sides, 1.0, bound, "threshold")
    yield replace(attack, share=2.0)


TOY = Audited(
    name="toy",
    choices={"noise": ()},
    synthetic=lambda noise=1.0: ToyTarget(ToyPlan(noise)),
    of_plan=ToyTarget,
    questions=questions,
    plants={"noise": lambda target: replace(target, share=0.5)},
)


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(targets.AUDITED, "toy", TOY)


def _audit(*arguments: str) -> tuple[int, dict[str, Any]]:
    flags = ["audit", "--draws", "2000", "--json", *arguments]
    result = CliRunner().invoke(app, flags, catch_exceptions=False)
    return result.exit_code, json.loads(result.stdout)


TOY_FLAGS = ("--algorithm", "toy", "--noise-mode", "seeded")


def test_it_holds_and_its_plant_is_caught() -> None:
    code, report = _audit(*TOY_FLAGS)
    assert (code, report["holds"]) == (0, True)
    assert (report["check"], report["unit"]) == ("toy: ε", "epsilon")
    assert 0.5 < report["lower_bound"] < report["claimed"] == 1.0
    code, report = _audit(*TOY_FLAGS, "--plant", "noise")
    assert (code, report["plant"]) == (1, "noise")
    assert {check["name"] for check in report["checks"] if not check["holds"]} == {"toy: law", "toy: ε"}


def test_the_runner_shares_the_rate_out_by_what_questions_declare() -> None:
    _, report = _audit(*TOY_FLAGS)
    chances = {check["name"]: 1 - check["confidence"] for check in report["checks"]}
    expected = {"toy: distance": 0.0, "toy: law": 0.25e-4, "toy: coordinates": 0.25e-4, "toy: ε": 0.5e-4}
    assert chances == pytest.approx(expected, abs=1e-12)


def test_it_has_its_own_choices_and_plants() -> None:
    assert _audit(*TOY_FLAGS, "--noise", "2")[1]["claimed"] == 0.5
    runner = CliRunner()
    for flags, words in (
        (("--clip", "l2"), "--clip: the audit of toy"),
        (("--plant", "clip"), "allowed for toy: noise"),
    ):
        failed = runner.invoke(app, ["audit", *TOY_FLAGS, *flags]).exception
        assert isinstance(failed, ConfigError)
        assert words in str(failed)


def test_it_is_found_by_the_plan_of_a_config(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('[privacy]\nnoise = "seeded"\nnoise_multiplier = 1\n')
    job = SimpleNamespace(plan=ToyPlan(0.5))
    monkeypatch.setattr(setup, "prepare", lambda config: job)
    code, report = _audit("--config", str(tmp_path / "run.toml"))
    assert (code, report["claimed"]) == (0, 2.0)
    assert report["notes"]
    job.plan = SimpleNamespace(audited="unheard of")
    with pytest.raises(ConfigError, match="no audit knows the mechanism"):
        _audit("--config", str(tmp_path / "run.toml"))


def test_an_audit_of_certain_questions_has_a_headline() -> None:
    only = replace(TOY, questions=lambda setting, target: [certain("a", "count", 0.0, 0.0, "")])
    report = only.audit(Setting(), ToyTarget(ToyPlan(1.0)))
    assert (report.headline.name, report.headline.confidence) == ("a", 1.0)


def test_false_alarms_of_a_whole_audit_stay_within_the_rate() -> None:
    """At a rate of 20 %: more than 116 alarms in 400 audits have a chance below 1e-5. The union bound is never reached:
    the attack's bound is seldom wrong."""
    target, repetitions = ToyTarget(ToyPlan(1.0)), 400
    audits = (
        TOY.audit(Setting("seeded", draws=100, seed=seed, false_alarm=0.2), target) for seed in range(repetitions)
    )
    alarms = sum(not report.holds for report in audits)
    assert 0 < alarms <= stats.binom.isf(1e-5, repetitions, 0.2)


def test_a_question_is_judged_at_the_chance_it_is_given() -> None:
    question = Question("a", "deviation", lambda alpha: Finding(-math.log10(alpha), 3.0, "seen"))
    assert question.answer(1e-4).holds
    assert not question.answer(1e-2).holds
    assert question.answer(1e-2).confidence == 0.99
