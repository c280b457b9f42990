"""Build the native scanner where a compiler is there; without one, tracedoc reads in Python."""

from __future__ import annotations

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "tracedoc.trace._scanner",
            sources=["native/module.c", "native/events.c", "native/table.c"],
            depends=["native/events.h", "native/table.h", "native/json.h"],
            optional=True,
        )
    ]
)
