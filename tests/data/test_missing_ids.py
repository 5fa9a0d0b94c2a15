"""Ids that are missing, in every form in which programs write that, wherever ids come in.

Records that share what stands for a missing id would be one person's or one agent's: of 700 records 234 once were.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import fedspa
from fedspa.data.columns import checked
from fedspa.data.table import read_table
from fedspa.errors import DataError

X, Y = np.arange(12, dtype=np.float32).reshape(4, 3), np.array([0, 1, 1, 0])
WORDS = [
    "",
    "  ",
    "\u00a0",
    "\u200b",
    "nan",
    "NaN",
    "-nan",
    "NA",
    "N/A",
    "#N/A",
    "null",
    "(null)",
    "None",
    "<NA>",
    "NaT",
    "-",
    "?",
    "-1",
]
CELLS = [None, float("nan"), float("inf"), np.float32("nan"), pd.NA, pd.NaT, np.ma.masked, -1, -1.0]
FORMS: dict[str, Any] = {
    "numpy text": np.array(["ann", "bob", np.nan, "ann"]),
    "numpy text of None": np.array(["ann", "bob", None, "ann"]).astype(str),
    "numpy bytes": np.array([b"ann", b"bob", b" ", b"ann"]),
    "numpy objects": np.array(["ann", "bob", np.nan, "ann"], dtype=object),
    "numpy floats": np.array([3.0, 4.0, np.nan, 3.0]),
    "a NaN that was cast": np.array([3, 4, np.iinfo(np.int64).min, 3]),
    "a NaN that was cast to 32 bits": np.array([3, 4, np.iinfo(np.int32).min, 3], dtype=np.int32),
    "numpy dates": np.array(["2020-01-01", "2020-01-02", "NaT", "2020-01-01"], dtype="datetime64[D]"),
    "masked numbers": np.ma.array([3, 4, 5, 3], mask=[0, 0, 1, 0]),
    "masked texts": np.ma.array(["ann", "bob", "cleo", "ann"], mask=[0, 0, 1, 0]),
    "a list of a masked array": list(np.ma.array([3, 4, 5, 3], mask=[0, 0, 1, 0])),
    "torch floats": torch.tensor([3.0, 4.0, torch.nan, 3.0]),
    "pandas texts": pd.Series(["ann", "bob", None, "ann"], dtype="string"),
    "pandas objects": pd.Series(["ann", "bob", None, "ann"], dtype=object),
    "pandas numbers": pd.Series([3, 4, None, 3], dtype="Int64"),
    "pandas categories": pd.Series(["ann", "bob", None, "ann"], dtype="category"),
    "pandas dates": pd.Series(pd.to_datetime(["2020-01-01", "2020-01-02", None, "2020-01-01"])),
    "pandas.factorize": pd.factorize(pd.Series(["ann", "bob", None, "ann"]))[0],
    **{f"the text {word!r}": ["ann", "bob", word, "ann"] for word in WORDS},
    **{f"the cell {cell!r}": ["ann", "bob", cell, "ann"] for cell in CELLS},
}
forms = pytest.mark.parametrize("ids", FORMS.values(), ids=FORMS)


@forms
@pytest.mark.parametrize("key", ["persons", "owners"])
def test_a_simulation_refuses_them_and_says_which(key: str, ids: Any) -> None:
    says = f"data 'd': {key}: 1 of 4 ids are missing, as .* of the records 2: .* or take those records out"
    with pytest.raises(DataError, match=says):
        fedspa.from_arrays(X, Y, X, Y, name="d", **{key: ids})


COLUMNS = {"age": {"kind": "number", "range": [0, 100]}, "ill": {"kind": "flag", "target": True}}
SCHEMA = checked({"columns": COLUMNS, "person": "who", "agent": "where"})


@pytest.mark.parametrize("key", ["who", "where"])
@pytest.mark.parametrize("cell", [*WORDS, *CELLS], ids=repr)
def test_a_table_refuses_them(key: str, cell: object) -> None:
    rows: dict[str, list[Any]] = {"age": [1, 2, 3, 4], "ill": [0, 1, 1, 0], "who": [*"abca"], "where": [*"nsns"]}
    rows[key][2] = cell
    frame = pd.DataFrame({name: pd.Series(values, dtype=object) for name, values in rows.items()})
    with pytest.raises(DataError, match=rf"{key}.* is missing.*fill it in, or take the row out"):
        fedspa.from_table(frame, SCHEMA)


@pytest.mark.parametrize("word", WORDS, ids=repr)
def test_a_sites_table_counts_them_as_bad(word: str, tmp_path: Path) -> None:
    path = tmp_path / "visits.csv"
    path.write_text(
        "age,ill,who,where\n" + "".join(f"{i},yes,{who},n\n" for i, who in enumerate(("a", "b", word, "a")))
    )
    found = read_table(path, SCHEMA, strict=False)
    assert found.persons.tolist() == [0, 1, -1, 0]
    assert found.bad == (2,)


@forms
def test_a_site_counts_them_as_bad_and_sends_nothing_of_them(ids: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error would tell the server; the operator finds their numbers among the bad records."""
    pytest.importorskip("flwr")
    from fedspa.flower import site, site_records

    monkeypatch.setattr(site_records, "_call", lambda *_: (X, np.zeros(4), ids))
    node = {"agent": "north", "data": "a:b", "task": "regression"}
    own = site_records.load(node, None)
    assert 2 in own.bad
    assert own.persons[2] == -1
    if own.bad == (2,):  # dates are no ids at all
        assert own.persons.tolist() == [0, 1, -1, 0]
        assert "number 2 from" in site.bad_records(own, None, "a:b")
