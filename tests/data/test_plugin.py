import sys
from pathlib import Path

import pytest

from fedspa.data import plugin
from fedspa.errors import ConfigError, DataError


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


def test_a_function_in_the_current_directory_is_found(here: Path) -> None:
    (here / "fedspa_plugin_here.py").write_text(
        "def make():\n    return 7\nclass Kit:\n    make = staticmethod(make)\n"
    )
    assert plugin.resolve("fedspa_plugin_here:make", key="data.name", error=DataError)() == 7
    assert plugin.resolve("fedspa_plugin_here:Kit.make", key="data.name", error=DataError)() == 7


def test_the_current_directory_cannot_shadow_an_installed_module(here: Path) -> None:
    (here / "wave.py").write_text("raise RuntimeError('shadowed')\n")
    assert callable(plugin.resolve("wave:open", key="data.name", error=DataError))


@pytest.mark.parametrize("name", ["a:", ":b", "a:b:c", "a b:c", "../a:b", "a.:b", "1a:b", "a:b()", "a:1"])
def test_other_forms_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"'package\.module:function'") as caught:
        plugin.resolve(name, key="model.name", error=ConfigError)
    assert "model.name" in str(caught.value)


@pytest.mark.parametrize(
    ("body", "function", "said"),
    [
        ("import fedspa_no_such_module", "make", r"cannot import.*ModuleNotFoundError[^;]*$"),
        ("raise RuntimeError('first\\nsecond')", "make", "RuntimeError: first"),
        ("raise SystemExit(3)", "make", "SystemExit"),
        ("def make(:", "make", "SyntaxError"),
        ("other = 1", "make", "has no 'make'"),
        ("make = 1", "make", "is a int, not a function"),
    ],
)
def test_every_failure_is_one_line_that_quotes_the_name(here: Path, body: str, function: str, said: str) -> None:
    module = f"fedspa_plugin_bad_{abs(hash(body))}"
    (here / f"{module}.py").write_text(body)
    with pytest.raises(DataError, match=said) as caught:
        plugin.resolve(f"{module}:{function}", key="data.name", error=DataError)
    assert "\n" not in str(caught.value)
    assert f"data.name = '{module}:{function}'" in str(caught.value)


def test_a_module_that_is_nowhere_comes_with_a_way_out(here: Path) -> None:
    with pytest.raises(DataError, match=r"; start fedspa in the folder that holds my_own_data, or install it$"):
        plugin.resolve("my_own_data.deep:load", key="data.name", error=DataError)
