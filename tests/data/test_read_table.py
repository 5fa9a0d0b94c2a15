"""Tables by schema: good ones become tensors, bad rows are one line, or at a site bad records and not a word."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedspa.data.columns import Schema, checked
from fedspa.data.findings import examine
from fedspa.data.table import Table, from_frame, read_table
from fedspa.errors import DataError

COLUMNS: dict[str, dict[str, Any]] = {
    "age": {"kind": "number", "range": [0, 100], "missing": "indicator"},
    "sex": {"kind": "category", "categories": ["f", "m"]},
    "smoker": {"kind": "flag", "missing": False},
    "note": {"kind": "ignore"},
    "score": {"kind": "number", "range": [0, 400], "target": True},
}
SCHEMA = checked({"columns": COLUMNS, "agent": "hospital", "person": "patient"})
HEADER = "hospital,patient,note,age,sex,smoker,score"
ROWS = ["north,p1,hello,50,f,yes,100", "south,p2,,,m,,400", "north,p1,,200,m,no,200"]
X = [[0, 0, 1, 0, 1], [0, 1, 0, 1, 0], [1, 0, 0, 1, 0]]
Y = [-0.5, 1, 0]


def written(folder: Path, *lines: str | bytes, end: bytes = b"\n") -> Path:
    path = folder / "table.csv"
    path.write_bytes(b"".join((line.encode() if isinstance(line, str) else line) + end for line in lines))
    return path


def refused(path: Path, schema: Schema = SCHEMA, *, strict: bool = True) -> str:
    with pytest.raises(DataError) as caught:
        read_table(path, schema, strict=strict)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def same(one: Table, other: Table) -> bool:
    return (
        torch.equal(one.x.nan_to_num(9), other.x.nan_to_num(9))
        and torch.equal(one.y, other.y)
        and all(np.array_equal(getattr(one, key), getattr(other, key)) for key in ("owners", "persons", "test"))
        and one.bad == other.bad
    )


def test_a_table_becomes_features_targets_owners_and_persons(tmp_path: Path) -> None:
    table = read_table(written(tmp_path, HEADER, *ROWS), SCHEMA, strict=True)
    assert SCHEMA.features == ("age", "age is missing", "sex = f", "sex = m", "smoker")
    assert table.x.dtype == table.y.dtype == torch.float32
    assert table.x.tolist() == X
    assert table.y.tolist() == Y
    assert table.owners.tolist() == [0, 1, 0]
    assert table.persons.tolist() == [0, 1, 0]
    assert table.owners.dtype == table.persons.dtype == np.int64
    assert table.test is None
    assert table.bad == ()
    assert (table.target_scale, table.target_offset) == ((200.0,), (200.0,))


def test_bom_carriage_returns_quotes_blanks_and_empty_lines(tmp_path: Path) -> None:
    first = read_table(written(tmp_path, HEADER, *ROWS), SCHEMA, strict=True)
    odd_looking = [
        b"\xef\xbb\xbf" + HEADER.replace("age", '" age "').encode(),
        'north,p1,"say ""no"", or not",50,"f",yes,100',
        ROWS[1].replace("m", " m "),
        "",
        ROWS[2],
        "",
    ]
    path = written(tmp_path, *odd_looking, end=b"\r\n")
    assert same(first, read_table(path, SCHEMA, strict=True))
    path.write_bytes(path.read_bytes().rstrip())  # no line feed at the end
    assert same(first, read_table(path, SCHEMA, strict=True))


def test_records_for_testing(tmp_path: Path) -> None:
    schema = checked({"columns": COLUMNS, "agent": "hospital", "person": "patient", "split": "part"})
    rows = [f"{row},{part}" for row, part in zip(ROWS, ("test", "train", "train"))]
    table = read_table(written(tmp_path, HEADER + ",part", *rows), schema, strict=True)
    assert table.test.tolist() == [True, False, False]
    assert table.owners.tolist() == [-1, 0, 1]  # numbers of training records, without a gap
    assert table.persons.tolist() == [-1, 0, 1]
    assert "line 2, column 'part': a value is missing" in refused(
        written(tmp_path, HEADER + ",part", ROWS[0] + ","), schema
    )


@pytest.mark.parametrize(
    ("targets", "y", "dtype"),
    [
        ({"c": {"kind": "category", "categories": ["u", "v"], "other": True}}, [1, 2], torch.int64),
        ({"a": {"kind": "flag"}, "b": {"kind": "flag"}}, [[1, 0], [0, 1]], torch.float32),
        ({"n": {"kind": "number", "range": [0, 2]}}, [1, -0.5], torch.float32),
        (
            {"n": {"kind": "number", "range": [0, 2]}, "m": {"kind": "number", "range": [0, 8]}},
            [[1, 0], [-0.5, 1]],
            torch.float32,
        ),
    ],
)
def test_the_types_of_targets(tmp_path: Path, targets: dict[str, Any], y: list[Any], dtype: torch.dtype) -> None:
    columns: dict[str, Any] = {name: {"kind": "ignore"} for name in "abcnm"}
    columns |= {name: column | {"target": True} for name, column in targets.items()}
    schema = checked({"columns": columns | {"x": {"kind": "flag"}}})
    table = read_table(written(tmp_path, "a,b,c,n,m,x", "yes,no,v,2,4,1", "no,yes,w,.5,9,0"), schema, strict=True)
    assert table.y.tolist() == y
    assert table.y.dtype == dtype
    assert table.owners is None
    assert table.persons is None
    table = read_table(written(tmp_path, "a,b,c,n,m,x", "yes,yes,w,2,4,?"), schema, strict=False)
    assert table.bad == (0,)
    assert not table.y.any()


BAD_ROWS = [
    ("north,p1,,abc,f,yes,1", "column 'age': 'abc' is no finite number"),
    ("north,p1,,5,x,yes,1", "column 'sex': 'x' is no category of it; the schema lists ['f', 'm']"),
    ("north,p1,,5,,yes,1", "column 'sex': a value is missing; fill it in, or set data.table.columns.sex.missing"),
    ("north,p1,,5,f,maybe,1", "column 'smoker': 'maybe' is no word for true or false"),
    ("north,p1,,5,f,yes,", "column 'score': a value is missing"),
    ("north,,,5,f,yes,1", "column 'patient': a value is missing"),
    ("north,p1,,5,f,yes", "the row has 6 fields; the first line names 7 columns"),
    ('north,p1,"open,5,f,yes,1', "the row has quotes that do not match"),
    (b"north,p1,\xff,5,f,yes,1", "the row is not UTF-8"),
    ("north,p1,a\rb,5,f,yes,1", "the row has a carriage return in it"),
    (f"north,p1,{'a' * 200_000},5,f,yes,1", "the row has a field that is too long"),
    (f"north,p1,{'a' * 3_000_000},5,f,yes,1", "the row is too long"),
]


@pytest.mark.parametrize(("row", "words"), BAD_ROWS, ids=[words for _, words in BAD_ROWS])
def test_a_bad_row_is_one_line_or_a_bad_record(tmp_path: Path, row: str | bytes, words: str) -> None:
    path = written(tmp_path, HEADER, ROWS[0], row, ROWS[2])
    assert f"{path}, line 3" in refused(path)
    assert words in refused(path)
    table = read_table(path, SCHEMA, strict=False)
    assert table.bad == (1,)
    assert table.x[1].isnan().all()
    assert table.y.tolist() == [-0.5, 0, 0]
    assert table.x[[0, 2]].tolist() == [X[0], X[2]]
    assert table.owners is None  # what lies at a site is its own
    assert table.persons[0] == table.persons[2]


def test_an_agent_must_have_a_name_in_the_simulator_and_none_at_a_site(tmp_path: Path) -> None:
    path = written(tmp_path, HEADER, ROWS[0].replace("north", ""))
    assert "line 2, column 'hospital': a value is missing" in refused(path)
    assert read_table(path, SCHEMA, strict=False).bad == ()
    path = written(tmp_path, HEADER.removeprefix("hospital,"), ROWS[0].removeprefix("north,"))
    assert "has no column 'hospital'" in refused(path)
    assert read_table(path, SCHEMA, strict=False).x.tolist() == X[:1]


SHARED = [
    ("", "is empty"),
    (HEADER, "has no records"),
    (HEADER.replace("sex,", "") + "\na", "has no column 'sex', which the schema names; it has 'hospital', 'patient'"),
    (HEADER + ",x\na", "has the column 'x', which the schema does not name"),
    (HEADER + ",age\na", "has more than one column 'age'"),
    (HEADER.replace(",", ";") + "\na", "has no comma, but ';'"),
    (f"{HEADER}\n{ROWS[0]}\n".replace("\n", "\r"), "line 1, which names the columns, has a carriage return in it"),
    ('"' + HEADER + "\na", "line 1, which names the columns, has quotes that do not match"),
]


@pytest.mark.parametrize(("text", "words"), SHARED, ids=[words for _, words in SHARED])
@pytest.mark.parametrize("strict", [True, False])
def test_what_all_records_share_is_refused(tmp_path: Path, text: str, words: str, strict: bool) -> None:
    (tmp_path / "table.csv").write_bytes(text.encode())
    assert words in refused(tmp_path / "table.csv", strict=strict)


@settings(max_examples=60)
@given(
    place=st.integers(0, 2),
    line=st.one_of(
        st.binary(min_size=1, max_size=60),
        st.lists(st.sampled_from(["north", "p1", "", "5", "f", "yes", '"', '""', "NA", "1e999", "x"]), max_size=9).map(
            lambda cells: ",".join(cells).encode() or b","
        ),
    ),
)
def test_a_row_is_read_by_itself(tmp_path_factory: pytest.TempPathFactory, place: int, line: bytes) -> None:
    """Whatever stands in one line: no error, as many records, and all others to the bit what they were."""
    line = line.replace(b"\n", b" ")
    if not line.rstrip(b"\r"):  # an empty line is no record
        line = b","
    folder = tmp_path_factory.mktemp("rows")
    before = read_table(written(folder, HEADER, *ROWS), SCHEMA, strict=False)
    lines: list[str | bytes] = [*ROWS]
    lines[place] = line
    after = read_table(written(folder, HEADER, *lines), SCHEMA, strict=False)
    others = [i for i in range(3) if i != place]
    assert len(after.x) == len(after.y) == 3
    assert torch.equal(after.x[others], before.x[others])
    assert torch.equal(after.y[others], before.y[others])
    assert set(after.bad) <= {place}
    assert bool(after.x[place].isnan().any()) == (after.bad == (place,))
    assert torch.isfinite(after.y).all()


@given(st.binary(max_size=300))
def test_any_bytes_are_a_table_or_one_line(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    folder = tmp_path_factory.mktemp("bytes")
    for start in (b"", HEADER.encode() + b"\n"):
        (folder / "table.csv").write_bytes(start + content)
        for strict in (True, False):
            try:
                read_table(folder / "table.csv", SCHEMA, strict=strict)
            except DataError as error:
                assert "\n" not in str(error)  # noqa: PT017


# Parquet and pandas


def arrow(**changed: Any) -> Any:
    pa = pytest.importorskip("pyarrow")
    columns = {
        "hospital": ["north", "south", "north"],
        "patient": pa.array([1, 2, 1]),
        "note": pa.array([[1], [], None]),  # of whatever type: it is not read
        "age": pa.array([50, None, 200], pa.int16()),
        "sex": pa.array(["f", "m", "m"]).dictionary_encode(),
        "smoker": [True, None, False],
        "score": pa.array([100.0, 400.0, 200.0], pa.float32()),
    }
    return pa.table(columns | changed)


def parquet(path: Path, table: Any) -> Path:
    from pyarrow import parquet

    parquet.write_table(table, path)
    return path


def test_parquet_gives_what_csv_gives(tmp_path: Path) -> None:
    first = read_table(written(tmp_path, HEADER, *ROWS), SCHEMA, strict=True)
    for name in ("table.parquet", "table.pq"):
        assert same(first, read_table(parquet(tmp_path / name, arrow()), SCHEMA, strict=True))
    shown = read_table(parquet(tmp_path / "table.parquet", arrow()), SCHEMA, strict=False)
    assert torch.equal(shown.x, first.x)


def test_text_in_parquet_that_is_not_utf8_costs_one_record(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    bad = pa.array([b"f", b"\xff", b"m"]).view(pa.string())
    path = parquet(tmp_path / "table.parquet", arrow(sex=bad))
    assert "row 2, column 'sex'" in refused(path)
    table = read_table(path, SCHEMA, strict=False)
    assert table.bad == (1,)
    assert table.x[[0, 2]].tolist() == [X[0], X[2]]


@settings(max_examples=15)
@given(st.binary(max_size=50), st.floats(0, 1, exclude_max=True))
def test_any_bytes_are_parquet_or_one_line(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, place: float
) -> None:
    folder = tmp_path_factory.mktemp("bytes")
    whole = parquet(folder / "whole.parquet", arrow()).read_bytes()
    start = int(place * len(whole))
    for damaged in (content, b"PAR1" + content + b"PAR1", whole[:start] + content + whole[start + len(content) :]):
        (folder / "table.parquet").write_bytes(damaged)
        try:
            read_table(folder / "table.parquet", SCHEMA, strict=False)
        except DataError as error:
            assert "\n" not in str(error)  # noqa: PT017


def test_a_frame_gives_what_csv_gives(tmp_path: Path) -> None:
    pd = pytest.importorskip("pandas")
    path = written(tmp_path, HEADER, *ROWS)
    first = read_table(path, SCHEMA, strict=True)
    assert same(first, from_frame(pd.read_csv(path), SCHEMA))
    assert same(first, from_frame(pd.read_csv(path).convert_dtypes(), SCHEMA))
    assert same(first, from_frame(arrow().to_pandas(), SCHEMA))


def test_dates_in_csv_parquet_and_frames_are_the_same(tmp_path: Path) -> None:
    pa, pandas = pytest.importorskip("pyarrow"), pytest.importorskip("pandas")
    seen = {"kind": "date", "range": ["2020-01-01", "2020-12-31"], "parts": ["days", "month"], "missing": "indicator"}
    schema = checked({"columns": {"seen": seen, "sick": {"kind": "flag", "target": True}}})
    days, sick = ["2020-02-29", None, "2021-01-01"], [True, False, True]
    (tmp_path / "a.csv").write_text("seen,sick\n2020-02-29,1\n,0\n2021-01-01,1\n")
    frame = pandas.DataFrame({"seen": pandas.to_datetime(days), "sick": sick})
    tables = [read_table(tmp_path / "a.csv", schema, strict=True), from_frame(frame, schema)]
    for kind in (pa.date32(), pa.timestamp("ms")):
        path = parquet(tmp_path / "a.parquet", pa.table({"seen": pa.array(frame["seen"], kind), "sick": sick}))
        tables.append(read_table(path, schema, strict=True))
    assert all(table.x.tolist() == tables[0].x.tolist() for table in tables)
    assert tables[0].x[1].tolist() == [0.0] * 13 + [1.0]
    assert examine(tmp_path / "a.csv", schema).notes[1:] == [
        "column 'seen': values outside its range: 1; they are clipped to it"
    ]
