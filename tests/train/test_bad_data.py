"""Bad training data through the command: file and line are named, the exit code is 3, and nothing is left behind."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ciuic_cli.cli.app import app

pytest.importorskip("peft")

TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.content == 'refuse' %}{{ raise_exception('no such talk') }}{% endif %}"
    "{% if m.content == 'count' %}{{ messages | length }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
GOOD = {"text": "hello"}
USER = {"role": "user", "content": "a"}
ANSWER = {"role": "assistant", "content": "b"}


def chat(*messages: Any) -> dict[str, Any]:
    return {"messages": list(messages)}


LINES: dict[str, tuple[Any, str]] = {
    "broken": (b'{"text": "a', "not JSON"),
    "two objects": (b'{"text": "a"} {"text": "b"}', "not JSON"),
    "single quotes": (b"{'text': 'a'}", "not JSON"),
    "deep": (b"[" * 100_000, "not JSON"),
    "NUL": (b'{"text": "a\0b"}', "not JSON"),
    "field twice": (b'{"text": "a", "text": "b"}', "'text' is given twice"),
    "Latin-1": (b'{"text": "caf\xe9"}', "byte 14 is not UTF-8"),
    "half a character": (b'{"text": "a\\ud800"}', "surrogate"),
    "list": ([1], "not a JSON object"),
    "number": (3, "not a JSON object"),
    "other field": ({"question": "a"}, "the fields are ['question']"),
    "empty object": ({}, "the fields are []"),
    "two forms": ({"text": "a", "prompt": "b", "completion": "c"}, "the fields are"),
    "no completion": ({"prompt": "a"}, "the fields are ['prompt']"),
    "empty completion": ({"prompt": "a", "completion": "  "}, "completion is empty"),
    "null completion": ({"prompt": "a", "completion": None}, "completion is not a string"),
    "text list": ({"text": ["a"]}, "text is not a string"),
    "empty text": ({"text": ""}, "text is empty"),
    "longer than a row": ({"text": "x" * 65}, "more than the 64 of --sequence-len"),
    "longer than the model": ({"text": "x" * 3000}, "positions of the model"),
    "messages text": ({"messages": "hello"}, "not a list"),
    "no messages": (chat(), "not a list"),
    "message text": (chat("hello"), "message 1 has no text in content"),
    "wrong role": (chat({"role": "robot", "content": "a"}), "message 1 has the role 'robot'"),
    "no role": (chat({"content": "a"}), "message 1 has the role None"),
    "no content": (chat(USER, {"role": "assistant"}), "message 2 has no text in content"),
    "content parts": (chat({**USER, "content": [{"type": "text", "text": "a"}]}), "no text in content"),
    "no assistant": (chat(USER), "no message is the assistant's"),
    "silent assistant": (chat(USER, {**ANSWER, "content": ""}), "message 2 of the assistant is empty"),
    "refusing template": (chat({**USER, "content": "refuse"}, ANSWER), "no such talk"),
    "rewriting template": (chat({**USER, "content": "count"}, ANSWER, USER, ANSWER), "message 2 differently"),
}
"""Lines that cannot be used, and what the message says."""
FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "absent": (lambda path: None, "No such file"),
    "folder": (lambda path: path.mkdir(), "the folder has no training data"),
    "pipe": (lambda path: os.mkfifo(path), "not a regular file"),
    "empty": (lambda path: path.touch(), "the text is empty"),
    "blank": (lambda path: path.write_text("\n \n"), "no example"),
    "UTF-16": (
        lambda path: path.write_text('{"text": "a"}\n', encoding="utf-16"),
        "line 1: byte 1 is not UTF-8",
    ),
    "JSON array": (lambda path: path.write_text('[\n{"text": "a"}\n]\n'), "line 1: this is not JSON"),
}
"""Files that cannot be used."""


@pytest.fixture(scope="module")
def model(tiny_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint without weights, with a chat template: data are read before weights."""
    folder = tmp_path_factory.mktemp("model")
    for file in tiny_checkpoint("llama").iterdir():
        if file.suffix == ".json":
            shutil.copy(file, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def refused(model: Path, folder: Path, *options: object) -> str:
    """What the command says when it refuses the data."""
    before = sorted(path.name for path in folder.iterdir())
    arguments = ["train", model, folder / "adapter", "--sequence-len", "64", "--device", "cpu", *options]
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert done.exit_code == 3, done.stderr
    assert "Traceback" not in done.stderr and "try:" in done.stderr
    assert sorted(path.name for path in folder.iterdir()) == before, "something was written"
    return done.stderr


def written(path: Path, line: Any) -> Path:
    lines = [GOOD, line, GOOD]
    path.write_bytes(
        b"".join((one if isinstance(one, bytes) else json.dumps(one).encode()) + b"\n" for one in lines)
    )
    return path


@pytest.mark.parametrize("name", LINES)
def test_a_line_that_cannot_be_used_is_named(name: str, model: Path, tmp_path: Path) -> None:
    line, message = LINES[name]
    file = written(tmp_path / "data.jsonl", line)
    more = ("--sequence-len", "4096") if name == "longer than the model" else ()
    said = refused(model, tmp_path, "--train-file", file, *more)
    assert said.startswith("error: line 2: ") and message in said and f"file: {file}" in said


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_cannot_be_used_is_named(name: str, model: Path, tmp_path: Path) -> None:
    make, message = FILES[name]
    file = tmp_path / "data.jsonl"
    make(file)
    said = refused(model, tmp_path, "--train-file", file)
    assert message in said and f"file: {file}" in said


def test_the_evaluation_file_is_checked_before_any_work(model: Path, tmp_path: Path) -> None:
    good, bad = written(tmp_path / "good.jsonl", GOOD), written(tmp_path / "bad.jsonl", {"text": 5})
    said = refused(model, tmp_path, "--train-file", good, "--eval-file", bad)
    assert said.startswith("error: line 2: text is not a string") and f"file: {bad}" in said


def test_a_model_without_a_chat_template(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "plain"
    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("*.jinja"))
    file = written(tmp_path / "data.jsonl", chat(USER, ANSWER))
    assert "line 2: the model has no chat template" in refused(folder, tmp_path, "--train-file", file)
