"""Tokenizers of model folders: text to token ids. Errors of damaged tokenizer files name the file."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ciuic_cli.checkpoint.folder import locate
from ciuic_cli.errors import CiuicError, InputError
from ciuic_cli.process.memory import exhaustion
from ciuic_cli.text.documents import split_documents

PIECE_CHARACTERS = 2 << 20
"""Most characters that are tokenized at a time: the tokenizer library takes up to 200 times their size in memory. The
documents of the package's own texts are shorter, so none is cut. Chosen, not tuned."""
_TOKENIZER_FILES = ("*token*", "*vocab*", "*.model", "*.bpe", "*.spm", "tekken*")
"""Patterns of file names. A folder in which no name fits any of them has no tokenizer."""
WHOLE_CHARACTERS = 16 << 20
"""Longest text, in characters, that `tokenize_evenly` tokenizes completely: about ten seconds of work. Chosen."""


def open_tokenizer(path: str | Path) -> Any:
    """The tokenizer of a model folder or hub id. Raises InputError if it cannot be loaded."""
    from transformers import AutoTokenizer

    folder = locate(path)
    with tokenizer_faults(folder):
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)


def tokenize(tokenizer: Any, text: str, limit: int | None = None) -> array[int]:
    """Token ids (int32) of the documents of `text`, without special tokens; at most the first `limit`.

    Documents longer than `PIECE_CHARACTERS` are tokenized in pieces that end with a line.
    """
    ids = array("i")
    for document in split_documents(text):
        for piece in _pieces(document):
            ids.extend(_tokenize_piece(tokenizer, piece))
            if limit is not None and len(ids) >= limit:
                return ids[:limit]
    return ids


def tokenize_evenly(tokenizer: Any, texts: Sequence[str], needed: int) -> array[int]:
    """Token ids (int32) of all documents of the texts; of longer texts than WHOLE_CHARACTERS, of every 2^k-th piece.

    k is the largest number with which the pieces have WHOLE_CHARACTERS characters and `needed` tokens.
    """
    pieces = [piece for text in texts for document in split_documents(text) for piece in _pieces(document)]
    stride = 1
    while sum(map(len, pieces[:: 2 * stride])) >= WHOLE_CHARACTERS:
        stride *= 2
    tokens: dict[int, array[int]] = {}
    while True:
        for number in range(0, len(pieces), stride):
            if number not in tokens:
                tokens[number] = _tokenize_piece(tokenizer, pieces[number])
        if stride == 1 or sum(map(len, tokens.values())) >= needed:
            break
        stride //= 2
    ids = array("i")
    for number in sorted(tokens):
        ids.extend(tokens[number])
    return ids


def _tokenize_piece(tokenizer: Any, piece: str) -> array[int]:
    with tokenizer_faults(tokenizer.name_or_path):
        return array("i", tokenizer(piece, add_special_tokens=False, verbose=False)["input_ids"])


def _pieces(document: str) -> Iterator[str]:
    begin = 0
    while begin < len(document):
        end = begin + PIECE_CHARACTERS
        if end < len(document):
            end = document.rfind("\n", begin, end) + 1 or end  # a line without an end is cut anywhere
        yield document[begin:end]
        begin = end


def leading_special_tokens(tokenizer: Any) -> list[int]:
    """Ids of the special tokens that the tokenizer puts before a text: usually BOS, or none."""
    with tokenizer_faults(tokenizer.name_or_path):
        with_special = tokenizer("a")["input_ids"]
        without = tokenizer("a", add_special_tokens=False)["input_ids"]
    for start in range(len(with_special) - len(without) + 1):
        if with_special[start : start + len(without)] == without:
            return list(with_special[:start])
    return []


@contextmanager
def tokenizer_faults(folder: str | Path) -> Iterator[None]:
    """Convert any exception of the tokenizer libraries in the block to an InputError that names the tokenizer's file.

    Exhausted memory or threads become an EnvironmentFault: they are not an error of the file.
    """
    try:
        yield
    except CiuicError:
        raise
    except BaseException as error:
        if not (isinstance(error, Exception) or _is_rust_panic(error)):
            raise
        fault = exhaustion(error)
        if fault is not None:
            raise fault from error
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        if Path(folder).is_dir() and not any(any(Path(folder).glob(pattern)) for pattern in _TOKENIZER_FILES):
            reason = "there are no files of a tokenizer"
        raise InputError(
            f"the tokenizer does not work: {reason:.300}",
            file=tokenizer_file(folder),
            remedy="check its permissions"
            if isinstance(error, PermissionError)
            else "copy tokenizer.json and tokenizer_config.json of the original there",
        ) from error


def _is_rust_panic(error: BaseException) -> bool:
    """Whether the exception is a panic of Rust code. pyo3 derives it from BaseException, not from Exception."""
    kind = type(error)
    return (kind.__module__, kind.__name__) == ("pyo3_runtime", "PanicException")


def tokenizer_file(folder: str | Path) -> Path:
    """The file that messages about a tokenizer name: tokenizer.json, or the folder if that file is absent."""
    file = Path(folder) / "tokenizer.json"
    return file if file.is_file() else Path(folder)


def require_known_tokens(tokenizer: Any, ids: Iterable[int], vocab_size: int) -> None:
    """Raise InputError unless all token ids are below `vocab_size`, the number of rows of the model's embedding."""
    highest = max(ids, default=0)
    if highest >= vocab_size:
        raise InputError(
            f"the tokenizer gives token {highest}, but the model has only {vocab_size} tokens",
            file=tokenizer_file(tokenizer.name_or_path),
            remedy="check that tokenizer and weights belong together",
        )
