"""A third mechanism (`toy`) runs through the whole house, and no file of the package is touched for it."""

from __future__ import annotations

import pytest

pytest.importorskip("flwr", reason="needs the extra: pip install 'fedspa[flower]'")

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import toy
from flwr.app import ConfigRecord
from small_runs import ledger_content, small
from typer.testing import CliRunner

import fedspa
from fedspa import registry
from fedspa.agent.ledger.ledger import Ledger
from fedspa.agent.policy import Policy, PolicyRefusal
from fedspa.algorithms import Terms
from fedspa.cli import app
from fedspa.errors import ConfigError
from fedspa.flower.terms import Announcement, TermsError, from_record, to_record
from fedspa.mechanisms import event_of
from fedspa.privacy import accounting
from fedspa.privacy.budget import BY_FILTER_SO_FAR, FirstPlan, total
from fedspa.runs import config as configs
from fedspa.runs.config import load
from fedspa.runs.sections import Task
from fedspa.runs.setup import prepare

PLAN = toy.LaplacePlan(650, 0.01, 10, 200, 2, 4.0, 1e-3)
ONCE = PLAN.event.step.epsilon


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "ALGORITHMS", dict(registry.ALGORITHMS))  # what a config loads stays here
    monkeypatch.setattr(configs, "_OWN", {})


def config(out: Path, **run: Any) -> dict[str, Any]:
    return small(
        out,
        algorithm={"name": "toy:ALGORITHM", "compression": 1.0, "local_steps": 1, "local_lr": 0.01},
        privacy={"noise_multiplier": 4.0, "sampling": "fixed", "clip": "coordinate", "clip_value": 0.01},
        run=run,
    )


def test_it_runs_is_booked_and_reported(tmp_path: Path) -> None:
    shared = tmp_path / "shared.sqlite"
    result = fedspa.run(config(tmp_path / "run", ledger=str(shared)))
    summary = result.summary
    kept = {json.dumps(entry["event"], sort_keys=True, separators=(",", ":")) for entry in ledger_content(shared)}
    (event,) = map(event_of, kept)
    # Four rounds of three of six agents: two participations each.
    once, delta = event.step.epsilon, summary["delta"]
    both = (math.exp(once) / (1 + math.exp(once))) ** 2  # two answers of randomised response, both for the record
    exact = 2 * once + math.log(1 - delta / both)
    assert exact <= summary["epsilon"] <= exact * (1 + 1e-3)
    assert (summary["accountant"], summary["laplace_scale"]) == ("pld", 4.0)
    assert (summary["accountant_total"] or "").startswith(("pld (one plan)", BY_FILTER_SO_FAR))
    assert not summary["private"]  # the noise was seeded
    assert isinstance(event, toy.LaplaceEvent)
    assert len(ledger_content(shared)) == 12
    shown = CliRunner().invoke(
        app, ["ledger", "show", str(shared), "--neighbours", "replace-one", "--json"], catch_exceptions=False
    )
    assert json.loads(shown.stdout)["agents"][0]["spent"][0]["event"]["scale"] == 4.0


def test_its_events_compose_with_others_and_keep_to_a_cap(tmp_path: Path) -> None:
    registry.add("toy:ALGORITHM", toy.ALGORITHM)
    gaussian = event_of(
        '{"batch":10,"kind":"gaussian","noise_multiplier":4.0,"records":200,"sampling":"fixed","steps":3}'
    )
    both = accounting.epsilon({PLAN.event: 2, gaussian: 2}, 1e-3, neighbours="replace-one")
    apart = [accounting.epsilon({event: 2}, 5e-4, neighbours="replace-one") for event in (PLAN.event, gaussian)]
    assert accounting.epsilon({gaussian: 2}, 1e-3, neighbours="replace-one") < both < sum(apart)
    filtered = total({PLAN.event: 2, gaussian: 2}, 1e-3, "replace-one", None).epsilon
    assert filtered > accounting.epsilon({gaussian: 2}, 1e-3, neighbours="replace-one")
    whole = total({PLAN.event: 2}, 1e-3, "replace-one", FirstPlan(PLAN.event, 2)).epsilon
    assert whole <= accounting.epsilon({PLAN.event: 2}, 1e-3, neighbours="replace-one")
    limits = {"min_noise_multiplier": 1.0, "max_local_steps": 1, "max_rounds": 2, "max_compression": 1.0}
    policy = Policy(2.5 * ONCE, 1e-3, "replace-one", clippings=("coordinate",), **limits)
    with Ledger.open(tmp_path / "ledger.sqlite") as ledger:
        policy.admit(PLAN, ledger, "a", "run", "0")
        with pytest.raises(PolicyRefusal, match="too-many-rounds"):
            policy.admit(replace(PLAN, participations=3), ledger, "a", "run", "0")


def announced(**changes: Any) -> Announcement:
    seed = bytes(range(16))
    terms = Terms(0, "shared", seed, 0.01, PLAN)
    return replace(
        Announcement("0" * 32, 0, "toy:ALGORITHM", "logistic", Task(), 10, "", "int", seed, "secure", terms), **changes
    )


def test_a_site_refuses_an_algorithm_that_nothing_installed_there_offers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server's word imports nothing: only an entry point does, or what the process has loaded itself."""
    registry.add("toy:ALGORITHM", toy.ALGORITHM)
    record = to_record(announced())
    registry.ALGORITHMS.clear()
    with pytest.raises(TermsError, match="'toy:ALGORITHM', which is not installed here; available: fedspa"):
        from_record(record)
    offered = {**registry.BUILT_IN, "toy:ALGORITHM": "toy:ALGORITHM"}
    monkeypatch.setattr(registry, "offered", lambda: offered)
    assert from_record(record) == announced()


def test_a_broken_package_is_named_and_keeps_no_ledger_from_being_read(monkeypatch: pytest.MonkeyPatch) -> None:
    registry.add("toy:ALGORITHM", toy.ALGORITHM)
    broken = {**to_record(announced()), "algorithm": "toy:RECORD"}
    offered = {**registry.BUILT_IN, "toy:RECORD": "toy:RECORD"}
    monkeypatch.setattr(registry, "offered", lambda: offered)
    with pytest.raises(TermsError, match="'toy:RECORD' is installed and cannot be loaded"):
        from_record(ConfigRecord(broken))
    assert event_of(PLAN.event.to_json()) == PLAN.event


def test_who_reads_a_run_imports_nothing_of_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.name is 'toy:ALGORITHM'; it must be one of"):
        load(config(tmp_path / "run"), own_code=False)
    load(config(tmp_path / "run"))
    assert load(config(tmp_path / "run"), own_code=False).algorithm.name == "toy:ALGORITHM"


def test_its_terms_travel_and_parts_that_disagree_are_refused() -> None:
    registry.add("toy:ALGORITHM", toy.ALGORITHM)
    record = to_record(announced())
    assert from_record(record) == announced()
    for key, value in (("scale", 1e9), ("scale", 0.0), ("local_steps", 2), ("sampling", "poisson"), ("active", 3)):
        with pytest.raises(TermsError, match=key):
            from_record(ConfigRecord(dict(record) | {key: value}))


def test_its_config_is_checked_by_its_own_function(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="laplace takes"):
        load(config(tmp_path / "run"), ["privacy.sampling=poisson"])
    assert isinstance(prepare(load(config(tmp_path / "run"))).plan, toy.LaplacePlan)
    with pytest.raises(ConfigError, match=r"algorithm.name is 'unheard-of'; it must be one of 'fedspa', .* or package"):
        load(config(tmp_path / "run"), ["algorithm.name=unheard-of"])
    with pytest.raises(ConfigError, match=r"algorithm.name = 'toy:LAPLACE' is a Mechanism; it must be"):
        load(config(tmp_path / "run"), ["algorithm.name=toy:LAPLACE"])
    with pytest.raises(ConfigError, match=r"cannot import 'nowhere'"):
        load(config(tmp_path / "run"), ["algorithm.name=nowhere:LAPLACE"])


def test_the_audit_finds_it(tmp_path: Path) -> None:
    import tomli_w

    sections = config(tmp_path / "run")
    (tmp_path / "run.toml").write_text(tomli_w.dumps(sections))
    flags = ["audit", "--config", str(tmp_path / "run.toml"), "--draws", "2000", "--json"]
    result = CliRunner().invoke(app, flags, catch_exceptions=False)
    report = json.loads(result.stdout)
    assert (result.exit_code, report["holds"]) == (0, True)
    assert {check["name"] for check in report["checks"]} == {"laplace: law", "laplace: ε"}
    tested = CliRunner().invoke(app, [*flags, "--self-test"], catch_exceptions=False)
    assert json.loads(tested.stdout) == {"noise": {"caught": True, "by": ["laplace: law"]}}
