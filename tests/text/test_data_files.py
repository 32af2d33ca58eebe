"""Training data in folders: JSON lines, parquet, and what `datasets.save_to_disk` writes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from ciuic_cli.errors import EnvironmentFault, InputError
from ciuic_cli.text.data_files import digest, records

TEXTS = ["one", "two", "three"]


def rows(path: Path) -> list[tuple[str, int, dict[str, str]]]:
    return [(file.name, number, json.loads(line)) for file, number, line in records(path)]


def test_a_folder_of_files_is_read_in_the_order_of_names(tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").write_text('{"text": "three"}\n')
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n\n{"text": "two"}\n')
    (tmp_path / "notes.txt").write_text("not data")
    assert rows(tmp_path) == [
        ("a.jsonl", 1, {"text": "one"}),
        ("a.jsonl", 3, {"text": "two"}),
        ("b.jsonl", 1, {"text": "three"}),
    ]
    before = digest(tmp_path)
    (tmp_path / "b.jsonl").rename(tmp_path / "c.jsonl")
    assert digest(tmp_path) != before and digest(tmp_path)[0] == before[0]


def test_a_wrong_byte_is_named_with_its_file(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "one"}\n{"text": "\xff"}\n')
    with pytest.raises(InputError, match="line 2: byte 11 is not UTF-8") as error:
        rows(tmp_path)
    assert str(error.value.file).endswith("a.jsonl")


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no training data"):
        rows(tmp_path)


def test_saved_datasets_and_parquet(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    made = datasets.Dataset.from_dict({"text": TEXTS, "source": ["a", None, "b"]})
    made.save_to_disk(str(tmp_path / "saved"))
    (tmp_path / "folder").mkdir()
    made.to_parquet(str(tmp_path / "folder" / "part.parquet"))
    for folder in ("saved", "folder"):
        found = rows(tmp_path / folder)
        assert [row["text"] for _, _, row in found] == TEXTS
        assert [number for _, number, _ in found] == [1, 2, 3]
        assert "source" not in found[1][2]
    datasets.DatasetDict({"train": made, "test": made}).save_to_disk(str(tmp_path / "splits"))
    with pytest.raises(InputError, match="2 splits: test, train"):
        rows(tmp_path / "splits")
    assert len(rows(tmp_path / "splits" / "train")) == 3
    (tmp_path / "folder" / "part.parquet").write_bytes(b"PAR1")
    with pytest.raises(InputError, match="datasets cannot read it"):
        rows(tmp_path / "folder")


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "part.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(EnvironmentFault, match="needs the package datasets"):
        rows(tmp_path)
