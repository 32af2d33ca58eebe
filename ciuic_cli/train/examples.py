"""Training examples from a JSON-lines file: tokens, and which of them are learned.

A line has one of the forms of `ciuic_cli/text/records.py`. Only completions and assistant messages are learned, with
the token that ends them; a text is learned as a whole.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ciuic_cli.checkpoint.architecture import build_config
from ciuic_cli.checkpoint.config.numbers import max_positions
from ciuic_cli.checkpoint.folder import read_config
from ciuic_cli.errors import InputError
from ciuic_cli.text.data_files import records
from ciuic_cli.text.records import LineFault, Record, line_faults, parse
from ciuic_cli.text.tokenizer import require_known_tokens, tokenizer_faults

IGNORED = -100
"""Label of a token that is not learned; the value that torch's cross entropy ignores."""


@dataclass(frozen=True)
class Example:
    """Token ids, and as many labels: the token's id, or IGNORED."""

    ids: list[int]
    labels: list[int]


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
        with line_faults(file, number):
            record = parse(line, tokenizer)
            if train_on_inputs:
                record = replace(record, learned=[(0, len(record.text))])
            examples.append(_tokenized(tokenizer, record, limits))
    if not examples:
        raise InputError("the file has no example", file=path, remedy="write one JSON object per line")
    require_known_tokens(tokenizer, (max(example.ids) for example in examples), limits.vocab_size)
    return examples


def _tokenized(tokenizer: Any, record: Record, limits: Limits) -> Example:
    """A chat template writes special tokens itself; other texts get the tokenizer's own and an end of text."""
    with tokenizer_faults(tokenizer.name_or_path):
        encoded = tokenizer(
            record.text, add_special_tokens=not record.is_chat, return_offsets_mapping=True, verbose=False
        )
    ids = list(encoded["input_ids"])
    labels = [
        token
        if end > begin and any(first < end and begin < last for first, last in record.learned)
        else IGNORED
        for token, (begin, end) in zip(ids, encoded["offset_mapping"], strict=True)
    ]
    end_of_text = tokenizer.eos_token_id
    if not record.is_chat and end_of_text is not None:
        if ids and ids[-1] == end_of_text:
            ids.pop(), labels.pop()
        ids.append(end_of_text)
        labels.append(end_of_text)
    if limits.positions is not None and len(ids) > limits.positions:
        raise LineFault(
            f"the example has {len(ids)} tokens, more than the {limits.positions} positions of the model",
            "shorten or split it",
        )
    if len(ids) > limits.max_length:
        raise LineFault(
            f"the example has {len(ids)} tokens, more than the {limits.max_length} of --sequence-len",
            "shorten or split it, or give a longer --sequence-len",
        )
    if ids:
        labels[0] = IGNORED  # nothing comes before it that could predict it
    if all(label == IGNORED for label in labels):
        raise LineFault("no token is left to learn", "write a longer completion or text")
    return Example(ids, labels)
