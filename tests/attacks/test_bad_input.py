"""Bad input, everywhere it can be typed: every option of every command and every key of a config.

Before, a seed of 2⁶⁴, an integer of 5,000 digits, deeply nested TOML, run.device = "meta", a name of 300 bytes, noise
of 10⁹ and a damaged result of a table ended in tracebacks, some after a round was paid; a missing folder for run.ledger
left half a run's folder. The grids below are drawn from the program itself: a new option or key is in them by being
there. Each try must end in one line on standard error and exit code 2 (or work, or say no by 1); 70 is a bug.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from annotated_types import Ge, Gt, Le, Lt
from config_keys import fields, nested
from hostile import LONG, files, one_line
from pydantic.fields import FieldInfo
from typer.main import get_command

import fedspa
from fedspa.cli import app, main
from fedspa.errors import ConfigError, FedspaError
from fedspa.runs.config import load, to_toml

Try = Callable[[list[str]], tuple[int, str, str]]


@pytest.fixture
def attempt(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Try:
    """Run `fedspa <words>` in this process, in a folder with a file, a folder, something damaged, and nothing else."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FEDSPA_DATA", raising=False)
    (tmp_path / "a-file").write_text("text\n")
    (tmp_path / "a-folder").mkdir()
    (tmp_path / "damaged.toml").write_bytes(b"[run]\nseed = \xff\n")
    (tmp_path / "deep.toml").write_text("a = " + "[" * 5000)
    (tmp_path / "digits.toml").write_text("[run]\nseed = " + "1" * 5000)

    def run(words: list[str]) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["fedspa", *words])
        with pytest.raises(SystemExit) as stop:
            main()
        out, err = capsys.readouterr()
        return int(stop.value.code or 0), out, err

    return run


def check(attempt: Try, folder: Path, words: list[str]) -> None:
    """One line and exit code 2 without a new file, or an ordinary end."""
    before = files(folder)
    code, _, err = attempt(words)
    shown = [word[:60] for word in words]
    assert code in (0, 1, 2), f"{shown}: {err}"
    assert "Traceback" not in err, shown
    if code == 2:
        assert err.startswith("fedspa: "), f"{shown}: {err!r}"
        assert err.count("\n") == 1, f"{shown}: {err!r}"
        assert files(folder) == before, shown


def commands(group: Any, *path: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, *path, name)
        else:
            yield (*path, name), command


COMMANDS = dict(commands(get_command(app)))
# What a command needs beside the parameter that is tried, chosen so that nothing long starts when a value is taken.
NEEDED = {
    "run": ["--set", "data.name=nothing"],
    "tune": ["--set", "federation.rounds=2"],
    "privacy": [
        *("--batch", "10", "--records", "600", "--local-steps", "30", "--participations", "5"),
        *("--delta", "1e-3", "--noise", "30"),
    ],
    "audit": ["--draws", "100", "--clip", "nothing"],
    "report": ["a-folder"],
    "new": ["a-folder/new"],
    "ledger": ["a-file"],
}
NUMBERS = [
    "",
    "nan",
    "inf",
    "-inf",
    "-1",
    "0",
    "1e-320",
    "1e308",
    "1e999",
    str(2**63),
    str(2**64),
    "9" * 400,
    "9" * 5000,
]
TEXTS = ["", LONG, "a\nb\x1b[31m", "\udcff", "é" * 200, "../" * 2000, "[" * 3000, "=", ".=", "run.seed=" + "9" * 5000]
PATHS = ["a-file", "a-folder", "a-folder/below/nothing", "a-file/below", "/dev/null/x", "/dev/full", "/proc/self/mem"]
TOML = ["damaged.toml", "deep.toml", "digits.toml", "/dev/zero"]


def hostile(parameter: Any) -> list[str]:
    kind = parameter.type.name
    if kind in ("integer", "float", "integer range", "float range"):
        return [*NUMBERS, "text"]
    return [*TEXTS, *PATHS, *TOML, *NUMBERS]


def words_for(path: tuple[str, ...], parameter: Any, value: str) -> list[str]:
    """The command with this parameter set to `value`, the others as `NEEDED` has them."""
    needed = list(NEEDED.get(path[0], []))
    if parameter.param_type_name == "argument":
        optional = bool(needed) and not needed[0].startswith("-")
        return [*path, *(needed[1:] if optional else needed), "--", value]
    option = max(parameter.opts, key=len)
    if option in needed and option != "--set":
        place = needed.index(option)
        needed[place : place + 2] = []
    return [*path, *needed, f"{option}={value}"]


GRID = [
    pytest.param(path, parameter, id=f"{'-'.join(path)} {parameter.name}")
    for path, command in COMMANDS.items()
    for parameter in command.params
    if not getattr(parameter, "is_flag", False)
]


@pytest.mark.parametrize(("path", "parameter"), GRID)
def test_every_option_of_every_command(attempt: Try, tmp_path: Path, path: tuple[str, ...], parameter: Any) -> None:
    # A search with a place to keep things in is a whole one: of these only places are tried.
    whole = path[0] == "tune" and parameter.name == "out"
    for value in PATHS if whole else hostile(parameter):
        check(attempt, tmp_path, words_for(path, parameter, value))


KEYS = dict(fields())


def kinds(annotation: Any) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """Each plain type within an annotation, with the bounds that stand around it."""
    bounds = tuple(
        bound for field in getattr(annotation, "__metadata__", ()) for bound in getattr(field, "metadata", ())
    )
    inner = get_args(annotation)
    if not inner or isinstance(annotation, type):
        yield annotation, bounds
    for part in inner:
        if isinstance(part, type) or get_args(part):
            yield from ((kind, (*bounds, *more)) for kind, more in kinds(part))


def bounds_of(about: FieldInfo) -> list[Any]:
    return [*about.metadata, *(bound for _, bounds in kinds(about.annotation) for bound in bounds)]


NUMERIC = {key: about for key, about in KEYS.items() if {int, float} & {kind for kind, _ in [*kinds(about.annotation)]}}


def test_the_grid_finds_the_numbers() -> None:
    assert {"run.seed", "privacy.epsilon", "algorithm.server_options.beta1", "federation.cap"} <= NUMERIC.keys()
    assert not {"run.out", "run.tf32", "privacy.noise"} & NUMERIC.keys()


@pytest.mark.parametrize("key", sorted(NUMERIC.keys() - {"algorithm.compression"}))  # which has a validator of its own
def test_every_number_of_a_config_has_two_finite_bounds_and_they_hold(key: str) -> None:
    bounds = bounds_of(KEYS[key])
    low = [bound.ge if isinstance(bound, Ge) else bound.gt for bound in bounds if isinstance(bound, Ge | Gt)]
    high = [bound.le if isinstance(bound, Le) else bound.lt for bound in bounds if isinstance(bound, Le | Lt)]
    assert low, f"{key} has no lower bound"
    assert high, f"{key} has no upper bound"
    whole = int in {kind for kind, _ in kinds(KEYS[key].annotation)}
    kind: Any = int if whole else float
    for value in (kind(low[0]) - 1, kind(high[0]) * 2 + 1):
        refused(key, value)


@pytest.mark.parametrize(
    "value", [0, 1.5, -0.1, float("nan"), True, "x", [], [1.5], [-1], [True], [[0.5]], [0.5] * 10_001]
)
def test_a_compression_is_a_share_or_a_list_of_them(value: Any) -> None:
    refused("algorithm.compression", value)


def refused(key: str, value: Any) -> None:
    given = nested(key, value)
    with pytest.raises(ConfigError) as caught:
        load({**given, "privacy": {"epsilon": 2.0, **given.get("privacy", {})}})
    assert key in str(caught.value)
    one_line(caught.value)


VALUES = [
    *(None, True, -1, 0, 2**63, 2**64, 10**400, 10**5000, -(10**5000), 0.0, -1.0, 5e-324, 1e308, float("nan")),
    *(float("inf"), "", "\0", LONG, "a/" + LONG, "\udcff", "a\nb", "x" * 10**5, [], {}, [[]], [{}], {"a": 1}, b"x"),
    *(object(), np.float64(0.5), np.int64(3), np.zeros(2), torch.ones(1), print, [0.5] * 10**5, Path("x")),
]


@pytest.mark.parametrize("key", KEYS)
def test_every_key_of_a_config_takes_a_value_or_says_why_not(key: str) -> None:
    for value in VALUES:
        try:
            config = load({"privacy": {"epsilon": 2.0}, **nested(key, value)})
        except FedspaError as error:
            one_line(error)
        else:
            assert load(json.loads(json.dumps(config.model_dump(exclude_none=True)))) == config
            to_toml(config).encode("utf-8")


@pytest.mark.parametrize("key", KEYS)
def test_every_key_as_text(key: str) -> None:
    """As `--set`, and as a file."""
    for text in [*NUMBERS, *TEXTS, '"\\u0000"', f'"{LONG}"', "[]", "{}", "true", "1979-05-27", '"a\\nb"', "none"]:
        try:
            load(None, [f"{key}={text}"])
        except FedspaError as error:
            one_line(error)


REFUSED_RUNS = [
    f"run.seed={2**64}",
    f"algorithm.local_steps={2**63}",
    'run.device="meta"',
    'run.device="cuda:77"',
    'run.device="cpu:\\u0000"',
    'run.device="fpga"',
    f"run.out={LONG}",
    'run.out="a\\u0000b"',
    "run.out=a-file",
    "run.out=a-file/below",
    "run.out=/dev/full",
    f"run.ledger={LONG}",
    "run.ledger=nowhere/ledger.sqlite",
    "run.ledger=a-folder",
    "run.ledger=a-file",
    "run.policy=nowhere.toml",
    "run.policy=a-folder",
    "run.policy=deep.toml",
    "run.policy=digits.toml",
    f"data.name={LONG}.npz",
    f'data.dir="{LONG}"',
    'data.name="a\\u0000.npz"',
    "data.name=a-folder.npz",
    "data.name=json:loads",
    "model.name=json:loads",
    f"model.name={LONG}",
    "privacy.delta=1e-300",
    "privacy.epsilon=1e-300",
    "privacy.epsilon=1e300",
]


@pytest.mark.parametrize("override", REFUSED_RUNS, ids=lambda text: text[:40])
def test_a_run_that_cannot_be_is_refused_before_anything_is_written(
    attempt: Try, tmp_path: Path, override: str
) -> None:
    (tmp_path / "a-folder.npz").mkdir()
    small = ["federation.rounds=1", "federation.agents=4", "federation.per_round=2", "algorithm.local_steps=1"]
    before = files(tmp_path)
    code, out, err = attempt(["run", *(word for key in [*small, override] for word in ("--set", key))])
    assert (code, out) == (2, ""), err
    assert err.count("\n") == 1
    assert err.startswith("fedspa: ")
    assert files(tmp_path) == before


@pytest.mark.parametrize(
    "settings",
    [
        {"noise_multiplier": 1e-3, "delta": 1e-30},
        {"noise_multiplier": 1e8, "delta": 1e-30},
        {"noise_multiplier": 1e-3, "accountant": "rdp"},
        {"noise_multiplier": 1e8, "sampling": "fixed"},
        {"noise_multiplier": 1e-3, "sampling": "fixed", "delta": 1e-30},
        {"noise_multiplier": 0.8, "delta": 1e-25},
    ],
    ids=str,
)
def test_noise_without_a_finite_epsilon_is_refused_before_a_round_is_paid(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    """Either the run ends with finite numbers, or it is refused with nothing written.

    A noise multiplier of 0.8 at δ = 1e-25 was one: a ValueError from JSON, after the agents of the first round paid.
    """
    out = tmp_path / "run"
    config = {
        "federation": {"rounds": 1, "agents": 4, "per_round": 2},
        "algorithm": {"local_steps": 1, "batch": 1, "local_lr": 1e-9, "coding": "f32"},
        "privacy": settings,
        "run": {"out": str(out), "engine": "generic"},
    }
    try:
        fedspa.run(config)
    except FedspaError as error:
        one_line(error)
        assert not out.exists()


def test_no_memory_is_one_line(attempt: Try, monkeypatch: pytest.MonkeyPatch) -> None:
    errors = [
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp:121] . DefaultCPUAllocator: can't allocate memory: 1 bytes"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB"),
    ]
    for error in errors:

        def fail(*_: object, error: Exception = error, **__: object) -> None:
            raise error

        monkeypatch.setattr("fedspa.cli.doctor.check_machine", fail)
        code, _, err = attempt(["doctor"])
        assert code == 2
        assert err.startswith("fedspa: there is not enough memory; ")
        assert err.count("\n") == 1


def test_a_bug_is_one_line_and_keeps_its_traceback(
    attempt: Try, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "a-folder"))
    monkeypatch.setattr("fedspa.cli.doctor.check_machine", lambda: {}["nothing"])
    code, _, err = attempt(["doctor"])
    assert code == 70
    assert err.count("\n") == 1
    (file,) = (tmp_path / "a-folder").iterdir()
    assert str(file) in err
    assert "KeyError: 'nothing'" in file.read_text()
    assert file.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("words", ["privacy --help", "ledger verify a-file", "new another", "nothing"])
@pytest.mark.parametrize("stream", ["stdout", "stderr"])
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full here")
def test_a_full_device_for_output_is_exit_2_and_no_traceback(tmp_path: Path, words: str, stream: str) -> None:
    program = [sys.executable, "-m", "fedspa", *words.split()]
    with open("/dev/full", "w") as full:
        streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, stream: full}
        done = subprocess.run(program, cwd=tmp_path, text=True, **streams)
    other = done.stderr if stream == "stdout" else done.stdout
    assert "Traceback" not in other
    assert done.returncode in ((2,) if stream == "stdout" and words != "nothing" else (0, 1, 2)), other
