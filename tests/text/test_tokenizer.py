"""Long texts are tokenized in pieces: the same tokens, in little memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tiny_checkpoints import make_tokenizer

from ciuic_cli.text import tokenizer as tokenizer_module
from ciuic_cli.text.documents import builtin_calibration_text, builtin_evaluation_text, split_documents
from ciuic_cli.text.tokenizer import PIECE_CHARACTERS, open_tokenizer, tokenize

PEAK_OF_TOKENIZING = """
import resource, sys
from ciuic_cli.text.tokenizer import open_tokenizer, tokenize
tokenizer = open_tokenizer(sys.argv[1])
tokenize(tokenizer, "a line of text\\n" * 1000)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
ids = tokenize(tokenizer, "The river runs past the old mill, every day.\\n" * 200_000)
print(len(ids), (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level tokenizer: one token per byte."""
    path = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(path)
    return path


def test_pieces_end_with_lines_and_leave_no_token_out(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = open_tokenizer(folder)
    text = "one line\nanother line, longer than the others\n\n" + "x" * 50 + "\nend"
    whole = list(tokenize(tokenizer, text))
    sizes = []
    for size in (1, 7, 16, 1000):
        monkeypatch.setattr(tokenizer_module, "PIECE_CHARACTERS", size)
        sizes.append([len(piece) for piece in tokenizer_module._pieces(text)])
        assert list(tokenize(tokenizer, text)) == whole
    assert all(max(found) <= size for found, size in zip(sizes, (1, 7, 16, 1000), strict=True))
    assert sizes[2][:2] == [9, 16]  # "one line\n", then a line that is longer than a piece


def test_the_package_s_own_texts_are_never_cut() -> None:
    for text in (builtin_calibration_text(), builtin_evaluation_text()):
        assert max(map(len, split_documents(text))) < PIECE_CHARACTERS


def test_a_long_text_takes_little_memory(folder: Path) -> None:
    """9 MB in one document. Tokenized at once they took 2.4 GB."""
    done = subprocess.run(
        [sys.executable, "-c", PEAK_OF_TOKENIZING, str(folder)], capture_output=True, text=True, check=True
    )
    tokens, nbytes = map(int, done.stdout.split())
    assert tokens == 200_000 * 45 + 1  # the document ends with an empty line
    assert nbytes < 1 << 30
