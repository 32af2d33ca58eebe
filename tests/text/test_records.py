"""Training data as calibration text. What a line may be, and what is wrong with it: tests/train/test_bad_data.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ciuic_cli.errors import InputError
from ciuic_cli.text import records
from ciuic_cli.text.calibration import calibration_batch
from ciuic_cli.text.documents import split_documents
from ciuic_cli.text.records import read_text_or_records

CHAT = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "cd"}]
LINES = [{"messages": CHAT}, {"prompt": "say: ", "completion": "yes"}, {"text": "hello"}]
DOCUMENTS = ["<user>ab<assistant>cd\n\n", "say: yes\n\n", "hello\n\n"]


class Characters:
    """A tokenizer with one token per character, and a chat template."""

    name_or_path = "characters"
    chat_template = "a template"

    def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
        return {"input_ids": [ord(character) for character in text]}

    def apply_chat_template(self, messages: list[dict[str, str]], **options: Any) -> str:
        ending = "<assistant>" * bool(options.get("add_generation_prompt"))
        return "".join(f"<{message['role']}>{message['content']}" for message in messages) + ending


TOKENIZER = Characters()


def _written(path: Path, lines: list[Any]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_each_line_is_a_document(tmp_path: Path) -> None:
    file = _written(tmp_path / "data.jsonl", LINES)
    assert split_documents(read_text_or_records(file, TOKENIZER)) == DOCUMENTS
    assert split_documents(read_text_or_records(tmp_path, TOKENIZER)) == DOCUMENTS


def test_other_files_are_text(tmp_path: Path) -> None:
    file = _written(tmp_path / "data.txt", LINES)
    assert read_text_or_records(file, None) == file.read_text()


def test_wrong_lines_and_too_much_data_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="line 2: the fields are") as caught:
        read_text_or_records(_written(tmp_path / "a.jsonl", [LINES[2], {"question": "?"}]), TOKENIZER)
    assert caught.value.file == str(tmp_path / "a.jsonl")
    (tmp_path / "b.jsonl").write_text("\n\n")
    with pytest.raises(InputError, match="no text"):
        read_text_or_records(tmp_path / "b.jsonl", TOKENIZER)
    monkeypatch.setattr(records, "MAXIMUM_BYTES", 20)
    with pytest.raises(InputError, match="more than 20 characters"):
        read_text_or_records(_written(tmp_path / "c.jsonl", LINES), TOKENIZER)


def test_calibration_sequences_come_from_the_lines(tmp_path: Path) -> None:
    file = _written(tmp_path / "data.jsonl", [{"text": "z" * 300}, {"text": "y" * 300}])
    tokens = calibration_batch(TOKENIZER, [file], nsamples=2, seqlen=302, vocab_size=256)
    assert ["".join(map(chr, row)) for row in tokens.tolist()] == ["z" * 300 + "\n\n", "y" * 300 + "\n\n"]
