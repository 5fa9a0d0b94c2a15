"""A schema: what a column becomes, by public constants alone; every wrong schema is one line."""

from __future__ import annotations

import math
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from fedspa.data.columns import (
    Category,
    Date,
    Flag,
    InvalidCell,
    Number,
    Schema,
    checked,
    flag,
    load_schema,
    number,
)
from fedspa.errors import ConfigError

AGE = {"kind": "number", "range": [0, 100]}
SICK = {"kind": "flag", "target": True}


def schema(**columns: dict[str, Any]) -> Schema:
    return checked({"columns": {"sick": SICK, **columns}})


def encoded(column: Number | Category | Flag | Date, *cells: object) -> list[list[float]]:
    read = column.reader()
    values = [read(cell) for cell in cells]
    filled = [column.missing_value if value is None else value for value in values]
    assert None not in filled
    return column.encoded(np.array(filled, dtype=np.float64)).tolist()


def test_a_number_is_clipped_to_its_range_and_scaled_to_one() -> None:
    column = Number(kind="number", range=[10, 20])
    assert encoded(column, "10", " 15 ", "20", "25", "-1e9", 12.5) == [[-1], [0], [1], [1], [-1], [-0.5]]
    assert encoded(column, "1e308", "-1e308") == [[1], [-1]]
    assert (column.offset, column.scale) == (15, 5)
    assert column.features("age") == ["age"]


@given(
    st.tuples(st.floats(-1e30, 1e30), st.floats(-1e30, 1e30)),
    st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1),
)
def test_a_scaled_number_lies_in_minus_one_to_one(bounds: tuple[float, float], values: list[float]) -> None:
    try:
        column = Number(kind="number", range=sorted(bounds))
    except ValidationError:
        return
    features = np.array(encoded(column, *values, *column.range))
    assert (np.abs(features) <= 1).all()
    assert features[-2:, 0].tolist() == pytest.approx([-1, 1], abs=1e-6)
    inside = np.clip(values, *column.range)
    assert features[:-2, 0] * column.scale + column.offset == pytest.approx(inside, abs=1e-6 * column.scale)


def test_a_missing_number_is_a_constant_or_has_a_feature_of_its_own() -> None:
    assert encoded(Number(kind="number", range=[0, 10], missing=10), "NA", "0") == [[1], [-1]]
    column = Number(kind="number", range=[0, 10], missing="indicator")
    assert encoded(column, "", "10") == [[0, 1], [1, 0]]
    assert column.features("age") == ["age", "age is missing"]


def test_a_date_is_its_days_in_the_range() -> None:
    column = Date(kind="date", range=["2020-01-01", "2020-01-11"])
    cells = ["2020-01-01", " 2020-01-06 ", "2020-01-11T23:59", date(2020, 1, 6), datetime(2020, 1, 6, 12), "1999-12-31"]
    assert encoded(column, *cells) == [[-1], [0], [1], [0], [0], [-1]]
    assert column.features("seen") == ["seen in days"]
    assert Date(kind="date", range=[date(2020, 1, 1), date(2020, 1, 11)]) == column
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"seen": pandas.to_datetime(["2020-01-06", None])})["seen"].tolist()
    assert encoded(Date(kind="date", range=column.range, missing="indicator"), *frame) == [[0, 0], [0, 1]]
    assert encoded(Date(kind="date", range=column.range, missing="2020-01-11"), "NA") == [[1]]


@given(st.dates(), st.permutations(["days", "month", "weekday"]))
def test_a_date_has_its_month_and_its_weekday(day: date, parts: list[str]) -> None:
    column = Date(kind="date", range=["2015-01-01", "2024-12-31"], parts=parts)
    features = column.features("seen")
    (values,) = encoded(column, day.isoformat())
    there = {name for name, value in zip(features, values) if value == 1 and "days" not in name}
    assert there == {f"seen in month {day.month}", f"seen on {day:%A}"}
    share = (day - date(2015, 1, 1)) / (date(2024, 12, 31) - date(2015, 1, 1))
    assert values[features.index("seen in days")] == pytest.approx(min(max(2 * share - 1, -1), 1))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"range": ["2015", "2024"]}, "write two days, as in"),
        ({"range": ["2024-01-01", "2015-01-01"]}, "the first day must be before the second"),
        ({"target": True}, "a date is no target"),
        ({"missing": "2030-01-01"}, "a day from 2015-01-01 to 2024-12-31"),
    ],
)
def test_a_wrong_date_column_is_one_line(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        schema(seen={"kind": "date", "range": ["2015-01-01", "2024-12-31"], **change})
    assert "\n" not in str(caught.value)


def test_categories_are_one_hot_in_the_order_of_the_schema() -> None:
    column = Category(kind="category", categories=["b", "a"], missing="indicator")
    assert encoded(column, "a", "b", "", " a ") == [[0, 1, 0], [1, 0, 0], [0, 0, 1], [0, 1, 0]]
    assert column.features("c") == ["c = b", "c = a", "c is missing"]
    assert encoded(Category(kind="category", categories=["b", "a"], missing="a"), "null") == [[0, 1]]


def test_a_new_category_is_odd_or_has_its_own_place() -> None:
    with pytest.raises(InvalidCell, match="no category"):
        Category(kind="category", categories=["a"]).reader()("z")
    other = Category(kind="category", categories=["a"], other=True)
    assert encoded(other, "z", "a", "A") == [[0, 1], [1, 0], [0, 1]]
    assert other.features("c") == ["c = a", "c is another"]


def test_numbers_of_every_type() -> None:
    cells = [1, 1.0, Decimal(1), np.int8(1), np.float32(1), "1", "+1.", "1e0", np.float64(1)]
    assert [number(cell) for cell in cells] == [1.0] * len(cells)
    nothing = [None, math.nan, Decimal("NaN"), Decimal("sNaN"), np.float32(math.nan), "nan", "N/A", ""]
    assert [number(cell) for cell in nothing] == [None] * len(nothing)


@given(st.one_of(st.text(), st.floats(), st.integers(), st.booleans(), st.none(), st.binary(), st.decimals()))
def test_any_cell_is_a_value_nothing_or_odd(cell: object) -> None:
    for read in (number, flag, Category(kind="category", categories=["a"], other=True).reader()):
        try:
            value = read(cell)
        except InvalidCell:
            continue
        assert value is None or math.isfinite(value)


def test_targets_decide_the_task() -> None:
    one = {"kind": "number", "range": [0, 1], "target": True}
    words = {"kind": "category", "categories": ["a", "b", "c"], "target": True}
    x = {"x": AGE}
    tasks = [
        ({**x, "y": SICK}, "classification", ("false", "true")),
        ({**x, "y": words}, "classification", ("a", "b", "c")),
        ({**x, "y": {**words, "other": True}}, "classification", ("a", "b", "c", "another")),
        ({**x, "y": one}, "regression", None),
        ({**x, "y": one, "z": one}, "regression", None),
        ({**x, "y": SICK, "z": SICK}, "multi-label", None),
    ]
    for columns, task, classes in tasks:
        made = checked({"columns": columns})
        assert (made.task, made.class_names) == (task, classes)
        assert made.classes == (None if classes is None else len(classes))
        assert made.features == ("x",)


WRONG = [
    ({"age": {"kind": "nmber", "range": [0, 1]}}, "data.table.columns.age.kind is 'nmber'; it must be one of 'number'"),
    ({"age": {"kind": "number"}}, "data.table.columns.age.range is missing"),
    ({"age": {"kind": "number", "range": [1, 0]}}, "data.table.columns.age.range: the first must be below the second"),
    (
        {"age": {**AGE, "rnge": 1}},
        "'data.table.columns.age.rnge'; allowed: deviation, kind, mean, missing, range, target",
    ),
    ({"age": {**AGE, "missing": 101}}, "data.table.columns.age: missing is 101"),
    ({"age": {**AGE, "target": "yes"}}, "data.table.columns.age.target is 'yes'"),
    ({"sex": {"kind": "category", "categories": ["a"], "missing": "b"}}, "data.table.columns.sex: missing is 'b'"),
    ({"age": {**AGE, "target": True}}, "several must be all numbers or all flags"),
    ({"sick": {**SICK, "missing": False}, "age": AGE}, "a target has no rule for missing values"),
    ({}, "makes 0 features"),
]


@pytest.mark.parametrize(("columns", "words"), WRONG, ids=[words for _, words in WRONG])
def test_a_wrong_column_is_one_line(columns: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        schema(**columns)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_config_is_a_schema(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text(
        '[privacy]\nepsilon = 2.0\n[data]\nname = "visits.csv"\nperson = "id"\n[data.table.columns]\n'
        'age = {kind = "number", range = [0, 120]}\nsick = {kind = "flag", target = true}\n'
    )
    made = load_schema(path, beside=frozenset({"name"}))
    assert made.person == "id"
    assert list(made.columns) == ["age", "sick"]
    with pytest.raises(ConfigError, match=r"unknown key 'data\.name'"):
        load_schema(path)


VALUES = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(),
        st.text(max_size=5),
        st.sampled_from(["number", "category", "flag", "ignore", "indicator", "refuse"]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(["kind", "range", "categories", "missing", "target", "other"]), inner),
    ),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(["columns", "agent", "person", "split", "test"]), VALUES), VALUES, VALUES)
def test_any_values_are_a_schema_or_one_line(values: dict[str, Any], one: Any, two: Any) -> None:
    for given_values in (values, {"columns": {"a": one, "b": two}}, {"columns": {"a": one, "sick": SICK}}):
        try:
            checked(given_values)
        except ConfigError as error:
            assert "\n" not in str(error)  # noqa: PT017
