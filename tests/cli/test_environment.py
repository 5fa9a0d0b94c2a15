"""`fedspa doctor`'s questions: what is missing is an answer with what to do, never an exception."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest

from fedspa.cli import environment
from fedspa.cli.environment import Answer, examine, ready
from fedspa.engine.native import library


def answer(topic: str, subject: str) -> Answer:
    (found,) = [a for a in examine() if (a.topic, a.subject) == (topic, subject)]
    return found


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The quickstart's round is left to the command's own test."""
    monkeypatch.setattr(
        environment, "_QUESTIONS", tuple(q for q in environment._QUESTIONS if q is not environment._quickstart)
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FEDSPA_DATA", raising=False)


def test_every_topic_has_an_answer_and_this_machine_is_ready() -> None:
    answers = examine()
    assert {a.topic for a in answers} == {"python", "torch", "engines", "extras", "data", "folder"}
    assert all(a.detail for a in answers)
    assert ready(answers)


def test_a_native_engine_that_was_not_built_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "library", lambda: None)
    monkeypatch.setattr(library.shutil, "which", lambda name: None)
    native = answer("engines", "native")
    assert native.works is False
    assert "install a C compiler" in native.detail
    assert ready(examine())  # the generic engine does without


def test_data_is_found_where_the_environment_points(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert answer("data", "cifar10").works is None
    folder = tmp_path / "elsewhere" / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    names = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
    for name in names:
        (folder / name).touch()
    monkeypatch.setenv("FEDSPA_DATA", str(folder.parent))
    found = answer("data", "cifar10")
    assert found.works
    assert "$FEDSPA_DATA" in found.detail
    (folder / names[0]).unlink()
    assert answer("data", "cifar10").works is None


def test_an_extra_outside_its_bounds_is_no(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ['flwr[simulation]<1.42,>=1.41; extra == "flower"', 'numpy>=1.26; extra == "sums"', "torch>=2.11"]
    monkeypatch.setattr(metadata, "requires", lambda name: lines)
    installed = {"flwr": "1.42.0", "numpy": "2.4.6"}
    monkeypatch.setattr(metadata, "version", lambda name: installed[name])
    extras = {a.subject: a for a in examine() if a.topic == "extras"}
    assert extras.keys() == {"flower", "sums"}
    assert extras["flower"].works is False
    assert "flwr 1.42.0 is not <1.42,>=1.41: pip install 'fedspa[flower]'" in extras["flower"].detail
    assert extras["sums"] == Answer("extras", "sums", True, "numpy 2.4.6")
    installed["flwr"] = "1.41.7.dev20261101"
    assert answer("extras", "flower").works


def test_an_extra_that_is_not_there_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "requires", lambda name: ['nowhere>=1; extra == "none"'])
    assert answer("extras", "none") == Answer("extras", "none", None, "no nowhere: pip install 'fedspa[none]'")


def test_a_folder_that_cannot_be_written_is_no(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    found = [a for a in examine() if a.topic == "folder"]
    assert [a.works for a in found] == [False]
    assert not ready(found)
