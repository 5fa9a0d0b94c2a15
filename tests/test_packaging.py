"""The supply chain: pins that fit pyproject.toml, licences that are listed, a wheel that is whole and installs."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from email import message_from_string
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import licences

ROOT = licences.ROOT


def installed(name: str) -> str | None:
    """The version without its local part (torch's `+cpu`)."""
    try:
        return Version(metadata.version(name)).public
    except metadata.PackageNotFoundError:
        return None


def test_every_requirement_is_pinned_within_its_range() -> None:
    pins = licences.pins()
    for group, requirements in licences.direct().items():
        for requirement in requirements:
            pin = pins.get(canonicalize_name(requirement.name))
            assert pin is not None, f"{group}: {requirement.name} has no pin in constraints.txt"
            assert requirement.specifier.contains(pin), f"{group}: {requirement} does not allow the pin {pin}"


def test_what_they_require_in_turn_is_pinned_too() -> None:
    pins = licences.pins()
    for group, requirements in licences.direct().items():
        for name, asked in licences.closure(requirements).items():
            assert name in pins, f"{group}: {name} is installed with it and has no pin in constraints.txt"
            for requirement in asked:
                assert requirement.specifier.contains(pins[name], prereleases=True), f"{group}: {requirement}"


def test_nothing_is_pinned_that_nobody_needs() -> None:
    roots = [requirement for requirements in licences.direct().values() for requirement in requirements]
    if any(installed(requirement.name) is None for requirement in roots):
        pytest.skip("an extra is not installed: what it requires cannot be told")
    assert licences.pins().keys() - licences.closure(roots).keys() == set()


def test_pins_are_exact_and_named_once() -> None:
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    pinned = [line for line in lines if line and not line.startswith("#")]
    for line in pinned:
        assert re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][A-Za-z0-9.]*", line), line
    names = [canonicalize_name(line.split("==")[0]) for line in pinned]
    assert len(names) == len(set(names))


def test_the_licence_list_is_in_step() -> None:
    """After a change: python tests/licences.py > docs/dependencies.md."""
    listed, pins = licences.listed(), licences.pins()
    assert {name: row[0] for name, row in listed.items()} == pins
    for name, (version, words, purpose) in listed.items():
        assert purpose in licences.direct(), f"{name} is listed for {purpose!r}"
        if installed(name) == version:
            assert words == licences.licence(name)


def test_no_licence_binds_what_is_built_on_it() -> None:
    for name, (_, words, _) in licences.listed().items():
        assert not re.search(r"\b[AL]?GPL|General Public", words), f"{name}: {words}"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from what git knows, in a folder of its own: no leftovers of earlier builds get in."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
    if tracked.returncode != 0:
        pytest.skip("not a git checkout")
    for name in tracked.stdout.decode().split("\0"):
        if name.startswith(("src/", "pyproject.toml", "setup.py", "README.md", "LICENSE")) and (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, source / name)
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--no-deps", "-w", str(out)]
    if installed("setuptools") is not None and Version(metadata.version("setuptools")) >= Version("77"):
        command.append("--no-build-isolation")
    subprocess.run([*command, str(source)], check=True, capture_output=True)
    (built,) = out.glob("fedspa-*.whl")
    return built


@pytest.mark.slow
def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        about = message_from_string(archive.read(next(n for n in names if n.endswith("METADATA"))).decode())
        entry_points = archive.read(next(n for n in names if n.endswith("entry_points.txt"))).decode()
    tracked = subprocess.run(["git", "ls-files", "src/fedspa"], cwd=ROOT, capture_output=True, check=True, text=True)
    wanted = {
        name.removeprefix("src/")
        for name in tracked.stdout.splitlines()
        if name.endswith((".py", ".toml", ".md", "py.typed", ".c", ".h", ".html", ".css", ".js"))
        and (ROOT / name).is_file()
    }
    assert {"fedspa/py.typed", "fedspa/runs/quickstart.toml", "fedspa/paper/tables/mnist.toml"} <= wanted
    inside = {name for name in names if ".dist-info/" not in name}
    native = {name for name in inside if name.startswith("fedspa/engine/native/_native") and name.endswith(".so")}
    assert inside - native == wanted
    if shutil.which((sysconfig.get_config_var("CC") or "cc").split()[0]) is not None:
        assert len(native) == 1
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert "fedspa = fedspa.__main__:main" in entry_points
    required = {str(Requirement(text)) for text in about.get_all("Requires-Dist", []) if "extra ==" not in text}
    assert required == {str(requirement) for requirement in licences.direct()["use"]}
    assert set(about.get_all("Provides-Extra", [])) == licences.direct().keys() - {"use"}
    assert about["License-Expression"] == "Apache-2.0"


@pytest.mark.slow
def test_the_wheel_runs_in_an_environment_of_its_own(wheel: Path, tmp_path: Path) -> None:
    """Dependencies are lent by this environment, by path; fedspa itself can only come from the wheel."""
    home = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home)], check=True)
    python = home / "bin" / "python"
    ask = [str(python), "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"]
    site = Path(subprocess.run(ask, capture_output=True, text=True, check=True).stdout.strip())
    # A folder that a .pth names is searched, but its own .pth files (an editable fedspa) are not read.
    (site / "lent.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python)]
    subprocess.run([*pip, "install", "--no-deps", "--no-index", str(wheel)], check=True, capture_output=True)
    where = subprocess.run(
        [str(python), "-c", "import fedspa; print(fedspa.__file__)"],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    )
    assert Path(where.stdout.strip()).is_relative_to(site)
    words = ["run", "--json", "--set", "federation.rounds=2", "--set", "algorithm.local_steps=2"]
    run = subprocess.run([str(home / "bin" / "fedspa"), *words], capture_output=True, text=True, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout)["rounds"] == 2
    words = ["table", "mnist", "--quick", "--rows", "fedavg", "--device", "cpu", "--json"]
    table = subprocess.run([str(home / "bin" / "fedspa"), *words], capture_output=True, text=True, cwd=tmp_path)
    assert table.returncode == 0, table.stderr
    assert json.loads(table.stdout)["rows"][0]["published"]["status"] == "done"
