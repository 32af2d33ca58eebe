"""Training examples from a JSON-lines file: tokens, and which of them are learned.

A line is an object in one of three forms:

    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}
    {"prompt": "...", "completion": "..."}
    {"text": "..."}

Only completions and assistant messages are learned, with the token that ends them; a text is learned as a whole.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ciuic_cli.checkpoint.architecture import build_config
from ciuic_cli.checkpoint.config.numbers import max_positions
from ciuic_cli.checkpoint.folder import read_config
from ciuic_cli.errors import InputError
from ciuic_cli.text.tokenizer import require_known_tokens, tokenizer_faults
from ciuic_cli.train.data_files import records

IGNORED = -100
"""Label of a token that is not learned; the value that torch's cross entropy ignores."""
ROLES = ("system", "user", "assistant", "tool")
"""Roles of chat messages that are accepted."""
FORMS = (("messages",), ("prompt", "completion"), ("text",))
"""Fields of the three forms of a line."""


@dataclass(frozen=True)
class Example:
    """Token ids, and as many labels: the token's id, or IGNORED."""

    ids: list[int]
    labels: list[int]


class _Fault(Exception):
    """What is wrong with a line, and what to do about it."""

    def __init__(self, message: str, remedy: str) -> None:
        super().__init__(message)
        self.message, self.remedy = message, remedy


@dataclass(frozen=True)
class Limits:
    """What a model and the options allow. max_length: most tokens of an example. positions: those of the model, None
    if its config does not say. vocab_size: rows of its embedding."""

    max_length: int
    positions: int | None
    vocab_size: int

    @classmethod
    def of_model(cls, folder: Path, max_length: int) -> Limits:
        """The limits of the model in `folder` for examples of at most max_length tokens."""
        config = build_config(read_config(folder), folder / "config.json")
        return cls(max_length, max_positions(config), config.get_text_config().vocab_size)


def read_examples(path: Path, tokenizer: Any, limits: Limits, *, train_on_inputs: bool) -> list[Example]:
    """All examples of a file, in its order. Empty lines are skipped.

    Args:
        path: JSON lines, UTF-8, or a folder of data (`data_files.records`).
        tokenizer: a fast tokenizer of transformers; for chat messages, with a chat template.
        train_on_inputs: learn prompts and other roles' messages, too.

    Raises:
        InputError: the file cannot be read, has no example, or a line is wrong; the message names the line. Or the
            tokenizer does not work, or does not belong to the model.
    """
    examples = []
    for file, number, line in records(path):
        try:
            text, learned, is_chat = _parse(line, tokenizer)
            if train_on_inputs:
                learned = [(0, len(text))]
            examples.append(_tokenized(tokenizer, text, learned, is_chat, limits))
        except _Fault as fault:
            raise InputError(f"line {number}: {fault.message}", file=file, remedy=fault.remedy) from fault
    if not examples:
        raise InputError("the file has no example", file=path, remedy="write one JSON object per line")
    require_known_tokens(tokenizer, (max(example.ids) for example in examples), limits.vocab_size)
    return examples


def _parse(line: str, tokenizer: Any) -> tuple[str, list[tuple[int, int]], bool]:
    """(text of a line, learned ranges of its characters, whether a chat template made it)."""
    try:
        record = json.loads(line, object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        raise _Fault(f"this is not JSON ({error})", "write one JSON object per line") from error
    names = " or ".join(" and ".join(form) for form in FORMS)
    if not isinstance(record, dict):
        raise _Fault("this is not a JSON object", f"write an object with {names}")
    found = [form for form in FORMS if any(field in record for field in form)]
    if len(found) != 1 or any(field not in record for field in found[0]):
        raise _Fault(f"the fields are {sorted(record)}", f"write an object with {names}")
    if found[0] == ("messages",):
        return (*_chat(record["messages"], tokenizer), True)
    for field in found[0]:
        if not isinstance(record[field], str):
            raise _Fault(f"{field} is not a string", "write text in quotes")
        if not record[field].strip() and field != "prompt":
            raise _Fault(f"{field} is empty", "remove the line or write what is to be learned")
    if found[0] == ("text",):
        return record["text"], [(0, len(record["text"]))], False
    text = record["prompt"] + record["completion"]
    return text, [(len(record["prompt"]), len(text))], False


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of a JSON text. Python would keep the last value of a repeated field, silently."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise _Fault(f"the field {twice!r:.60} is given twice", "keep one of them")
    return found


def _chat(messages: Any, tokenizer: Any) -> tuple[str, list[tuple[int, int]]]:
    if not isinstance(messages, list) or not messages:
        raise _Fault("messages is not a list of messages", "write a list of objects with role and content")
    for position, message in enumerate(messages, start=1):
        where = f"message {position}"
        if not isinstance(message, dict) or not isinstance(message.get("content"), str):
            raise _Fault(f"{where} has no text in content", "write objects with role and content")
        if message.get("role") not in ROLES:
            raise _Fault(
                f"{where} has the role {message.get('role')!r:.60}", f"use one of {', '.join(ROLES)}"
            )
        if message["role"] == "assistant" and not message["content"].strip():
            raise _Fault(f"{where} of the assistant is empty", "remove it or write what is to be learned")
    if all(message["role"] != "assistant" for message in messages):
        raise _Fault("no message is the assistant's", "nothing could be learned; remove the line")
    if not getattr(tokenizer, "chat_template", None):
        raise _Fault("the model has no chat template", "use prompt and completion, or text")
    text = _rendered(tokenizer, messages)
    learned = []
    for position, message in enumerate(messages):
        if message["role"] == "assistant":
            before = _rendered(tokenizer, messages[:position], add_generation_prompt=True)
            through = _rendered(tokenizer, messages[: position + 1])
            if not (text.startswith(through) and through.startswith(before)):
                raise _Fault(
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
        raise _Fault(
            f"the chat template refuses the messages ({error})", "check roles and their order"
        ) from error


def _tokenized(
    tokenizer: Any, text: str, learned: list[tuple[int, int]], is_chat: bool, limits: Limits
) -> Example:
    """A chat template writes special tokens itself; other texts get the tokenizer's own and an end of text."""
    try:
        text.encode()
    except UnicodeEncodeError as error:  # "\\ud800" in JSON
        raise _Fault(
            "a character is half of a surrogate pair", "write the whole character, or remove it"
        ) from error
    with tokenizer_faults(tokenizer.name_or_path):
        encoded = tokenizer(text, add_special_tokens=not is_chat, return_offsets_mapping=True, verbose=False)
    ids = list(encoded["input_ids"])
    labels = [
        token if end > begin and any(first < end and begin < last for first, last in learned) else IGNORED
        for token, (begin, end) in zip(ids, encoded["offset_mapping"], strict=True)
    ]
    end_of_text = tokenizer.eos_token_id
    if not is_chat and end_of_text is not None:
        if ids and ids[-1] == end_of_text:
            ids.pop(), labels.pop()
        ids.append(end_of_text)
        labels.append(end_of_text)
    if limits.positions is not None and len(ids) > limits.positions:
        raise _Fault(
            f"the example has {len(ids)} tokens, more than the {limits.positions} positions of the model",
            "shorten or split it",
        )
    if len(ids) > limits.max_length:
        raise _Fault(
            f"the example has {len(ids)} tokens, more than the {limits.max_length} of --sequence-len",
            "shorten or split it, or give a longer --sequence-len",
        )
    if ids:
        labels[0] = IGNORED  # nothing comes before it that could predict it
    if all(label == IGNORED for label in labels):
        raise _Fault("no token is left to learn", "write a longer completion or text")
    return Example(ids, labels)
