"""Tokenizers of model folders: text to token ids, and damaged tokenizer files as errors that name the file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ciuic_cli.checkpoint.folder import locate
from ciuic_cli.errors import CiuicError, InputError
from ciuic_cli.process.memory import exhaustion
from ciuic_cli.text.documents import documents_of


def open_tokenizer(path: str | Path) -> Any:
    """The tokenizer in a model's folder; raises InputError if it cannot be loaded."""
    from transformers import AutoTokenizer

    folder = locate(path)
    with tokenizer_faults(folder):
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)


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
            file=tokenizer_file(folder),
            remedy="check its permissions"
            if isinstance(error, PermissionError)
            else "copy tokenizer.json and tokenizer_config.json of the original there",
        ) from error


def _is_panic(error: BaseException) -> bool:
    """Whether code in Rust gave up; Python's name for that is no `Exception`."""
    kind = type(error)
    return (kind.__module__, kind.__name__) == ("pyo3_runtime", "PanicException")


def tokenizer_file(folder: str | Path) -> Path:
    file = Path(folder) / "tokenizer.json"
    return file if file.is_file() else Path(folder)


def require_known(tokenizer: Any, ids: Iterable[int], vocab_size: int) -> None:
    """Raise `InputError` if the model has no such tokens."""
    highest = max(ids, default=0)
    if highest >= vocab_size:
        raise InputError(
            f"the tokenizer gives token {highest}, the model has only {vocab_size}",
            file=tokenizer_file(tokenizer.name_or_path),
            remedy="check that tokenizer and weights belong together",
        )
