"""Calibration text to token sequences: the user's files, or the package's own mix."""

from __future__ import annotations

import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib import resources
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from ciuic_cli.errors import CiuicError, InputError, UsageError
from ciuic_cli.memory import exhaustion

DOCUMENT_SEPARATOR = "<|doc|>"
MINIMUM_TOKENS = 256
MAXIMUM_BYTES = 64 << 20
"""Of a text: hundreds of times what any effort takes. All of it is tokenized, in many times its size of memory."""


def read_text(path: Path) -> str:
    """The text of one UTF-8 file; raises `InputError` if it is missing, empty, too long or not UTF-8."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise _unreadable(path, "it is not a regular file")
        with path.open("rb") as file:
            data = file.read(MAXIMUM_BYTES + 1)
    except OSError as error:
        raise _unreadable(path, str(error.strerror)) from error
    if len(data) > MAXIMUM_BYTES:
        raise InputError(
            f"the text has more than {MAXIMUM_BYTES:,} bytes", file=path, remedy="name a part of it"
        )
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _not_utf8(path, error.start) from error
    if "\0" in text:  # of UTF-16, or no text at all
        raise _not_utf8(path, data.index(0))
    if not text.strip():
        raise InputError("the text is empty", file=path, remedy="name a file with text in it")
    return text


def _unreadable(path: Path, reason: str) -> InputError:
    return InputError(
        f"the text cannot be read: {reason}", file=path, remedy="name a readable UTF-8 text file"
    )


def _not_utf8(path: Path, byte: int) -> InputError:
    return InputError(
        f"the text is not UTF-8 (byte {byte})",
        file=path,
        remedy="convert it, for example with iconv -t utf-8",
    )


def default_text() -> str:
    """The mix that ships with the package (sources and licences: data/SOURCES.md)."""
    return resources.files("ciuic_cli").joinpath("data/calibration.txt").read_text(encoding="utf-8")


def documents_of(text: str) -> list[str]:
    """The documents of a text, each ending in an empty line; a text without separators is one document."""
    return [part.strip("\n") + "\n\n" for part in text.split(f"\n{DOCUMENT_SEPARATOR}\n")]


def tokenize(tokenizer: Any, text: str) -> list[int]:
    """Token ids of all documents of `text`, without special tokens."""
    ids: list[int] = []
    with tokenizer_faults(tokenizer.name_or_path):
        for document in documents_of(text):
            ids.extend(tokenizer(document, add_special_tokens=False, verbose=False)["input_ids"])
    return ids


def beginning(tokenizer: Any) -> list[int]:
    """The special tokens the tokenizer puts before a text (usually BOS, or nothing)."""
    with tokenizer_faults(tokenizer.name_or_path):
        with_special = tokenizer("a")["input_ids"]
        without = tokenizer("a", add_special_tokens=False)["input_ids"]
    for start in range(len(with_special) - len(without) + 1):
        if with_special[start : start + len(without)] == without:
            return list(with_special[:start])
    return []


@contextmanager
def tokenizer_faults(folder: str | Path) -> Iterator[None]:
    """Whatever a damaged tokenizer makes its libraries raise becomes an `InputError` that names its file.

    Memory or threads that are used up are no fault of the file: `EnvironmentFault`.
    """
    try:
        yield
    except CiuicError:
        raise
    except BaseException as error:
        if not (isinstance(error, Exception) or _is_panic(error)):
            raise
        fault = exhaustion(error)
        if fault is not None:
            raise fault from error
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise InputError(
            f"the tokenizer does not work: {reason:.300}",
            file=_tokenizer_file(folder),
            remedy="check its permissions"
            if isinstance(error, PermissionError)
            else "copy tokenizer.json and tokenizer_config.json of the original there",
        ) from error


def _is_panic(error: BaseException) -> bool:
    """Whether code in Rust gave up; Python's name for that is no `Exception`."""
    kind = type(error)
    return (kind.__module__, kind.__name__) == ("pyo3_runtime", "PanicException")


def _tokenizer_file(folder: str | Path) -> Path:
    file = Path(folder) / "tokenizer.json"
    return file if file.is_file() else Path(folder)


def require_known(tokenizer: Any, ids: Iterable[int], vocab_size: int) -> None:
    """Raise `InputError` if the model has no such tokens."""
    highest = max(ids, default=0)
    if highest >= vocab_size:
        raise InputError(
            f"the tokenizer gives token {highest}, the model has only {vocab_size}",
            file=_tokenizer_file(tokenizer.name_or_path),
            remedy="check that tokenizer and weights belong together",
        )


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
    require_known(tokenizer, chain(prefix, ids), vocab_size)
    seqlen = min(seqlen, len(ids) + len(prefix))
    body = seqlen - len(prefix)
    if body < 1:
        raise UsageError(
            f"--seqlen {seqlen} leaves no room behind the tokenizer's own beginning, {len(prefix)} tokens",
            file=_tokenizer_file(tokenizer.name_or_path),
            remedy="use longer sequences, or check the tokenizer",
        )
    count = min(nsamples, len(ids) // body)
    step = len(ids) / count
    starts = [min(int(index * step), len(ids) - body) for index in range(count)]
    return torch.tensor([prefix + ids[start : start + body] for start in starts], dtype=torch.long)
