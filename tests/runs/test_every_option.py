"""Every option of a config: killed, stopped and resumed, a run with it ends as one that was left alone, to the bit.

The rows are read off the config's own types. A new key is in the table by being there: Literals and switches list their
values themselves, and any other key without an entry in VALUES fails the test that says so. All rows are for `-m long`;
a value of each key of CHECKPOINTED, which decide what a checkpoint holds, is tried every time.
"""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any, get_args

import pytest
from config_keys import keys, listed
from interruptions import few_pictures, refuse_a_difference, whole_and_broken
from small_runs import ALGORITHMS, WIDE_POLICY, outcome, small

from fedspa.agent.ledger.ledger import Ledger
from fedspa.agent.ledger.report import verify
from fedspa.algorithms import ALGORITHMS as REGISTRY
from fedspa.learning.tasks.named import NAMES as TASKS
from fedspa.runs.config import flat, load
from fedspa.runs.sections import Privacy

__all__ = ["few_pictures"]
Sections = dict[str, dict[str, Any]]

# A table, whose every column is named.
_FILE = str(Path(__file__).with_name("clinics.csv"))
TABLE: dict[str, Any] = {
    "clinic": {"kind": "ignore"},
    "part": {"kind": "ignore"},
    "age": {"kind": "number", "range": [0, 110], "missing": 50},
    "smoker": {"kind": "flag", "missing": "indicator"},
    "ward": {"kind": "category", "categories": ["a", "b"], "other": True},
    "score": {"kind": "number", "range": [0, 200], "target": True},
}


def table(**keys: Any) -> Sections:
    """What a config says of it beside `keys`."""
    columns = {name: column for name, column in TABLE.items() if name not in keys.values()}
    return {"data": {"name": _FILE, "table": {"columns": columns, **keys}, "holdout": 0.25}}


# Other values than the default of the keys whose types do not list them.
VALUES: dict[str, list[Any]] = {
    "tuning.candidates": [[{"algorithm.server_lr": 0.5}, {"algorithm.ema": 0.5}]],
    "tuning.rounds": [3],
    "tuning.expected_gains": [[[0.5], [0.0]]],
    "federation.agents": [7],
    "federation.rounds": [5],
    "federation.per_round": [2],
    "federation.cap": [2],
    "data.name": ["small_records:mnist"],
    "data.dir": ["elsewhere"],
    "data.table": [table(agent="clinic", split="part")["data"]["table"]],
    "data.holdout": [0.25],
    "data.agent_holdout": [0.25],
    "data.partition": ["shards", "dirichlet:5"],
    "data.person": ["patient"],
    "data.person_records": [2],
    "model.name": ["mlp"],
    "task.name": [*(name for name in TASKS if name != "classification"), "small_records:own_loss"],
    "task.metric": ["average_precision"],
    "task.options": [{"weights": [1.0, 3.0], "label_smoothing": 0.2}, {"weights": "balanced"}],
    "algorithm.name": list(REGISTRY),
    "algorithm.compression": [0.5, [0.5, 1.0]],
    "algorithm.local_steps": [1],
    "algorithm.batch": [7],
    "algorithm.local_lr": [0.25],
    "algorithm.server_lr": [0.5],
    "algorithm.server_options.beta1": [0.5],
    "algorithm.server_options.beta2": [0.9],
    "algorithm.server_options.kappa": [0.01],
    "algorithm.ema": [0.5],
    "algorithm.local_options.beta1": [0.5],
    "algorithm.local_options.beta2": [0.9],
    "algorithm.local_options.kappa": [0.01],
    "algorithm.warmup": [2],
    "algorithm.options": [{"trials": 12_000, "bits": 6}],
    "privacy.epsilon": [3.0],
    "privacy.noise_multiplier": [1.5],
    "privacy.delta": [1e-4],
    "privacy.clip_value": [0.1],
    "privacy.colluders": [2],
    "privacy.members": [4],
    "run.seed": [3],
    "run.chosen": [],  # what a run writes
    "run.device": [],  # the GPU has tests of its own
    "run.threads": [2],
    "run.workers": [],  # workers have tests of their own: test_workers.py, test_workers.py
    "run.out": [],  # every run here has one
    "run.code": [],  # tests/data/test_plugin.py
    "run.ledger": ["outlives.sqlite"],
    "run.policy": ["policy.toml"],
    "run.checkpoint_every": [3],
}
# What an option needs beside it to be allowed, or to change anything.
_CPSGD, _IMAGES = ALGORITHMS["cpsgd"], {"data": {"name": "small_records:mnist"}}
_SUMS = {**_CPSGD, "privacy": {**_CPSGD["privacy"], "adversary": "secure-aggregation"}}
_TOKENS = {"data": {"name": "small_records:tokens"}, "model": {"name": "small_records:Tagger"}}
_PARITY = {"data": {"name": "small_records:parity"}}
_TRIALS: dict[str, Any] = {
    "data": {"holdout": 0.2},
    "tuning": {"candidates": [{"algorithm.server_lr": 0.5}, {"algorithm.ema": 0.5}]},
}
COMPANIONS: dict[str, Sections] = {
    "task.name=binary": _PARITY,
    "task.name=multi-label": {"data": {"name": "small_records:bits"}},
    **{f"task.name={name}": _TOKENS for name in ("next-token", "token-classification", "module")},
    "task.options": _PARITY,
    "federation.cap": {"federation": {"participation": "uniform"}},
    "data.table": {"data": {"name": _FILE}, "federation": {"agents": 3}, "algorithm": {"batch": 5}},
    "data.features": {"data": {"name": "small_records:mnist"}},
    "data.features=patches": {"data": {"name": "small_records:cifar10"}},
    "data.person": {"data": {"name": "small_records:visits"}},
    "data.person_records": {"data": {"name": "small_records:visits"}},
    "data.partition": {"algorithm": {"batch": 2}},
    "algorithm.compression=[0.5, 1.0]": {"algorithm": {"mask": "fixed"}},
    "algorithm.server_options.beta2": {"algorithm": {"server": "adam"}},
    "algorithm.server_options.kappa": {"algorithm": {"server": "adam"}},
    **{
        f"algorithm.local_options.{key}": {"algorithm": {"local_optimizer": "adam"}}
        for key in ("beta1", "beta2", "kappa")
    },
    "algorithm.options": _CPSGD,
    "privacy.epsilon": {"privacy": {"noise_multiplier": None}},
    "privacy.adversary": _CPSGD,
    "privacy.colluders": _SUMS,
    "privacy.members": _SUMS,
    "privacy.recovery": {**_SUMS, "privacy": {**_SUMS["privacy"], "members": 5}},
    "tuning.candidates": {"data": {"holdout": 0.2}},
    "tuning.rounds": _TRIALS,
    "tuning.scored_by": _TRIALS,
    "tuning.expected_gains": _TRIALS,
    "run.threads": {"run": {"engine": "native"}},
    **{f"algorithm.name={name}": sections for name, sections in ALGORITHMS.items()},
}


# Keys that decide which tensors and numbers a checkpoint has, how often it is saved, or what is counted beside it.
CHECKPOINTED = {
    *("federation.cap", "data.person", "algorithm.name", "algorithm.mask", "algorithm.server", "algorithm.ema"),
    "algorithm.schedule",
    *("privacy.adversary", "tuning.candidates", "run.ledger", "run.checkpoint_every"),
}
ROWS = [
    (key, value)
    for key, kind, default in keys()
    for value in (listed(kind) or VALUES.get(key, []))
    if value != default and (key, value) not in (("privacy.noise", "secure"), ("privacy.noise", "exact"))
]
# Of those keys the first value, and every algorithm.
QUICK = [
    row
    for place, row in enumerate(ROWS)
    if row[0] in CHECKPOINTED and (row[0] == "algorithm.name" or row[0] not in {key for key, _ in ROWS[:place]})
]


def config(key: str, value: Any, out: Path) -> dict[str, Any]:
    beside = COMPANIONS.get(f"{key}={value}", COMPANIONS.get(key, {}))
    # The fastest engine that can: the others are rows of their own.
    made = small(out, **{"run": {"engine": "auto"}, **{each: dict(values) for each, values in beside.items()}})
    if key in ("run.ledger", "run.policy"):
        value = str(out.parent / f"{out.name}-{value}")
        if key == "run.policy":
            Path(value).write_text(WIDE_POLICY)
    *sections, name = key.split(".")
    inner: dict[str, Any] = made
    for section in sections:
        inner = inner.setdefault(section, {})
    inner[name] = value
    return made


def test_no_key_is_missing() -> None:
    for key, kind, _ in keys():
        assert listed(kind) is not None or key in VALUES, (
            f"{key} is a new option: add another value than its default to VALUES in {Path(__file__).name}, and to "
            "COMPANIONS what it needs beside it, so that runs with it are killed and resumed"
        )
    known = {key for key, _, _ in keys()}
    assert VALUES.keys() | CHECKPOINTED <= known
    assert {key.partition("=")[0] for key in COMPANIONS} <= known


def test_every_row_is_another_run(tmp_path: Path) -> None:
    """A value that its companions set anyway, or that a validator drops, would try nothing."""
    plain = flat(load(small(tmp_path / "run")))
    for key, value in ROWS:
        made = {k: v for k, v in flat(load(config(key, value, tmp_path / "run"))).items() if k.startswith(key)}
        assert made != {k: v for k, v in plain.items() if k.startswith(key)} or key in (
            "run.engine",
            "privacy.noise",
        ), key


@pytest.mark.parametrize(
    ("key", "value"),
    [pytest.param(*row, id="-".join(map(str, row)), marks=[] if row in QUICK else [pytest.mark.long]) for row in ROWS],
)
def test_killed_stopped_and_resumed_it_is_the_same_run(
    tmp_path: Path, key: str, value: Any, request: pytest.FixtureRequest
) -> None:
    for draw in range(4 if "long" in request.config.getoption("markexpr").split() else 1):
        (tmp_path / str(draw)).mkdir()
        chance = Random(f"{key}={value}" + f" {draw}" * bool(draw))
        refuse_a_difference(lambda out: config(key, value, out), tmp_path / str(draw), chance)


@pytest.mark.parametrize(
    "value", [value for value in get_args(Privacy.model_fields["noise"].annotation) if value != "seeded"]
)
def test_new_noise_is_counted_each_time(tmp_path: Path, value: str) -> None:
    """No key is stored, so the bits are others; every attempt is in the ledger and in what the run states."""
    noise: Sections = {"privacy": {"noise": value}, "federation": {"participation": "uniform"}}
    whole, broken = whole_and_broken(lambda out: small(out, **noise), tmp_path, Random(value))
    assert verify(broken / "ledger.sqlite") == []
    with Ledger.open(broken / "ledger.sqlite", create=False) as ledger:
        most = max(sum(ledger.spent(f"agent-{number}").values()) for number in range(6))
    stated = outcome(broken)["summary"]
    assert stated["participations_max"] == most >= outcome(whole)["summary"]["participations_max"]
