"""The guard in the hands of someone who holds it wrongly: one line that teaches, before anything is spent."""

from __future__ import annotations

import copy
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dp_accounting
import pytest

from fedspa.agent.ledger.report import export
from fedspa.errors import ConfigError, FedspaError, LedgerError, PrivacyError
from fedspa.guard import Guard, flower_mod

EVENT = dp_accounting.GaussianDpEvent(20.0)
SEVERAL = dp_accounting.ComposedDpEvent([EVENT, dp_accounting.GaussianDpEvent(30.0)])


def entries(path: Path) -> int:
    return len(export(path)["entries"])


def test_a_forgotten_with_hides_no_spend(path: Path, guarded: Callable[..., Guard]) -> None:
    guarded().spend(EVENT)
    assert entries(path) == 1


def test_a_spend_pays_for_one_body(path: Path, guarded: Callable[..., Guard]) -> None:
    paid = guarded().spend(EVENT)
    with paid:
        pass
    with pytest.raises(LedgerError, match=r"covers one execution; call guard.spend for each"), paid:
        pytest.fail("the body ran")
    assert entries(path) == 1


def test_a_spend_cannot_be_doubled_by_a_copy(guarded: Callable[..., Guard]) -> None:
    paid = guarded().spend(EVENT)
    for doubled in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(LedgerError, match="cannot be copied or pickled: it covers one execution"):
            doubled(paid)


def test_a_spend_belongs_to_the_process_that_paid(
    guarded: Callable[..., Guard], monkeypatch: pytest.MonkeyPatch
) -> None:
    paid = guarded().spend(EVENT)
    monkeypatch.setattr(os, "getpid", lambda: -1)  # as in a child that was forked since
    with pytest.raises(LedgerError, match="belongs to another process"), paid:
        pytest.fail("the body ran")


def test_as_a_decorator_it_names_what_is_meant(guarded: Callable[..., Guard]) -> None:
    with pytest.raises(ConfigError, match=r"write `with guard.spend\(event\):` in the function"):
        guarded().spend(EVENT)(print)  # type: ignore[operator]


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"agent": ""}, "agent is ''; it must be 1 to 200 printable characters"),
        ({"agent": None}, "agent is 'None'"),
        ({"agent": "north\n"}, "agent is "),
        ({"run": ""}, "run is ''"),
        ({"run": 5}, "run is '5'"),
        ({"epsilon": "3"}, "epsilon is '3'; it must be a number"),
        ({"epsilon": True}, "epsilon is True; it must be a number"),
        ({"delta": [1e-3]}, "delta is .* it must be a number"),
        ({"policy": 5, "epsilon": None, "delta": None}, "policy is 5; give the path of a file"),
    ],
)
def test_what_cannot_be_opened(given: dict[str, Any], match: str, guarded: Callable[..., Guard]) -> None:
    with pytest.raises(FedspaError, match=match):
        guarded(**given)


@pytest.mark.parametrize("times", [0, -1, 2.5, "3", None, True, 10**30])
@pytest.mark.parametrize("event", [EVENT, SEVERAL], ids=["one", "several"])
def test_a_number_of_times_that_is_none(times: Any, event: object, path: Path, guarded: Callable[..., Guard]) -> None:
    guard = guarded()
    with pytest.raises(ConfigError, match=r"announced is .* a whole number of at least 1"):
        guard.spend(event, announced=times)
    with pytest.raises(ConfigError, match=r"participations is .* a whole number of at least 1"):
        guard.require(event, participations=times)
    with pytest.raises(ConfigError, match=r"rounds is .* a whole number of at least 1"):
        flower_mod(event, rounds=times)
    assert entries(path) == 0


def test_a_rate_that_is_none(path: Path, guarded: Callable[..., Guard]) -> None:
    with pytest.raises(PrivacyError, match=r"the sampling probability is '0\.1'; it must be above 0"):
        guarded().spend(dp_accounting.PoissonSampledDpEvent("0.1", EVENT))  # type: ignore[arg-type]
    assert entries(path) == 0


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"event": None}, "None is no event; give one of"),
        ({"event": EVENT, "evaluate": "loss"}, "'loss' is no event"),
        ({"event": dp_accounting.LaplaceDpEvent(1.0)}, "LaplaceDpEvent cannot be spent"),
        ({"event": EVENT, "metrics": "loss"}, r"metrics is 'loss'; give a list of names, as \['loss'\]"),
        ({"event": EVENT, "free": ["query", "train"]}, "free has train, which an event pays for"),
        ({"event": EVENT, "free": "query"}, r"free is 'query'; give a list of names, as \['query'\]"),
    ],
)
def test_a_mod_that_no_site_could_use_is_refused_where_the_app_is_written(given: dict[str, Any], match: str) -> None:
    with pytest.raises(FedspaError, match=match):
        flower_mod(**given)
