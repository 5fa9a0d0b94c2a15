"""Builds the native engine where a C compiler is found; everything else about the package is in pyproject.toml.

The compiled part is optional: without a compiler the build goes on, says so, and training falls back to another engine.
It holds no Python code (ctypes loads it) and chooses its instruction set at run time. So one wheel serves a platform:
any Python, and any CPU of that kind.
"""

import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

NATIVE = "fedspa.engine.native._native"
SOURCES = Path("src/fedspa/engine/native/csrc")

NOT_BUILT = """
********************************************************************************
fedspa: THE COMPILED PART WAS NOT BUILT (the compiler's own words are above).
The package works without it, but trains many times slower on a CPU.
To have it: install a C compiler (gcc or clang), then fedspa again from where it
came, with pip's options --force-reinstall --no-deps --no-cache-dir.
********************************************************************************
"""


class BuildNative(build_ext):
    """The library has the same name whichever Python builds it, and a build without it is told."""

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split("."))) + ".so"

    def built(self) -> bool:
        return Path(self.get_ext_fullpath(NATIVE)).exists()

    def run(self) -> None:
        super().run()
        if not self.built():
            print(NOT_BUILT, file=sys.stderr)


class PlatformWheel(bdist_wheel):
    """For any Python 3 on this platform; without the compiled part, for any platform."""

    def get_tag(self) -> tuple[str, str, str]:
        built = self.get_finalized_command("build_ext").built()
        return "py3", "none", super().get_tag()[2] if built else "any"


setup(
    cmdclass={"build_ext": BuildNative, "bdist_wheel": PlatformWheel},
    ext_modules=[
        Extension(
            NATIVE,
            sources=sorted(str(path) for path in SOURCES.glob("*.c")),
            depends=sorted(str(path) for path in SOURCES.glob("*.h")),
            extra_compile_args=["-std=gnu11", "-O3", "-fno-math-errno", "-Wno-psabi", "-pthread"],
            extra_link_args=["-pthread"],
            libraries=["m"],
            optional=True,
        )
    ],
)
