import os
import sys
from pathlib import Path

import pytest

from fedspa.data import plugin
from fedspa.errors import ConfigError, DataError
from fedspa.runs.config import Config, load, to_toml


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


def test_the_current_directory_cannot_shadow_an_installed_module(here: Path) -> None:
    (here / "wave.py").write_text("raise RuntimeError('shadowed')\n")
    assert callable(plugin.resolve("wave:open", key="data.name", error=DataError))


@pytest.mark.parametrize(
    ("body", "function", "said"),
    [
        ("import fedspa_no_such_module", "make", r"cannot import.*ModuleNotFoundError[^;]*$"),
        ("raise SystemExit(3)", "make", "SystemExit"),
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


def project(folder: Path, number: int, top: str = "fedspa_plugin_project") -> Path:
    """A project with a config, and a module of its own by a name that others use too."""
    folder.mkdir()
    (folder / f"{top}.py").write_text(f"import fedspa_plugin_helper\ndef make():\n    return {number}\n")
    (folder / "fedspa_plugin_helper.py").write_text("")
    path = folder / "config.toml"
    path.write_text(f'[model]\nname = "{top}:make"\n[privacy]\nepsilon = 2.0\n')
    return path


def resolved(config: Config) -> object:
    return plugin.resolve(config.model.name, key="model.name", error=ConfigError, code=config.run.code)()


def test_a_function_beside_the_config_is_found_from_any_folder(here: Path) -> None:
    config = load(project(here / "beside", 1))
    (here / "elsewhere").mkdir()
    os.chdir(here / "elsewhere")
    assert resolved(config) == 1
    assert load(to_toml_file(config, here / "run.toml")).run.code == str(here / "beside")  # as a resumed run has it


def test_nothing_is_imported_out_of_a_runs_own_folder(here: Path) -> None:
    """It may be somebody else's: what it needs, its config names."""
    path = project(here / "run", 1)
    (here / "run" / "summary.json").write_text("{}")
    assert load(path).run.code is None


def to_toml_file(config: Config, path: Path) -> Path:
    path.write_text(to_toml(config))
    return path


def test_two_projects_with_modules_of_one_name_stay_apart(here: Path) -> None:
    one, two = (load(project(here / f"project{number}", number)) for number in (1, 2))
    assert [resolved(config) for config in (one, two, one)] == [1, 2, 1]


def test_what_was_imported_stays_importable_and_nothing_installed_is_shadowed(here: Path) -> None:
    path = project(here / "beside", 1, "wave")
    before = list(sys.path)
    with pytest.raises(ConfigError, match="module 'wave' has no 'make'"):
        resolved(load(path))
    assert [entry for entry in sys.path if entry in before] == before
    assert str(here / "beside") in sys.path


def test_a_failure_names_the_line_of_the_users_own_code(here: Path) -> None:
    (here / "fedspa_plugin_line.py").write_text(
        "import torch\ndef deep():\n    torch.zeros(2) @ torch.zeros(3)\ndef make():\n    deep()\n"
    )
    function = plugin.resolve("fedspa_plugin_line:make", key="data.name", error=DataError)
    with pytest.raises(RuntimeError) as caught:
        function()
    caught.value.__traceback__ = caught.tb.tb_next  # from where fedspa called it
    assert plugin.one_line(caught.value).endswith(", at fedspa_plugin_line.py:3")
    assert plugin.one_line(caught.value).startswith("RuntimeError: ")
