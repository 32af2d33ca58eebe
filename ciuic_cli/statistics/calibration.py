"""Calibration text to token sequences: the user's files, or the package's own mix."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from ciuic_cli.errors import InputError

DOCUMENT_SEPARATOR = "<|doc|>"
MINIMUM_TOKENS = 256


def read_text(path: Path) -> str:
    """The text of one UTF-8 file; raises `InputError` if it is missing, empty or not UTF-8."""
    try:
        text = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"the text is not UTF-8 (byte {error.start})",
            file=path,
            remedy="convert it, for example with iconv -t utf-8",
        ) from error
    except OSError as error:
        raise InputError(
            f"the text cannot be read: {error.strerror}",
            file=path,
            remedy="name a readable UTF-8 text file",
        ) from error
    if not text.strip():
        raise InputError("the text is empty", file=path, remedy="name a file with text in it")
    return text


def default_text() -> str:
    """The mix that ships with the package (sources and licences: data/SOURCES.md)."""
    return resources.files("ciuic_cli").joinpath("data/calibration.txt").read_text(encoding="utf-8")


def documents_of(text: str) -> list[str]:
    """The documents of a text, each ending in an empty line; a text without separators is one document."""
    return [part.strip("\n") + "\n\n" for part in text.split(f"\n{DOCUMENT_SEPARATOR}\n")]


def tokenize(tokenizer: Any, text: str) -> list[int]:
    """Token ids of all documents of `text`, without special tokens."""
    ids: list[int] = []
    for document in documents_of(text):
        ids.extend(tokenizer(document, add_special_tokens=False, verbose=False)["input_ids"])
    return ids


def beginning(tokenizer: Any) -> list[int]:
    """The special tokens the tokenizer puts before a text (usually BOS, or nothing)."""
    with_special = tokenizer("a")["input_ids"]
    without = tokenizer("a", add_special_tokens=False)["input_ids"]
    for start in range(len(with_special) - len(without) + 1):
        if with_special[start : start + len(without)] == without:
            return list(with_special[:start])
    return []


def calibration_batch(
    tokenizer: Any, files: Sequence[Path], *, nsamples: int, seqlen: int, vocab_size: int
) -> torch.Tensor:
    """Sequences of calibration tokens, spread evenly over all the text.

    Returns a LongTensor (n, seqlen) with n <= nsamples: every sequence begins with the tokenizer's own
    beginning (BOS), windows do not overlap, and they are taken at even distances, so that a short run
    still sees every part of the mix. Raises `InputError` for text that is unreadable or too short.
    """
    texts = [read_text(path) for path in files] if files else [default_text()]
    ids = [token for text in texts for token in tokenize(tokenizer, text)]
    prefix = beginning(tokenizer)
    if len(ids) < MINIMUM_TOKENS:
        raise InputError(
            f"calibration text has {len(ids)} tokens; at least {MINIMUM_TOKENS} are needed",
            file=files[0] if files else None,
            remedy="give more text (--calibration can be repeated)",
        )
    if max(ids) >= vocab_size:
        raise InputError(
            f"the tokenizer gives token {max(ids)}, the model has only {vocab_size}",
            remedy="check that tokenizer and weights belong together",
        )
    seqlen = min(seqlen, len(ids) + len(prefix))
    body = seqlen - len(prefix)
    count = min(nsamples, len(ids) // body)
    step = len(ids) / count
    starts = [min(int(index * step), len(ids) - body) for index in range(count)]
    return torch.tensor([prefix + ids[start : start + body] for start in starts], dtype=torch.long)
