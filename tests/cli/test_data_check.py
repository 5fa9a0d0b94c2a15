"""`fedspa data check`: everything that is wrong at once, for the operator's eyes; exit codes as everywhere."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fedspa.examples import count
from fedspa.runs.config import load
from fedspa.runs.setup import records_of

Call = Callable[..., tuple[int, str, str]]

SCHEMA = """
[data]
person = "patient"

[data.table]
agent = "hospital"
split = "part"

[data.table.columns]
age = {kind = "number", range = [0, 100], missing = 50}
sex = {kind = "category", categories = ["f", "m"]}
sick = {kind = "flag", target = true}
"""
HEADER = "hospital,patient,part,age,sex,sick\n"
GOOD = HEADER + "north,p1,train,50,f,yes\nnorth,p1,train,,m,no\nsouth,p2,train,120,m,no\nsouth,p3,test,1,f,no\n"


@pytest.fixture
def check(call: Call, tmp_path: Path) -> Callable[..., tuple[int, str, str]]:
    """Return what `fedspa data check` says of a table with this text. It writes nothing."""

    def run(text: str, *words: str, schema: str = SCHEMA, name: str = "table.csv") -> tuple[int, str, str]:
        Path(name).write_text(text)
        Path("schema.toml").write_text(schema)
        before = {path: path.read_bytes() for path in tmp_path.iterdir()}
        outcome = call(f"data check {name} --schema schema.toml", *words)
        assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
        return outcome

    return run


def test_a_sound_table(check: Call) -> None:
    code, out, err = check(GOOD)
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        "column 'age': values missing: 1; the schema says what they become",
        "column 'age': values outside its range: 1; they are clipped to it",
        "rows for testing: 1",
        "agents: 2; training rows: 'south' 1, 'north' 2",
        "persons: 2; training rows of one of them: at most 2",
        "table.csv: valid; 4 rows, 3 features, classification",
    ]


def test_everything_that_is_wrong_at_once(check: Call) -> None:
    bad = "north,p1,train,abc,x,yes\nnorth,,train,x,f,\nnorth,p1,train,1,y,no\na,b\nnorth,p9,train,y,z,maybe\n"
    code, out, err = check(GOOD + bad)
    assert (code, err) == (1, "")
    for line in (
        "column 'age': a value is no finite number ('abc', 'x', 'y'), in 3 rows, the first in line 6; write it as",
        "column 'sex': a value is no category of it ('x', 'y', 'z'), in 3 rows, the first in line 6; the schema lists",
        "column 'patient': a value is missing, in 1 row, the first in line 7; every record must have it",
        "column 'sick': a value is missing, in 1 row, the first in line 7; a target must not be missing",
        "column 'sick': a value is no word for true or false ('maybe'), in 1 row, the first in line 10",
        "a row has 2 fields, in 1 row, the first in line 9; the first line names 6 columns",
        "table.csv: not valid; 9 rows, 3 features, classification; bad rows: 5, which count as zero at a site",
    ):
        assert f"\n{line}" in f"\n{out}"
    assert "column 'sick': values missing" not in out  # they have no rule


def test_columns_that_do_not_fit(check: Call) -> None:
    code, out, _ = check(GOOD.replace("age", "aeg", 1))
    assert code == 1
    assert "column 'age': it is not there, and the schema names it" in out
    assert "column 'aeg': the schema does not name it; kind = 'ignore' leaves it out" in out
    assert "not valid; 4 rows" in out  # the other columns were read all the same
    assert "bad rows" not in out
    code, out, _ = check(GOOD.replace("sex", "age", 1))
    assert code == 1
    assert "column 'age': it is there more than once; no row was read" in out
    code, out, _ = check("a,b\n1,2\n")
    assert code == 1
    assert out.count("it is not there") == 6


def test_as_json(check: Call) -> None:
    code, out, _ = check(GOOD, "--json")
    found = json.loads(out)
    assert code == 0
    assert found["valid"] is True
    assert (found["rows"], found["bad_rows"], found["wrong"], len(found["notes"])) == (4, 0, [], 5)
    code, out, _ = check(GOOD + "north,p1,train,50,x,yes\n", "--json")
    assert code == 1
    (problem,) = json.loads(out)["wrong"]
    assert problem.startswith("column 'sex': a value is no category of it ('x'), in 1 row, the first in line 6;")


HELD_OUT = """
[data]
name = "table.csv"
holdout = {share}
{person}
[data.table]
agent = "hospital"
[data.table.columns]
age = {{kind = "number", range = [0, 100]}}
sick = {{kind = "flag", target = true}}
{ignored}
"""


@pytest.mark.parametrize("persons", [False, True])
def test_what_a_run_holds_out_is_told_as_the_run_does_it(check: Call, persons: bool) -> None:
    whose = {"person": 'person = "patient"', "ignored": ""}
    whose = whose if persons else {"person": "", "ignored": 'patient = {kind = "ignore"}'}
    rows = [f"{('north', 'south')[n % 3 % 2]},p{n % 3}-{n // 9},{n},{'yes' if n % 2 else 'no'}" for n in range(60)]
    text, schema = "\n".join(["hospital,patient,age,sick", *rows]) + "\n", HELD_OUT.format(share=0.25, **whose)
    code, out, _ = check(text, schema=schema)
    assert code == 0
    settings = ["data.dir=.", "federation.agents=2", "federation.per_round=2", "privacy.epsilon=1.0"]
    data = records_of(load(Path("schema.toml"), settings))
    held = count(data.test_y)
    assert f"rows held out for testing, by data.holdout = 0.25: {held}; left: {60 - held}\n" in out
    assert data.owners is not None
    north, south = np.bincount(data.owners).tolist()
    assert f"training rows: 'south' {south}, 'north' {north}\n" in out
    if data.persons is not None:
        times = np.unique(data.persons, return_counts=True)[1]
        assert f"persons: {len(times)}; training rows of one of them: at most {times.max()}\n" in out


def test_what_a_cell_holds_cannot_steer_the_terminal(check: Call) -> None:
    _, out, _ = check(GOOD + "\x1b[2Jnorth,p1,train,1,\x1b[31m,yes\n")
    assert "\x1b" not in out


def test_several_files_have_a_verdict_each(check: Call, call: Call) -> None:
    check(GOOD)
    Path("bad.csv").write_text(HEADER + "south,p9,train,old,f,no\n")
    code, out, _ = call("data check table.csv bad.csv --schema schema.toml")
    assert code == 1
    assert "table.csv: valid; 4 rows" in out
    assert "bad.csv: not valid; 1 rows" in out
    _, out, _ = call("data check table.csv bad.csv --schema schema.toml --json")
    assert [each["valid"] for each in json.loads(out)] == [True, False]
