"""The command line as a newcomer meets it: help, a run, JSON that parses, bad input in one line with exit code 2."""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from fedspa.agent.ledger.ledger import Ledger
from fedspa.algorithms.cpsgd.event import BinomialEvent
from fedspa.cli import app
from fedspa.mechanisms.gaussian.calibrate import compare
from fedspa.mechanisms.gaussian.event import GaussianEvent
from fedspa.privacy.accounting import epsilon

Call = Callable[..., tuple[int, str, str]]

SETTING = "--batch 10 --records 600 --local-steps 300 --participations 5 --delta 1e-3"
QUICK = (
    "--set federation.rounds=2 --set federation.agents=4 --set federation.per_round=2 --set algorithm.local_steps=2 "
    "--set run.engine=generic"
)


def test_run_as_json_prints_one_object_and_nothing_else(call: Call) -> None:
    code, out, _ = call(f"run --json {QUICK}")
    assert code == 0
    summary = json.loads(out)
    assert summary["rounds"] == 2
    assert 0 < summary["epsilon"] <= 4


def test_run_ends_with_a_readable_result(call: Call, tmp_path: Path) -> None:
    code, out, _ = call(f"run --out here {QUICK}")
    assert code == 0
    for word in ("accuracy", "ε =", "δ = 0.001", "add-remove", "poisson", "pld", "per upload", "here"):
        assert word in out
    assert "engine generic (run.engine = 'generic')\nFaster      run.engine = 'auto' takes the fastest" in out
    assert (tmp_path / "here" / "summary.json").exists()


def test_a_ledger_can_be_shown_verified_and_exported(call: Call, tmp_path: Path) -> None:
    call(f"run --json --out here {QUICK}")
    file = "here/ledger.sqlite"
    code, out, _ = call(f"ledger show {file} --cap 5")
    assert code == 0
    assert "agent-0" in out
    shown = json.loads(call(f"ledger show {file} --cap 5 --json")[1])
    assert shown["agents"][0]["epsilon_left"] == pytest.approx(5 - shown["agents"][0]["epsilon"])
    assert call(f"ledger verify {file}")[0] == 0
    assert len(json.loads(call(f"ledger show {file} --entries")[1])["entries"]) == 4
    content = bytearray((tmp_path / file).read_bytes())
    content[:100] = bytes(100)
    (tmp_path / file).write_bytes(content)
    code, _, err = call(f"ledger show {file}")
    assert code == 2
    assert err.count("\n") == 1


def test_a_runs_ledger_is_shown_under_the_runs_own_terms(call: Call, tmp_path: Path) -> None:
    """Not at another δ, where the same spend has another ε; what is asked for goes first."""
    run = json.loads(call(f"run --json --out here {QUICK} --set privacy.delta=1e-4")[1])
    (agent, *_) = json.loads(call("ledger show here/ledger.sqlite --json")[1])["agents"]
    assert (agent["epsilon"], agent["delta"], agent["neighbours"]) == (run["epsilon"], 1e-4, "add-remove")
    (agent, *_) = json.loads(call("ledger show here/ledger.sqlite --json --delta 1e-3")[1])["agents"]
    assert agent["epsilon"] < run["epsilon"]
    (agent, *_) = json.loads(call("ledger show here/ledger.sqlite --json --neighbours replace-one")[1])["agents"]
    assert agent["epsilon"] == run["epsilon_replace_one"]
    (tmp_path / "here" / "config.toml").unlink()
    (agent, *_) = json.loads(call("ledger show here/ledger.sqlite --json")[1])["agents"]
    assert (agent["delta"], agent["neighbours"]) == (1e-3, "add-remove")


def test_a_runs_ledger_is_not_shown_at_a_delta_that_is_none(call: Call) -> None:
    call(f"run --json --out here {QUICK}")
    code, out, err = call("ledger show here/ledger.sqlite --delta 0")
    assert (code, out) == (2, "")
    assert "delta is 0" in err


def test_greek_letters_do_not_end_a_command_where_there_are_none(tmp_path: Path) -> None:
    words = ["privacy", *SETTING.split(), "--noise", "30"]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-m", "fedspa", *words], env=environment, capture_output=True, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, b"")
    assert rb"\u03b4 = 0.001" in done.stdout


def test_a_full_disk_is_one_line(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("fedspa.mechanisms.gaussian.calibrate.compare", full)
    code, _, err = call(f"privacy {SETTING} --noise 30")
    assert (code, err) == (2, "fedspa: no room to write the output; free disk space\n")


def test_privacy_prints_every_row(call: Call) -> None:
    code, out, _ = call(f"privacy {SETTING} --epsilon 1 --json")
    rows = json.loads(out)["rows"]
    assert code == 0
    setting = {"batch": 10, "records": 600, "local_steps": 300, "participations": 5, "delta": 1e-3}
    assert rows == [asdict(row) for row in compare(epsilon=1.0, **setting)]
    code, out, _ = call(f"privacy {SETTING} --noise 1.83")
    assert code == 0
    assert "ε = 0.996 at" in out  # Poisson, add-remove, PLD: 0.99591, rounded up


def test_privacy_prints_no_epsilon_below_the_true_one(call: Call) -> None:
    sized = "--batch 10 --records 10 --local-steps 1 --participations 1 --delta 1e-3"
    _, out, _ = call(f"privacy {sized} --noise 2.5 --json")
    true = [row["epsilon"] for row in json.loads(out)["rows"]]
    _, out, _ = call(f"privacy {sized} --noise 2.5")
    printed = [float(cells[4]) for line in out.splitlines() if len(cells := line.split()) == 5 and cells[3] == "2.5"]
    assert len(printed) == len(true) == 3
    assert all(t <= p <= 1.0011 * t for t, p in zip(true, printed))
    assert any(float(f"{t:.4g}") < t for t in true)  # to the nearest, some would be below


SHARES = "--batch 600 --records 600 --local-steps 1 --participations 5 --delta 1e-3 --members 10"


def test_privacy_of_a_share_has_two_epsilons(call: Call) -> None:
    """Eight shares count: the noise that counts is √8 times one, which is what is left where all others collude."""
    code, out, _ = call(f"privacy {SHARES} --colluders 2 --epsilon 1 --json")
    assert code == 0
    rows = json.loads(out)["rows"]
    assert [row["neighbours"] for row in rows] == ["add-remove", "replace-one"]
    for row in rows:
        assert 0.99 < row["epsilon"] <= 1 < row["epsilon_floor"]
        assert row["noise_counted"] == pytest.approx(row["noise"] * 8**0.5)
    # A Gaussian of the same noise costs the same, to the little that shares lose: 5 steps without sampling.
    gaussian = GaussianEvent("poisson", 600, 600, 1, rows[0]["noise_counted"])
    alone = replace(gaussian, noise_multiplier=rows[0]["noise"])
    for stated, event in ((rows[0]["epsilon"], gaussian), (rows[0]["epsilon_floor"], alone)):
        exact = epsilon({event: 5}, 1e-3, neighbours="add-remove")
        assert exact <= stated < 1.01 * exact
    code, out, _ = call(f"privacy {SHARES} --colluders 2 --noise 0.001")
    assert code == 0
    assert "the server with up to 2 of the 10 agents or more whose sums it sees" in " ".join(out.split())
    assert out.count("∞") == 4


def test_a_ledger_of_sums_is_shown_with_its_floor(call: Call, tmp_path: Path) -> None:
    summed = BinomialEvent(10, 143, 1, 650, 1, 60, False, 8, "secure", members=10, colluders=2)
    with Ledger.open(tmp_path / "ledger.sqlite") as ledger:
        ledger.reserve("a", summed, "run", "0", announced=1)
    file = "ledger.sqlite --neighbours replace-one"
    (agent,) = json.loads(call(f"ledger show {file} --cap 5 --json")[1])["agents"]
    assert 0 < agent["epsilon"] < agent["epsilon_floor"]
    assert agent["epsilon_left"] == pytest.approx(5 - agent["epsilon_floor"])
    code, out, _ = call(f"ledger show {file} --cap 5")
    assert code == 0
    words = " ".join(out.split())
    assert "floor against all others together; a cap that allows no aggregation is held against the floor" in words
    assert "in sums over 10 members with up to 2 colluding" in words
    (tmp_path / "policy.toml").write_text(
        'epsilon = 5.0\ndelta = 1e-3\nneighbours = "replace-one"\nmin_noise_multiplier = 1\nmax_local_steps = 1\n'
        'max_rounds = 9\nmax_compression = 1\nclippings = ["coordinate"]\nmin_honest = 8\nmax_floor = 9\n'
    )
    (agent,) = json.loads(call("ledger show ledger.sqlite --policy policy.toml --json")[1])["agents"]
    assert agent["epsilon_left"] == pytest.approx(5 - agent["epsilon"])


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (f"privacy {SETTING} --epsilon 1 --colluders 2", "--colluders is 2"),
        (f"privacy {SETTING} --epsilon 1 --members 10", "--local-steps is 300"),
        (f"privacy {SHARES} --epsilon 1 --colluders 10", "colluders is 10"),
        ("run --set algorithm.compresion=1", "algorithm.compresion"),
        ("run --set privacy.noise_multiplier=1", "exactly one"),
        ("run --set algorithm.batch=5000", "algorithm.batch"),
        ("run --set privacy.delta=0.5", "privacy.delta"),
        ("run --set data.name=mnist --set data.dir=nowhere", "train-images-idx3-ubyte"),
        ("run --set data.name=cifar10 --set data.dir=nowhere", "data_batch_1"),
        ("run --set data.name=nothing", "data.name"),
        ("run --set federation.agents=100000", "federation.agents"),
        ("run nowhere.toml", "nowhere.toml"),
        ("run --resume nowhere", "no run in that folder"),
        (f"privacy {SETTING}", "--epsilon and --noise"),
        (f"privacy {SETTING} --epsilon 1 --noise 1", "--epsilon and --noise"),
        (f"privacy {SETTING} --epsilon nan", "epsilon"),
        (f"privacy {SETTING} --epsilon -1", "epsilon"),
        (f"privacy {SETTING} --noise 0", "noise"),
        ("privacy --batch 10 --records 6 --local-steps 1 --participations 1 --delta 1e-3 --noise 1", "batch"),
        ("privacy --batch 10 --records 60 --local-steps 1 --participations 1 --delta 2 --noise 1", "delta"),
        ("privacy --batch 10 --records 60 --local-steps 0 --participations 1 --delta 1e-3 --noise 1", "steps"),
        ("ledger show nowhere.sqlite", "nowhere.sqlite"),
        ("watch nowhere --every nan", "--every"),
        (f"new here/{'x' * 300}", "too long"),
    ],
)
def test_bad_input_is_one_line_exit_2_and_no_files(call: Call, tmp_path: Path, words: str, named: str) -> None:
    code, out, err = call(words)
    assert code == 2
    assert out == ""
    assert err.count("\n") == 1
    assert named in err
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_command_names_the_right_one_once(call: Call) -> None:
    code, _, err = call("rnu")
    assert code == 2
    assert err.count("Did you mean 'run'?") == 1


def test_a_file_that_is_named_is_replaced_and_a_folder_is_not(call: Call, tmp_path: Path) -> None:
    call(f"run --json --out here {QUICK}")
    before = {path: path.read_bytes() for path in (tmp_path / "here").rglob("*") if path.is_file()}
    (tmp_path / "card.md").mkdir()
    for words in ("report here --out here/checkpoint", "export here card.md"):
        code, _, err = call(words)
        assert code == 2
        assert "cannot be written: it is not a plain file; name another file" in err
    assert {path: path.read_bytes() for path in (tmp_path / "here").rglob("*") if path.is_file()} == before
    (tmp_path / "new.html").write_text("of before")
    assert call("report here --out new.html")[0] == 0
    assert "<html" in (tmp_path / "new.html").read_text("utf-8")
    code, _, err = call("export here model.pt")
    assert (code, "must end in .onnx" in err) == (2, True)


def test_a_wrong_flag_is_exit_2(call: Call) -> None:
    code, _, err = call("run --nonsense")
    assert code == 2
    assert "--nonsense" in err


def _commands(group: Any, *path: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _commands(command, *path, name)
        else:
            yield (*path, name), command


COMMANDS = dict(_commands(get_command(app)))


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_every_command_helps_with_an_example_that_parses(call: Call, path: tuple[str, ...]) -> None:
    code, out, _ = call(f"{' '.join(path)} --help")
    assert code == 0
    examples = re.findall(r"Example: fedspa (.+?)\s*$", COMMANDS[path].help, flags=re.M)
    assert examples
    assert examples[0].split(">")[0].strip() in " ".join(out.split())
    assert all(parameter.help for parameter in COMMANDS[path].params)  # lost by click 8.5 under typer 0.20
    for example in examples:
        words = shlex.split(example.split(">")[0])
        assert tuple(words[: len(path)]) == path
        COMMANDS[path].make_context(path[-1], words[len(path) :])  # unknown flags and missing ones raise


def test_new_makes_a_project_that_runs_and_touches_no_other(call: Call, tmp_path: Path) -> None:
    assert call("new study")[0] == 0
    config = (tmp_path / "study" / "config.toml").read_text("utf-8")
    code, out, err = call("new study")
    assert (code, out) == (2, "")
    assert "not empty" in err
    assert (tmp_path / "study" / "config.toml").read_text("utf-8") == config
    # In a process of its own, as a user runs it: the modules named my_data and my_model are then this folder's.
    words = ["run", "config.toml", "--json", "--set", "privacy.noise=seeded"]  # whose accuracy is the same each time
    command = [sys.executable, "-c", "from fedspa.cli import main; main()", *words]
    result = subprocess.run(command, cwd=tmp_path / "study", capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    summary = json.loads(result.stdout)
    assert summary["accuracy_last"] > 0.8
    assert summary["epsilon"] <= 4
    assert summary["engine"] in ("native", "generic")


def test_new_where_nothing_can_be_made_is_one_line(call: Call, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    code, _, err = call("new file/below")
    assert code == 2
    assert err.count("\n") == 1


def test_the_shell_can_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the script that --install-completion writes asks of the program."""
    for typed, wanted in (("fedspa led", "ledger"), ("fedspa run --res", "--resume"), ("fedspa ledger v", "verify")):
        environment = {"_FEDSPA_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(typed.count(" "))}
        program = "import sys; from fedspa.cli import main; sys.argv = ['fedspa']; main()"
        result = subprocess.run(
            [sys.executable, "-c", program], env={**os.environ, **environment}, capture_output=True, text=True
        )
        assert result.stdout.split() == [wanted], result.stderr


def test_help_is_quick_and_needs_no_torch() -> None:
    started = time.monotonic()
    command = [sys.executable, "-c", "import sys; from fedspa.cli import app; app(['--help'], standalone_mode=False); "]
    command[-1] += "assert not {'torch', 'scipy', 'dp_accounting', 'sklearn'} & set(sys.modules)"
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "privacy" in result.stdout
    assert time.monotonic() - started < 5  # 0.2 s alone; CI machines are busy
