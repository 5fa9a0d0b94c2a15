"""What a user of the package meets first: its names, its help, its examples, its warnings."""

from __future__ import annotations

import doctest
import inspect
import pydoc
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import ALGORITHMS, SMALL, small
from torch import nn

import fedspa
from fedspa.errors import FedspaWarning

FUNCTIONS = [name for name in fedspa.__all__ if inspect.isfunction(getattr(fedspa, name))]


def test_dir_shows_the_public_names_and_nothing_else() -> None:
    import fedspa.runs.config  # which becomes an attribute of the package

    assert dir(fedspa) == sorted(fedspa.__all__)
    for name in fedspa.__all__:
        assert getattr(fedspa, name).__name__.rpartition(".")[2] == name
    with pytest.raises(AttributeError, match=r"has no attribute 'rnu'; it has Config, Dataset, .*, run, tune"):
        _ = fedspa.rnu


def test_type_checkers_are_told_the_same_names() -> None:
    source = Path(fedspa.__file__).read_text("utf-8").partition("if TYPE_CHECKING:")[2].partition("\n\n#")[0]
    told = [name.strip() for line in source.splitlines() for name in line.partition(" import ")[2].split(",")]
    assert sorted(name for name in told if name not in ("", "Any")) == sorted(fedspa.__all__)


def test_help_on_the_package_names_everything() -> None:
    text = pydoc.plain(pydoc.render_doc(fedspa))
    assert "fedspa.run({" in text
    for name in fedspa.__all__:
        assert name in text, name


@pytest.mark.parametrize("name", FUNCTIONS)
def test_help_on_a_function_says_what_goes_in_and_out(name: str) -> None:
    function = getattr(fedspa, name)
    text = pydoc.plain(pydoc.render_doc(function))
    assert f"\n{name}(" in text
    arguments = [key for key in function.__annotations__ if key != "return"]
    told = text.partition("Args:")[2].partition("Returns:")
    assert told[1] == "Returns:"
    for argument in arguments:
        assert f"    {argument}: " in told[0], f"say what {argument} of fedspa.{name} is"


def _documented() -> Iterator[Any]:
    finder = doctest.DocTestFinder()
    names = {name: getattr(fedspa, name) for name in fedspa.__all__}
    names |= {f"guard.{name}": getattr(fedspa.guard, name) for name in fedspa.guard.__all__}
    for name, thing in names.items():
        for found in finder.find(thing, name, globs={}):
            if found.examples:
                yield pytest.param(found, id=found.name)


@pytest.mark.parametrize("example", list(_documented()))
def test_its_example_runs(example: doctest.DocTest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    said: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FedspaWarning)  # two rounds learn little
        ended = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example, out=said.append)
    assert ended.failed == 0, "".join(said)


def test_most_functions_have_an_example() -> None:
    shown = {found.values[0].name.partition(".")[0] for found in _documented()}
    assert shown >= {*FUNCTIONS, "RunResult"} - {"tune", "from_partitioner"}


def test_importing_it_is_quick() -> None:
    code = "import fedspa, sys; dir(fedspa); sys.exit('torch' in sys.modules or 'rich' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_warnings_stand_at_the_callers_line_once_each(tmp_path: Path) -> None:
    class Mixing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(64, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.flatten(1)
            return self.head(x - x.mean(0))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        fedspa.run(small(tmp_path / "run", model={"name": "logistic"}), module=Mixing())  # this very line
    ours = [warning for warning in caught if issubclass(warning.category, FedspaWarning)]
    kinds = [warning.category.__name__ for warning in ours]
    assert set(kinds) >= {"SeededNoiseWarning", "MixingWarning"}
    assert len({str(warning.message) for warning in ours}) == len(ours)
    for warning in ours:
        line = Path(warning.filename).read_text("utf-8").splitlines()[warning.lineno - 1]
        assert line.endswith("# this very line"), warning


def test_what_a_summary_notes_is_a_warning(tmp_path: Path) -> None:
    with pytest.warns(fedspa.RunWarning, match="fedavg promises no privacy"):
        result = fedspa.run(small(tmp_path / "run", **ALGORITHMS["fedavg"]))
    with pytest.warns(fedspa.RunWarning) as again:  # of a finished run that is opened again
        fedspa.run(resume=result.folder)
    assert [str(warning.message) for warning in again] == result.summary["warnings"]


def test_seeded_noise_is_said_by_its_own_warning_only(tmp_path: Path) -> None:
    with pytest.warns(FedspaWarning) as caught:
        result = fedspa.run(small(tmp_path / "run"))
    seeded = [warning for warning in caught if "seeded" in str(warning.message).lower()]
    assert [warning.category for warning in seeded] == [fedspa.SeededNoiseWarning]
    assert any(note.startswith("seeded noise") for note in result.summary["warnings"])
    assert SMALL["privacy"]["noise"] == "seeded"
