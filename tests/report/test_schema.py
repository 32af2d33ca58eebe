"""The memory report's JSON form: its schema file, what is refused, and that nothing is lost on the way and back."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sample_report import REPORT

from ciuic_cli.compression.pipeline import compress
from ciuic_cli.errors import InputError
from ciuic_cli.report import schema
from ciuic_cli.report.schema import ForecastReport, MemoryReport, RecoveryPass

SCHEMA_FILE = Path(schema.__file__).parent / "memory_report.schema.json"
SCHEMA: dict[str, Any] = json.loads(SCHEMA_FILE.read_text(encoding="utf-8"))

TYPES: dict[str, Callable[[Any], bool]] = {
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
    "string": lambda value: isinstance(value, str),
    "boolean": lambda value: isinstance(value, bool),
    "integer": lambda value: type(value) is int,
    "number": lambda value: type(value) in (int, float),
    "null": lambda value: value is None,
}
CHECKED = {
    "$ref", "additionalProperties", "anyOf", "enum", "items", "minimum", "properties", "required", "type",
    "$defs", "$schema", "title", "description",
}  # fmt: skip
"""The keywords of JSON schema that `valid` knows; the last four only describe."""


def valid(value: Any, rules: dict[str, Any], *, closed: bool = False) -> bool:
    """Whether the value obeys the rules. closed: refuse keys that the rules do not name, too."""
    assert rules.keys() <= CHECKED
    if "$ref" in rules:
        return valid(value, SCHEMA["$defs"][rules["$ref"].removeprefix("#/$defs/")], closed=closed)
    if "anyOf" in rules:
        return any(valid(value, option, closed=closed) for option in rules["anyOf"])
    if "enum" in rules:
        return value in rules["enum"]
    if "type" in rules and not TYPES[rules["type"]](value):
        return False
    if "minimum" in rules and value < rules["minimum"]:
        return False
    if isinstance(value, list) and "items" in rules:
        return all(valid(item, rules["items"], closed=closed) for item in value)
    if isinstance(value, dict) and "properties" in rules:
        named = rules["properties"]
        if not rules["required"] or (closed and not value.keys() <= named.keys()):
            return False
        return all(key in value for key in rules["required"]) and all(
            valid(item, named[key], closed=closed) for key, item in value.items() if key in named
        )
    if isinstance(value, dict) and "additionalProperties" in rules:
        return all(valid(item, rules["additionalProperties"], closed=closed) for item in value.values())
    return True


def test_the_schema_file_is_made_from_the_dataclasses() -> None:
    remedy = f"write schema_text() of ciuic_cli/report/schema.py into {SCHEMA_FILE.name}"
    assert SCHEMA_FILE.read_text(encoding="utf-8") == schema.schema_text(), remedy
    assert SCHEMA["$schema"] == "https://json-schema.org/draft/2020-12/schema"


def test_the_sample_obeys_the_schema_and_returns_unchanged() -> None:
    assert valid(REPORT, SCHEMA, closed=True)
    report = MemoryReport.from_dict(REPORT)
    assert report.to_dict() == REPORT
    assert MemoryReport.from_json(report.to_json()) == report


@pytest.mark.slow
def test_the_report_of_a_run_obeys_the_schema(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, text: Path
) -> None:
    settings: dict[str, Any] = {
        "calibration": [text],
        "calibration_only": True,
        "ratio": 2.0,
        "effort": "fast",
        "nsamples": 6,
        "seqlen": 48,
    }
    report = compress(tiny_checkpoint("deepseek_v3"), tmp_path / "out", **settings)
    written = (tmp_path / "out" / "memory_report.json").read_text(encoding="utf-8")
    assert valid(json.loads(written), SCHEMA, closed=True)
    assert MemoryReport.from_json(written) == report and report.to_json() == written


def test_recovery_and_forecast_obey_the_schema() -> None:
    recovery = RecoveryPass(bytes=0, steps=90, matrices=210, norms=61, kl_before=0.04, kl_after=0.03)
    forecast = ForecastReport(seconds={"encode": 2.5}, disk_bytes=1, peak_rss_bytes=2, total_seconds=2.5)
    report = MemoryReport.from_dict(REPORT)
    report = replace(report, passes=(*report.passes, recovery), forecast=forecast, measured_kl=None)
    plain = report.to_dict()
    assert plain["passes"][-1]["name"] == "recovery" and plain["measured_kl"] is None
    assert valid(plain, SCHEMA, closed=True) and MemoryReport.from_dict(plain) == report


def _damaged(*path: Any, value: Any) -> dict[str, Any]:
    """The sample with the value at a path exchanged; removed if the value is `...`."""
    document = copy.deepcopy(REPORT)
    part: Any = document
    for key in path[:-1]:
        part = part[key]
    if value is ...:
        del part[path[-1]]
    else:
        part[path[-1]] = value
    return document


@pytest.mark.parametrize(
    ("path", "value", "complaint"),
    [
        (["ratio"], ..., "ratio is missing"),
        (["ratio"], "4", "ratio is not a number"),
        (["ratio"], True, "ratio is not a number"),
        (["artifact_bytes"], 1.5, "artifact_bytes is not an integer of at least 0"),
        (["artifact_bytes"], -1, "artifact_bytes is not an integer of at least 0"),
        (["components", 1, "bytes"], None, r"components\[1\].bytes is not an integer"),
        (["components", 1, "experts", 0, "pruned"], 0, r"components\[1\].experts\[0\].pruned is not true or"),
        (["components", 0, "widths"], [], r"components\[0\].widths is not an object"),
        (["components"], {}, "components is not an array"),
        (["passes", 0, "name"], "unknown", r"passes\[0\] is none of PrunePass"),
        (["statistics", "roles", "o"], 1, r"statistics.roles\['o'\] is not an object"),
        (["mtp", "kept"], ..., "mtp.kept is missing"),
    ],
)
def test_damage_is_refused_by_reader_and_schema(path: list[Any], value: Any, complaint: str) -> None:
    document = _damaged(*path, value=value)
    with pytest.raises(InputError, match=f"not a memory report: {complaint}"):
        MemoryReport.from_dict(document, Path("memory_report.json"))
    assert not valid(document, SCHEMA)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), 10**400])
def test_numbers_that_are_not_finite_are_refused(number: float) -> None:
    with pytest.raises(InputError, match="predicted_kl is not a finite number"):
        MemoryReport.from_dict(_damaged("predicted_kl", value=number))


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000, "null"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(InputError, match="not a memory report"):
        MemoryReport.from_json(text, Path("memory_report.json"))


def test_keys_of_later_versions_are_ignored() -> None:
    later = {**REPORT, "energy": 1.0, "components": [{**row, "new": 1} for row in REPORT["components"]]}
    assert MemoryReport.from_dict(later) == MemoryReport.from_dict(REPORT)
    assert valid(later, SCHEMA) and not valid(later, SCHEMA, closed=True)
