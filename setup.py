"""Builds the native engine where a C compiler is found; everything else about the package is in pyproject.toml.

The compiled part is optional: without a compiler the install goes on with a warning, and training falls back to the
generic engine. It holds no Python code (it is loaded with ctypes), and chooses its instruction set at run time, so no
flag here depends on the machine that builds it.
"""

from pathlib import Path

from setuptools import Extension, setup

SOURCES = Path("src/fedspa/engine/native/csrc")

setup(
    ext_modules=[
        Extension(
            "fedspa.engine.native._native",
            sources=sorted(str(path) for path in SOURCES.glob("*.c")),
            depends=sorted(str(path) for path in SOURCES.glob("*.h")),
            extra_compile_args=["-std=gnu11", "-O3", "-Wno-psabi", "-pthread"],
            extra_link_args=["-pthread"],
            libraries=["m"],
            optional=True,
        )
    ]
)
