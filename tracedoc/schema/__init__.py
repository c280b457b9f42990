"""The JSON Schema of a diagnosis; ``diagnosis-2.json`` beside this file is what the package ships."""

from __future__ import annotations

from inspect import cleandoc

import msgspec

from tracedoc.diagnosis import SCHEMA_VERSION, Diagnosis


def json_schema() -> str:
    """Return the JSON Schema of a diagnosis, as the package ships it in ``schema/diagnosis-2.json``."""
    schema = msgspec.json.schema(Diagnosis)
    for described in schema["$defs"].values():
        # Python 3.13 takes the indentation out of docstrings, earlier ones keep it.
        described["description"] = cleandoc(described["description"])
    head = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"tracedoc diagnosis, schema {SCHEMA_VERSION}",
    }
    return (
        msgspec.json.format(msgspec.json.encode({**head, **schema}, order="sorted"), indent=2).decode() + "\n"
    )
