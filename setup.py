"""Name the packages, and build the native scanner where a compiler is there; without one, Python reads."""

from __future__ import annotations

from setuptools import Extension, find_packages, setup

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
    ],
)
