"""The command line as a newcomer meets it: help, a run, JSON that parses, bad input in one line with exit code 2."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from fedspa.agent.ledger.ledger import Ledger
from fedspa.algorithms.cpsgd.plan import BinomialEvent
from fedspa.cli import app
from fedspa.data.findings import config_of_tables

Call = Callable[..., tuple[int, str, str]]

SETTING = "--batch 10 --records 600 --local-steps 300 --participations 5 --delta 1e-3"
QUICK = (
    "--set federation.rounds=2 --set federation.agents=4 --set federation.per_round=2 --set algorithm.local_steps=2 "
    "--set run.engine=generic"
)


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


def test_privacy_prints_no_epsilon_below_the_true_one(call: Call) -> None:
    sized = "--batch 10 --records 10 --local-steps 1 --participations 1 --delta 1e-3"
    _, out, _ = call(f"privacy {sized} --noise 2.5 --json")
    true = [row["epsilon"] for row in json.loads(out)["rows"]]
    _, out, _ = call(f"privacy {sized} --noise 2.5")
    printed = [float(cells[4]) for line in out.splitlines() if len(cells := line.split()) == 5 and cells[3] == "2.5"]
    assert len(printed) == len(true) == 3
    assert all(t <= p <= 1.0011 * t for t, p in zip(true, printed))
    assert any(float(f"{t:.4g}") < t for t in true)  # to the nearest, some would be below


def test_a_ledger_of_sums_is_shown_with_its_worst_case(call: Call, tmp_path: Path) -> None:
    summed = BinomialEvent(10, 143, 1, 650, 1, 60, "secure", members=10, colluders=2)
    with Ledger.open(tmp_path / "ledger.sqlite") as ledger:
        ledger.reserve("a", summed, "run", "0", announced=1)
    file = "ledger.sqlite --neighbours replace-one"
    (agent,) = json.loads(call(f"ledger show {file} --cap 5 --json")[1])["agents"]
    assert 0 < agent["epsilon"] < agent["epsilon_worst_case"]
    assert agent["epsilon_left"] == pytest.approx(5 - agent["epsilon_worst_case"])
    code, out, _ = call(f"ledger show {file} --cap 5")
    assert code == 0
    words = " ".join(out.split())
    assert (
        "worst case against all others together; a cap that allows no aggregation is held against the worst case"
        in words
    )
    assert "in sums over 10 members with up to 2 colluding" in words
    (tmp_path / "policy.toml").write_text(
        'epsilon = 5.0\ndelta = 1e-3\nneighbours = "replace-one"\nmin_noise_multiplier = 1\nmax_local_steps = 1\n'
        'max_rounds = 9\nmax_compression = 1\nclippings = ["coordinate"]\nmin_honest = 8\nmax_worst_case = 9\n'
    )
    (agent,) = json.loads(call("ledger show ledger.sqlite --policy policy.toml --json")[1])["agents"]
    assert agent["epsilon_left"] == pytest.approx(5 - agent["epsilon"])


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("run --set algorithm.compresion=1", "algorithm.compresion"),
        ("run --set privacy.delta=0.5", "privacy.delta"),
        ("run nowhere.toml", "nowhere.toml"),
        ("run --resume nowhere", "holds no run"),
        (f"privacy {SETTING} --epsilon 1 --noise 1", "--epsilon and --noise"),
        ("privacy --batch 10 --records 6 --local-steps 1 --participations 1 --delta 1e-3 --noise 1", "batch"),
        ("ledger show nowhere.sqlite", "nowhere.sqlite"),
        (f"new {'x' * 300}", "too long"),
    ],
)
def test_bad_input_is_one_line_exit_2_and_no_files(call: Call, tmp_path: Path, words: str, named: str) -> None:
    code, out, err = call(words)
    assert code == 2
    assert out == ""
    assert err.count("\n") == 1
    assert named in err
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_named_is_replaced_and_a_folder_is_not(call: Call, tmp_path: Path) -> None:
    call(f"run --json --out here {QUICK}")
    before = {path: path.read_bytes() for path in (tmp_path / "here").rglob("*") if path.is_file()}
    (tmp_path / "card.md").mkdir()
    for words in ("report here --out here/checkpoint", "report here --card --out card.md"):
        code, _, err = call(words)
        assert code == 2
        assert "cannot be written: it is not a plain file; name another file" in err
    assert {path: path.read_bytes() for path in (tmp_path / "here").rglob("*") if path.is_file()} == before
    (tmp_path / "new.html").write_text("of before")
    assert call("report here --out new.html")[0] == 0
    assert "<html" in (tmp_path / "new.html").read_text("utf-8")


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


def tables_of(folder: Path, *sites: str) -> None:
    folder.mkdir(exist_ok=True)
    for site in sites:
        rows = "\n".join(
            f"p{row // 2},{row},{30 + row},{'fm'[row % 2]},2020-01-{1 + row % 28:02},{'yes' if row % 3 else 'no'}"
            for row in range(40)
        )
        (folder / f"{site}.csv").write_text(f"patient,stay_id,age,sex,seen,ill\n{rows}\n")


@pytest.mark.parametrize(
    "words",
    [
        "study --table sites/north.csv sites/south.csv",  # as a shell expands --table sites/*.csv
        "study --table sites/[ns]*.csv",
    ],
)
def test_new_writes_a_config_for_tables_whose_ranges_are_filled_in_by_hand(
    call: Call, tmp_path: Path, words: str
) -> None:
    """For two tables of three: their names are listed."""
    tables_of(tmp_path / "sites", "north", "south", "west")
    code, out, err = call(f"new {words}")
    assert code == 0, err
    assert "fedspa data check sites/north.csv sites/south.csv --schema study/config.toml" in out
    assert "sites/north.csv" in (tmp_path / "study" / "README.md").read_text("utf-8")
    path = tmp_path / "study" / "config.toml"
    text = path.read_text("utf-8")
    after_names = text.partition("person")[2]
    assert not {"30", "69", '"f"', '"yes"'} & set(re.split(r"[^\w\"]+", after_names))  # no value of a record
    assert 'person = "patient"' in text
    assert '"stay_id" = {kind = "ignore"}' in text
    assert '"ill" = {kind = "flag", target = true}' in text
    code, _, err = call("data check sites/north.csv --schema study/config.toml")
    assert code == 2
    for line in (
        "[data.table.columns.age] range = [] is not filled in: give the smallest and largest value that can occur",
        "[data.table.columns.sex] categories = [] is not filled in: list the words that can occur",
        "[data.table.columns.seen] range = [] is not filled in: give the first and last day that can occur",
    ):
        assert line in err
    assert "at least" not in err
    filled = text.replace("range = []", "range = [18, 100]", 1).replace("categories = []", 'categories = ["f", "m"]')
    path.write_text(filled.replace("range = []", 'range = ["2020-01-01", "2020-12-31"], parts = ["days", "month"]'))
    assert call("data check sites/north.csv sites/south.csv --schema study/config.toml")[0] == 0
    code, out, err = call("run study/config.toml --set privacy.noise=seeded --set privacy.delta=1e-3 --json")
    assert code == 0, err
    summary = json.loads(out)
    assert summary["agent_names"] == ["north", "south"]
    assert (summary["unit"], summary["task"]) == ("person", "classification")


def test_help_is_quick_and_needs_no_torch() -> None:
    started = time.monotonic()
    command = [sys.executable, "-c", "import sys; from fedspa.cli import app; app(['--help'], standalone_mode=False); "]
    command[-1] += "assert not {'torch', 'scipy', 'dp_accounting', 'sklearn', 'ray'} & set(sys.modules)"
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "privacy" in result.stdout
    assert time.monotonic() - started < 5  # 0.2 s alone; CI machines are busy


@pytest.mark.parametrize(
    ("words", "ends"),
    [
        ("run mnist-s", {"mnist-secure-100"}),
        ("run own", {"own.toml"}),
        ("tune --set privacy.clip", {"privacy.clip=", "privacy.clip_value="}),
        ("audit --set algorithm.server_options.k", {"algorithm.server_options.kappa="}),
    ],
)
def test_a_shell_completes_configs_and_keys(tmp_path: Path, words: str, ends: set[str]) -> None:
    (tmp_path / "own.toml").touch()
    script = "import sys; sys.argv[0] = 'fedspa'; from fedspa.cli import main; main()"  # as the installed program
    command = [sys.executable, "-c", script]
    asked = {
        "_FEDSPA_COMPLETE": "complete_bash",
        "COMP_WORDS": f"fedspa {words}",
        "COMP_CWORD": str(len(words.split())),
    }
    found = subprocess.run(command, cwd=tmp_path, env=os.environ | asked, capture_output=True, text=True)
    assert set(found.stdout.split()) == ends, found.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("run --set model.name=logistc", "model.name = 'logistc' is unknown (did you mean 'logistic'?)"),
        ("privacy --batch 3 --delta=1e-3", "missing: --records, --local-steps, --participations ("),
        ("run confg.toml", "there is no config 'confg.toml'; shipped:"),
        ("run mnist-best.toml", "(did you mean 'mnist-best'?)"),
        ("site pin", "missing: FOLDER, APP ("),
    ],
)
def test_a_slip_is_answered_with_what_was_meant(call: Call, tmp_path: Path, words: str, said: str) -> None:
    (tmp_path / "config.toml").touch()
    code, out, err = call(words)
    assert (code, out) == (2, "")
    assert said in err
    assert len(err.splitlines()) == 1


def test_a_lone_copy_of_a_ledger_is_not_called_damaged(call: Call, tmp_path: Path) -> None:
    Ledger.open(tmp_path / "ledger.sqlite").close()
    (tmp_path / "copy.sqlite").write_bytes((tmp_path / "ledger.sqlite").read_bytes())
    code, out, _ = call("ledger verify copy.sqlite")
    assert code == 1
    assert "cannot be verified without its anchor file" in " ".join(out.split())
    assert "DAMAGED" not in out


@pytest.mark.parametrize(
    ("columns", "person"),
    [
        ("visit_date,patient_age,patient_id,outcome", "patient_id"),
        ("user_agent,user_id,outcome", "user_id"),
        ("customer_segment,spend,outcome", None),
        ("patientID,age,outcome", "patientID"),
        ("MRN,age,outcome", "MRN"),
        ("patient,age,outcome", "patient"),
        ("patient_id,user_id,outcome", None),
    ],
)
def test_new_names_the_person_only_by_an_id(tmp_path: Path, columns: str, person: str | None) -> None:
    """Another column would be a wrong unit of protection, which nobody has to look at."""
    table = tmp_path / "north.csv"
    table.write_text(f"{columns}\n{','.join('1' * len(columns.split(',')))}\n", "utf-8")
    text = config_of_tables([table])
    assert (f'person = "{person}"' in text) if person else ('\n# person = "…"' in text)
