"""The wheel is whole, for any Python of its platform; without a compiler it is for any platform."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import zipfile
from email import message_from_string
from pathlib import Path

import pytest
from building import ROOT, Built, build
from packaging.requirements import Requirement
from packaging.utils import parse_wheel_filename

import licences

pytestmark = pytest.mark.slow
COMPILER = shutil.which((sysconfig.get_config_var("CC") or "cc").split()[0])
LIBRARY = "fedspa/engine/native/_native.so"


def contents(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def wanted() -> set[str]:
    tracked = subprocess.run(["git", "ls-files", "src/fedspa"], cwd=ROOT, capture_output=True, check=True, text=True)
    names = [name for name in tracked.stdout.splitlines() if (ROOT / name).is_file() and "/csrc/" not in name]
    return {name.removeprefix("src/") for name in names}


def checked(*wheels: Path) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, ROOT / "wheels" / "check.py", *wheels], capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout


def test_it_holds_the_package_and_nothing_else(built: Built) -> None:
    assert {"fedspa/py.typed", "fedspa/runs/quickstart.toml", "fedspa/configs/mnist-best.toml"} <= wanted()
    assert contents(built.wheel) == wanted() | ({LIBRARY} if COMPILER else set())


def test_its_papers(built: Built) -> None:
    with zipfile.ZipFile(built.wheel) as archive:
        names = archive.namelist()
        about = message_from_string(archive.read(next(n for n in names if n.endswith("METADATA"))).decode())
        entry_points = archive.read(next(n for n in names if n.endswith("entry_points.txt"))).decode()
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert "fedspa = fedspa.__main__:main" in entry_points
    required = {str(Requirement(text)) for text in about.get_all("Requires-Dist", []) if "extra ==" not in text}
    assert required == {str(requirement) for requirement in licences.direct()["use"]}
    assert set(about.get_all("Provides-Extra", [])) == licences.direct().keys() - {"use"}
    assert about["License-Expression"] == "Apache-2.0"


@pytest.mark.skipif(COMPILER is None, reason="there is no C compiler")
def test_it_is_for_every_python_of_this_platform(built: Built) -> None:
    (tag,) = parse_wheel_filename(built.wheel.name)[3]
    assert (tag.interpreter, tag.abi) == ("py3", "none")
    assert tag.platform == sysconfig.get_platform().replace("-", "_").replace(".", "_")
    code, stated = checked(built.wheel)
    assert code == 0, stated
    assert "sound" in stated


def test_the_sdist_has_the_sources_of_the_compiled_part(built: Built) -> None:
    sources = {path.name for path in (ROOT / "src/fedspa/engine/native/csrc").iterdir()}
    assert {path.name for path in (built.unpacked / "src/fedspa/engine/native/csrc").iterdir()} == sources


def test_without_a_compiler_it_is_built_and_says_so(built: Built, tmp_path: Path) -> None:
    source = shutil.copytree(built.unpacked, tmp_path / "source", ignore=shutil.ignore_patterns("build", "*.so"))
    done = build("wheel", source, tmp_path / "wheel", CC="no-such-compiler", LDSHARED="no-such-compiler")
    assert done.returncode == 0, done.stderr
    assert "THE COMPILED PART WAS NOT BUILT" in done.stderr
    assert "no-such-compiler" in done.stderr  # which one was asked for
    (wheel,) = (tmp_path / "wheel").glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    assert contents(wheel) == wanted()
    code, stated = checked(wheel)
    assert code == 1
    assert "the compiled part is not in it" in stated


def test_libraries_that_a_machine_may_lack_are_noticed(tmp_path: Path) -> None:
    wheel = tmp_path / "fedspa-0-cp311-cp311-linux_x86_64.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(LIBRARY, b"libgomp.so.1\0GLIBC_2.17")
        archive.writestr("fedspa.libs/libgomp-1.so.1.0", b"")
    code, stated = checked(wheel)
    assert code == 1
    for fault in ("its tag is cp311-cp311-linux_x86_64", "asks for libgomp", "a second library"):
        assert fault in stated
    assert checked()[0] == 1  # no wheel is no sound wheel
