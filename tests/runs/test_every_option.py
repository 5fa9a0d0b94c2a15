"""Every option of a config: killed, stopped and resumed, a run with it ends as one that was left alone, to the bit.

The rows are read off the config's own types. A new key is in the table by being there: Literals and switches list their
values themselves, and any other key without an entry in VALUES fails the test that says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import Any, get_args

import pytest
from config_keys import keys, listed
from interruptions import refuse_a_difference, whole_and_broken
from small_runs import ALGORITHMS, WIDE_POLICY, outcome, small

from fedspa.agent.ledger.ledger import Ledger
from fedspa.agent.ledger.report import verify
from fedspa.algorithms import ALGORITHMS as REGISTRY
from fedspa.data import patches
from fedspa.learning.tasks.named import NAMES as TASKS
from fedspa.runs.config import load
from fedspa.runs.sections import Privacy

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
    return {"data": {"name": _FILE, "columns": columns, "holdout": 0.25, **keys}}


# Other values than the default of the keys whose types do not list them.
VALUES: dict[str, list[Any]] = {
    "tuning.candidates": [[{"algorithm.server_lr": 0.5}, {"algorithm.ema": 0.5}]],
    "tuning.rounds": [3],
    "tuning.ahead": [[[0.1], [0.0]]],
    "federation.agents": [7],
    "federation.rounds": [5],
    "federation.per_round": [2],
    "federation.cap": [2],
    "data.name": ["small_records:mnist"],
    "data.dir": ["elsewhere"],
    "data.columns": [TABLE],
    "data.agent": ["clinic"],
    "data.split": ["part"],
    "data.test": ["held"],
    "data.holdout": [0.25],
    "data.alpha": [5.0],
    "data.person": ["patient"],
    "data.person_records": [2],
    "model.name": ["mlp"],
    "task.name": [*(name for name in TASKS if name != "classification"), "small_records:own_loss"],
    "task.weights": [[1.0, 3.0]],
    "task.label_smoothing": [0.2],
    "task.huber": [0.5],
    "task.ignore_index": [-1],
    "algorithm.name": list(REGISTRY),
    "algorithm.compression": [0.5],
    "algorithm.layer_shares": [[0.5, 1.0]],
    "algorithm.local_steps": [1],
    "algorithm.batch": [7],
    "algorithm.local_lr": [0.25],
    "algorithm.server_lr": [0.5],
    "algorithm.beta1": [0.5],
    "algorithm.beta2": [0.9],
    "algorithm.kappa": [0.01],
    "algorithm.ema": [0.5],
    "algorithm.options": [{"rotation": True, "trials": 12_000, "bits": 6}],
    "privacy.epsilon": [3.0],
    "privacy.noise_multiplier": [1.5],
    "privacy.delta": [1e-4],
    "privacy.clip_value": [0.1],
    "privacy.colluders": [2],
    "privacy.members": [4],
    "run.seed": [3],
    "run.device": [],  # the GPU has tests of its own
    "run.threads": [2],
    "run.workers": [],  # workers have tests of their own: test_workers.py, test_ray.py
    "run.cluster": [],
    "run.out": [],  # every run here has one
    "run.code": [],  # tests/data/test_plugin.py
    "run.ledger": ["outlives.sqlite"],
    "run.policy": ["policy.toml"],
    "run.checkpoint_every": [3],
    "run.keep": [1],
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
    "task.weights": _PARITY,
    "task.loss": {"task": {"name": "regression"}},
    "task.huber": {"task": {"name": "regression", "loss": "huber"}},
    "task.ignore_index": {
        **_TOKENS,
        "data": {"name": "small_records:tokens_with_minus_one"},
        "task": {"name": "next-token"},
    },
    "federation.cap": {"federation": {"participation": "uniform"}},
    "data.columns": table(),
    "data.agent": table(agent="clinic"),
    "data.split": table(split="part"),
    "data.test": table(split="part", holdout=0.0),
    "data.features": {"data": {"name": "small_records:mnist"}},
    "data.features=patches": {"data": {"name": "small_records:cifar10"}},
    "data.alpha": {"data": {"partition": "dirichlet"}, "algorithm": {"batch": 2}},
    "data.person": {"data": {"name": "small_records:visits"}},
    "data.person_records": {"data": {"name": "small_records:visits"}},
    "data.partition=dirichlet": {"algorithm": {"batch": 2}},
    "algorithm.layer_shares": {"algorithm": {"mask": "fixed", "compression": 1.0}},
    "algorithm.beta2": {"algorithm": {"server": "adam"}},
    "algorithm.kappa": {"algorithm": {"server": "adam"}},
    "algorithm.options": _CPSGD,
    "privacy.epsilon": {"privacy": {"noise_multiplier": None}},
    "privacy.adversary": _CPSGD,
    "privacy.colluders": _SUMS,
    "privacy.members": _SUMS,
    "tuning.candidates": {"data": {"holdout": 0.2}},
    "tuning.rounds": _TRIALS,
    "tuning.ahead": _TRIALS,
    "tuning.scored_by": _TRIALS,
    "run.threads": {"run": {"engine": "native"}},
    **{f"algorithm.name={name}": sections for name, sections in ALGORITHMS.items()},
}


def rows() -> list[tuple[str, Any]]:
    return [
        (key, value)
        for key, kind, default in keys()
        for value in (listed(kind) or VALUES.get(key, []))
        if value != default
    ]


ROWS = rows()


def config(key: str, value: Any, out: Path) -> dict[str, Any]:
    section, name = key.split(".")
    beside = COMPANIONS.get(f"{key}={value}", COMPANIONS.get(key, {}))
    # The fastest engine that can: the others are rows of their own.
    made = small(out, **{"run": {"engine": "auto"}, **{each: dict(values) for each, values in beside.items()}})
    if key in ("run.ledger", "run.policy"):
        value = str(out.parent / f"{out.name}-{value}")
        if key == "run.policy":
            Path(value).parent.mkdir(parents=True, exist_ok=True)
            Path(value).write_text(WIDE_POLICY)
    made.setdefault(section, {})[name] = value
    return made


def test_no_key_is_missing() -> None:
    for key, kind, _ in keys():
        assert listed(kind) is not None or key in VALUES, (
            f"{key} is a new option: add another value than its default to VALUES in {Path(__file__).name}, and to "
            "COMPANIONS what it needs beside it, so that runs with it are killed and resumed"
        )
    known = {key for key, _, _ in keys()}
    assert VALUES.keys() <= known
    assert {key.partition("=")[0] for key in COMPANIONS} <= known


def test_every_row_is_another_run(tmp_path: Path) -> None:
    """A value that its companions set anyway, or that a validator drops, would try nothing."""
    for key, value in ROWS:
        made = load(config(key, value, tmp_path / "run"))
        section, name = key.split(".")
        default = getattr(getattr(load(small(tmp_path / "run")), section), name)
        assert getattr(getattr(made, section), name) != default or key in ("run.engine", "privacy.noise"), key


REPEATED = [
    pytest.param(*row, id="-".join(map(str, row)), marks=[pytest.mark.long] if row[0] == "run.track" else [])
    for row in ROWS
    if row[0] != "privacy.noise" or row[1] == "seeded"
]


@pytest.fixture(autouse=True, scope="module")
def few_pictures() -> Iterator[None]:
    """The constants of `patches` come from fewer pictures than those of tests/data/test_patches.py, and stay here."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(patches, "PICTURES", 50)
        for name in ("_pictures", "constants"):
            patched.setattr(patches, name, cache(getattr(patches, name).__wrapped__))
        yield


@pytest.mark.parametrize(("key", "value"), REPEATED)
def test_killed_stopped_and_resumed_it_is_the_same_run(tmp_path: Path, key: str, value: Any) -> None:
    if key == "run.track" and find_spec(value) is None:
        pytest.skip(f"needs the extra {value}")
    refuse_a_difference(lambda out: config(key, value, out), tmp_path, Random(f"{key}={value}"))


@pytest.mark.long
@pytest.mark.parametrize(("key", "value"), [row for row in REPEATED if not row.marks])
def test_killed_at_more_steps(tmp_path: Path, key: str, value: Any) -> None:
    for draw in range(8):
        refuse_a_difference(lambda out: config(key, value, out), tmp_path / str(draw), Random(f"{key}={value} {draw}"))


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
