"""The attack: runs that share a ledger, each of which deals the records otherwise.

Agents of a simulation are numbered, and which records a number holds follows from the seed, the partition and the
number of agents. A record that agent 0 held in one run and agent 5 in the next has spent in both. The ε over all runs
in a ledger used to be the largest over the numbers of the last run: two runs of one participation each cost ε of one
of them, and spends of agents that the last run did not have were left out.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from small_runs import small

import fedspa
from fedspa.agent.ledger.ledger import Ledger
from fedspa.agent.ledger.report import export
from fedspa.errors import BudgetError
from fedspa.mechanisms.gaussian.plan import GaussianEvent, GaussianPlan
from fedspa.privacy.budget import BY_FILTER, FirstPlan, total
from fedspa.runs.guarantee import total_of

EVENT, OTHER = GaussianEvent("poisson", 10, 100, 5, 2.0), GaussianEvent("poisson", 10, 100, 5, 1.5)
PLAN = GaussianPlan(20, 20, "l2", 1.0, "poisson", 10, 100, 5, 3, 2.0, "add-remove", 1e-3)
POLICY = """
epsilon = {}
delta = 1e-3
neighbours = "add-remove"
min_noise_multiplier = 0.5
max_local_steps = 10
max_rounds = 10
max_compression = 1.0
clippings = ["coordinate", "l2"]
"""


def one_turn(tmp_path: Path, seed: int, agents: int = 6, **run: Any) -> dict[str, Any]:
    """One agent takes part once; which of them, and with which records, the seed decides."""
    files = {"out": str(tmp_path / f"{seed}-{agents}"), "ledger": str(tmp_path / "shared.sqlite"), "seed": seed, **run}
    federation = {"agents": agents, "rounds": 1, "per_round": 1}
    config = small(tmp_path, federation=federation, algorithm={"batch": 40, "local_steps": 8}, run=files)
    return dict(fedspa.run(config).summary)


def who_took_part(tmp_path: Path) -> set[str]:
    return {entry["agent"] for entry in export(tmp_path / "shared.sqlite")["entries"]}


@pytest.mark.parametrize(("seed", "agents"), [(1, 6), (0, 3)], ids=["another seed", "fewer agents"])
def test_a_record_pays_with_whomever_it_was(tmp_path: Path, seed: int, agents: int) -> None:
    first, second = one_turn(tmp_path, 0), one_turn(tmp_path, seed, agents)
    assert len(who_took_part(tmp_path)) == 2
    assert first["epsilon_total"] == first["epsilon"]
    with Ledger.open(tmp_path / "shared.sqlite", create=False) as ledger:
        held = ledger.largest(ledger.runs_with(f"agent-{number}" for number in range(agents)))
    assert sum(held.values()) == 2
    both = total(held, second["delta"], "add-remove", FirstPlan(next(iter(held)), 1))
    assert second["epsilon_total"] == both.epsilon > first["epsilon"] + 0.1 * second["epsilon"]


def test_a_policy_has_no_room_for_a_record_that_is_dealt_to_another(tmp_path: Path) -> None:
    """The first run's agent 5 is none of the three of the second, each of which has room by its own number."""
    first = one_turn(tmp_path, 2)
    assert who_took_part(tmp_path) == {"agent-5"}
    (tmp_path / "policy.toml").write_text(POLICY.format(1.05 * first["epsilon"]))
    with pytest.raises(BudgetError, match="for a record that each of them deals to its busiest agent"):
        one_turn(tmp_path, 2, 3, policy=str(tmp_path / "policy.toml"))
    assert not (tmp_path / "2-3").exists()


def test_of_each_run_and_event_the_busiest_counts(tmp_path: Path) -> None:
    with Ledger.open(tmp_path / "ledger.sqlite") as ledger:
        assert (ledger.runs_with(["agent-0"]), ledger.largest([]), ledger.first_plan_of([])) == ([], {}, None)
        for run, agent, event, times in (
            ("first", "agent-4", EVENT, 3),
            ("first", "agent-1", EVENT, 2),
            ("second", "agent-1", OTHER, 1),
            ("third", "agent-2", EVENT, 1),
            ("third", "agent-2", OTHER, 2),
            ("third", "agent-3", OTHER, 3),
            ("fourth", "north", OTHER, 5),
            ("fifth", "south", OTHER, 7),
            ("fifth", "agent-south", OTHER, 7),
        ):
            for t in range(times):
                ledger.reserve(agent, event, run, f"{event.noise_multiplier} {t}", announced=3)
        # Numbered agents may hold anybody's records; agents with names hold their own.
        everything = ["first", "second", "third", "fourth", "fifth"]
        assert ledger.runs_with(["agent-0"]) == ledger.runs_with(["agent-1", "south"]) == everything
        assert ledger.run_count() == len(everything)
        runs = ["first", "second", "third"]
        assert ledger.runs_with(["nobody"]) == runs
        assert ledger.runs_with(["north"]) == [*runs, "fourth"]
        assert ledger.runs_with(["south", "nobody"]) == ledger.runs_with(["agent-south"]) == [*runs, "fifth"]
        assert ledger.largest(runs) == {EVENT: 4, OTHER: 4}
        assert ledger.largest(["first", "second"]) == {EVENT: 3, OTHER: 1}
        assert ledger.first_plan_of(runs) == ledger.first_plan("agent-4") == FirstPlan(EVENT, 3)
        found = total_of(PLAN, ledger.largest(runs), ledger.first_plan_of(runs))
        assert found.accountant == BY_FILTER
        assert found.epsilon == total({EVENT: 4, OTHER: 4}, 1e-3, "add-remove", FirstPlan(EVENT, 3)).epsilon
        assert found.epsilon > max(ledger.epsilon(f"agent-{i}", 1e-3, "add-remove") for i in range(1, 5))
