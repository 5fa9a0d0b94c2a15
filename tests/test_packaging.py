"""The supply chain: pins that fit pyproject.toml, licences that are listed. tests/package/ has the wheel."""

from __future__ import annotations

import re
import tomllib
from importlib import metadata

import pytest
from packaging.utils import canonicalize_name
from packaging.version import Version

import fedspa
import licences

ROOT = licences.ROOT


def installed(name: str) -> str | None:
    """The version without its local part (torch's `+cpu`)."""
    try:
        return Version(metadata.version(name)).public
    except metadata.PackageNotFoundError:
        return None


def test_the_version_stands_in_one_place_and_the_pages_agree() -> None:
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    assert "version" not in pyproject["project"]
    assert pyproject["tool"]["setuptools"]["dynamic"] == {"version": {"attr": "fedspa.__version__"}}
    newest = re.search(r"^## .*?(\d+\.\d+\.\d+)", (ROOT / "CHANGELOG.md").read_text("utf-8"), flags=re.M)
    shown = re.findall(r"fedspa[- ](\d+\.\d+\.\d+)", (ROOT / "docs" / "install.md").read_text("utf-8"))
    assert len(shown) == 2
    assert {newest[1], *shown} == {fedspa.__version__}


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
    """After a change: python tests/licences.py > DEPENDENCIES.md."""
    listed, pins = licences.listed(), licences.pins()
    assert {name: row[0] for name, row in listed.items()} == pins
    for name, (version, words, purpose) in listed.items():
        assert purpose in licences.direct(), f"{name} is listed for {purpose!r}"
        if installed(name) == version:
            assert words == licences.licence(name)


def test_no_licence_binds_what_is_built_on_it() -> None:
    for name, (_, words, _) in licences.listed().items():
        assert not re.search(r"\b[AL]?GPL|General Public", words), f"{name}: {words}"


def test_every_module_is_imported():
    """A module that nothing imports is dead code: a merge may bring one back."""
    source = ROOT / "src"
    modules = {
        ".".join(path.relative_to(source).with_suffix("").parts): path
        for path in source.rglob("*.py")
        if path.name not in ("__init__.py", "__main__.py") and "template" not in path.parts
    }
    text = "\n".join(path.read_text("utf-8") for path in source.rglob("*.py"))
    entries = {"fedspa.flower.client_app", "fedspa.flower.server_app", "fedspa.sklearn"}  # named from outside
    dead = []
    for module in modules.keys() - entries:
        package, _, name = module.rpartition(".")
        line = rf"from {re.escape(package)} import"
        if not re.search(rf"\b{re.escape(module)}\b|{line} [^\n]*\b{name}\b|{line} \([^)]*\b{name}\b", text):
            dead.append(module)
    assert dead == []
