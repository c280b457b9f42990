"""The JSON of a diagnosis fits its schema and comes back as it was."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import msgspec
import pytest
from msgspec.structs import replace

from tests.example_diagnoses import DIAGNOSES, sharded
from tracedoc.diagnosis_json import from_json, json_pieces, json_schema, to_json
from tracedoc.errors import InputError
from tracedoc.report.render import render


def test_schema_in_the_package_is_that_of_the_types(repository: Path):
    file = repository / "tracedoc" / "schema" / "diagnosis-2.json"
    assert file.read_text(encoding="utf-8") == json_schema(), "run make refresh"


@pytest.mark.parametrize("name", sorted(DIAGNOSES))
def test_diagnosis_fits_the_schema(name: str):
    schema = json.loads(json_schema())
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(json.loads(to_json(DIAGNOSES[name]())), schema)


@pytest.mark.parametrize("name", sorted(DIAGNOSES))
def test_diagnosis_survives_the_way_through_json(name: str):
    assert from_json(to_json(DIAGNOSES[name]())) == DIAGNOSES[name]()


@pytest.mark.parametrize("name", sorted(DIAGNOSES))
def test_json_shown_on_a_terminal_means_the_same(name: str):
    text = render(DIAGNOSES[name](), "json")
    assert from_json(text) == DIAGNOSES[name]()
    assert "\x1b" not in text
    assert "\u202e" not in text


def test_fields_of_later_versions_are_ignored():
    data = json.loads(to_json(sharded()))
    data["tomorrow"] = {"x": 1}
    data["findings"][0]["tomorrow"] = []
    assert from_json(json.dumps(data)) == sharded()


def test_file_without_later_fields_still_loads():
    data = json.loads(to_json(sharded()))
    del data["detail"], data["tool_version"], data["run"]["cycles"]
    del data["budget"]["idle_causes_ms"]
    assert from_json(json.dumps(data)).summary == sharded().summary


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"traceEvents": []}', "<html>"])
def test_other_files_are_named_as_no_diagnosis(text: str):
    with pytest.raises(InputError, match="not a tracedoc diagnosis"):
        from_json(text)


def test_other_schema_is_refused_by_its_number():
    data = json.loads(to_json(sharded())) | {"schema_version": "9"}
    with pytest.raises(InputError, match="schema 9"):
        from_json(json.dumps(data))


@pytest.mark.parametrize("name", sorted(DIAGNOSES))
def test_pieces_are_the_text_of_the_whole(name: str):
    diagnosis = DIAGNOSES[name]()
    whole = msgspec.json.format(msgspec.json.encode(diagnosis), indent=2).decode() + "\n"
    assert "".join(json_pieces(diagnosis)) == whole


def test_pieces_of_many_ranks_are_small_and_the_text_of_the_whole():
    few = sharded()
    findings = tuple(replace(finding, evidence=finding.evidence * 500) for finding in few.findings)
    facts = {f"{name}-{copy}": record for copy in range(20) for name, record in few.facts.items()}
    many = replace(few, ranks=few.ranks * 100, findings=findings, facts=facts)
    whole = msgspec.json.format(msgspec.json.encode(many), indent=2).decode() + "\n"
    pieces = list(json_pieces(many))
    assert "".join(pieces) == whole
    assert max(map(len, pieces)) < len(whole) / 20
