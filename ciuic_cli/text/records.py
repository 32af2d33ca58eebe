"""Lines of JSON data as text. A line is an object in one of three forms:

    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}
    {"prompt": "...", "completion": "..."}
    {"text": "..."}

They are for training, calibration and evaluation.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ciuic_cli.errors import InputError
from ciuic_cli.text.data_files import records
from ciuic_cli.text.documents import DOCUMENT_SEPARATOR, MAXIMUM_BYTES, read_text

ROLES = ("system", "user", "assistant", "tool")
"""Roles of chat messages that are accepted."""
FORMS = (("messages",), ("prompt", "completion"), ("text",))
"""Fields of the three forms of a line."""


@dataclass(frozen=True)
class Record:
    """The text of a line.

    Attributes:
        learned: ranges of characters that training learns: completions, the assistant's messages, or the whole text.
        is_chat: whether a chat template made the text, which then has its special tokens.
    """

    text: str
    learned: list[tuple[int, int]]
    is_chat: bool


class LineFault(Exception):
    """Raised for a line that cannot be used. `message` says what is wrong, `remedy` what to do about it."""

    def __init__(self, message: str, remedy: str) -> None:
        super().__init__(message)
        self.message, self.remedy = message, remedy


@contextmanager
def line_faults(file: Path, number: int) -> Iterator[None]:
    """Convert a LineFault of the block to an InputError that names the file and the line."""
    try:
        yield
    except LineFault as fault:
        raise InputError(f"line {number}: {fault.message}", file=file, remedy=fault.remedy) from fault


def read_text_or_records(path: Path, tokenizer: Any) -> str:
    """The text of a file; of a `.jsonl` file or a folder of data (`data_files.records`), its lines as documents.

    Chat messages become text by the tokenizer's chat template. Raises InputError as `read_text` does, and for a wrong
    line.
    """
    if path.suffix != ".jsonl" and not path.is_dir():
        return read_text(path)
    texts: list[str] = []
    size = 0
    for file, number, line in records(path):
        with line_faults(file, number):
            texts.append(parse(line, tokenizer).text)
        size += len(texts[-1])
        if size > MAXIMUM_BYTES:
            raise InputError(
                f"the text has more than {MAXIMUM_BYTES:,} characters", file=path, remedy="give a part of it"
            )
    if not texts:
        raise InputError("the file has no text", file=path, remedy="write one JSON object per line")
    return f"\n{DOCUMENT_SEPARATOR}\n".join(texts)


def parse(line: str, tokenizer: Any) -> Record:
    """The text of a line. Raises LineFault.

    tokenizer: of transformers; for chat messages, with a chat template.
    """
    record = _record(line, tokenizer)
    try:
        record.text.encode()
    except UnicodeEncodeError as error:  # "\\ud800" in JSON
        raise LineFault(
            "a character is half of a surrogate pair", "write the whole character, or remove it"
        ) from error
    return record


def _record(line: str, tokenizer: Any) -> Record:
    try:
        record = json.loads(line, object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        raise LineFault(f"this is not JSON ({error})", "write one JSON object per line") from error
    names = " or ".join(" and ".join(form) for form in FORMS)
    if not isinstance(record, dict):
        raise LineFault("this is not a JSON object", f"write an object with {names}")
    found = [form for form in FORMS if any(field in record for field in form)]
    if len(found) != 1 or any(field not in record for field in found[0]):
        raise LineFault(f"the fields are {sorted(record)}", f"write an object with {names}")
    if found[0] == ("messages",):
        return Record(*_chat(record["messages"], tokenizer), is_chat=True)
    for field in found[0]:
        if not isinstance(record[field], str):
            raise LineFault(f"{field} is not a string", "write text in quotes")
        if not record[field].strip() and field != "prompt":
            raise LineFault(f"{field} is empty", "remove the line or write what is to be learned")
    if found[0] == ("text",):
        return Record(record["text"], [(0, len(record["text"]))], is_chat=False)
    text = record["prompt"] + record["completion"]
    return Record(text, [(len(record["prompt"]), len(text))], is_chat=False)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of a JSON text. Python would keep the last value of a repeated field, silently."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise LineFault(f"the field {twice!r:.60} is given twice", "keep one of them")
    return found


def _chat(messages: Any, tokenizer: Any) -> tuple[str, list[tuple[int, int]]]:
    if not isinstance(messages, list) or not messages:
        raise LineFault("messages is not a list of messages", "write a list of objects with role and content")
    for position, message in enumerate(messages, start=1):
        where = f"message {position}"
        if not isinstance(message, dict) or not isinstance(message.get("content"), str):
            raise LineFault(f"{where} has no text in content", "write objects with role and content")
        if message.get("role") not in ROLES:
            raise LineFault(
                f"{where} has the role {message.get('role')!r:.60}", f"use one of {', '.join(ROLES)}"
            )
        if message["role"] == "assistant" and not message["content"].strip():
            raise LineFault(f"{where} of the assistant is empty", "remove it or write what is to be learned")
    if all(message["role"] != "assistant" for message in messages):
        raise LineFault("no message is the assistant's", "nothing could be learned; remove the line")
    if not getattr(tokenizer, "chat_template", None):
        raise LineFault("the model has no chat template", "use prompt and completion, or text")
    text = _rendered(tokenizer, messages)
    learned = []
    for position, message in enumerate(messages):
        if message["role"] == "assistant":
            before = _rendered(tokenizer, messages[:position], add_generation_prompt=True)
            through = _rendered(tokenizer, messages[: position + 1])
            if not (text.startswith(through) and through.startswith(before)):
                raise LineFault(
                    f"the chat template renders message {position + 1} differently once others follow",
                    "split the conversation so that the assistant's last message is the one to learn",
                )
            learned.append((len(before), len(through)))
    return text, learned


def _rendered(tokenizer: Any, messages: list[dict[str, str]], **options: Any) -> str:
    if not messages:
        return ""
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, **options))
    except Exception as error:  # templates are programs, and raise whatever they like
        raise LineFault(
            f"the chat template refuses the messages ({error})", "check roles and their order"
        ) from error
