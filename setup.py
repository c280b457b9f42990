"""Name the packages, and build the native scanner where a compiler is there; without one, Python reads.

With ``TRACEDOC_PURE=1`` nothing is compiled, and the wheel is one for every platform.
"""

from __future__ import annotations

import os

from setuptools import Extension, find_packages, setup

NATIVE = os.environ.get("TRACEDOC_PURE") != "1"

setup(
    # The rules lie beside the package: pyproject.toml says where.
    packages=[*find_packages(include=["tracedoc", "tracedoc.*"]), "tracedoc.judge.builtin"],
    ext_modules=[
        Extension(
            "tracedoc.trace._scanner",
            sources=["native/module.c", "native/events.c", "native/table.c"],
            depends=["native/events.h", "native/table.h", "native/json.h"],
            optional=True,
        )
    ]
    if NATIVE
    else [],
)
