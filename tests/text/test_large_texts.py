"""Texts of many megabytes are tokenized in pieces, and only as far as tokens are needed; others as a whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ciuic_cli.text import tokenizer
from ciuic_cli.text.calibration import calibration_batch
from ciuic_cli.text.documents import builtin_calibration_text, split_documents
from ciuic_cli.text.tokenizer import leading_special_tokens, open_tokenizer, tokenize, tokenize_evenly

SAMPLES = Path(__file__).parents[2] / "samples"


class Characters:
    """A tokenizer with one token per character, which records the texts that it gets."""

    name_or_path = "characters"

    def __init__(self) -> None:
        self.seen: list[str] = []

    def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
        self.seen.append(text)
        return {"input_ids": [ord(character) for character in text]}


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer, "PIECE_CHARACTERS", 1000)
    monkeypatch.setattr(tokenizer, "WHOLE_CHARACTERS", 16_000)


@pytest.mark.parametrize("file", [None, SAMPLES / "text" / "calibration.txt"])
@pytest.mark.parametrize(("nsamples", "seqlen"), [(24, 512), (64, 512), (848, 512), (16, 100_000)])
def test_tokens_of_texts_of_ordinary_size_are_those_of_whole_documents(
    file: Path | None, nsamples: int, seqlen: int
) -> None:
    words = open_tokenizer(SAMPLES / "deepseek-v3-tiny")
    text = builtin_calibration_text() if file is None else file.read_text()
    ids = [
        token
        for document in split_documents(text)
        for token in words(document, add_special_tokens=False, verbose=False)["input_ids"]
    ]
    prefix = leading_special_tokens(words)
    body = min(seqlen, len(ids) + len(prefix)) - len(prefix)
    count = min(nsamples, len(ids) // body)
    starts = [min(int(index * (len(ids) / count)), len(ids) - body) for index in range(count)]
    expected = torch.tensor([prefix + ids[start : start + body] for start in starts])
    batch = calibration_batch(
        words, [] if file is None else [file], nsamples=nsamples, seqlen=seqlen, vocab_size=1 << 20
    )
    assert batch.dtype == torch.long and torch.equal(batch, expected)


@pytest.mark.parametrize(("needed", "most"), [(1000, 34_000), (60_000, 130_000), (10**6, 300_000)])
def test_of_a_large_text_only_what_is_needed_is_tokenized(small_pieces: None, needed: int, most: int) -> None:
    text = "".join(f"{number:09d}\n" for number in range(30_000))
    words = Characters()
    ids = tokenize_evenly(words, [text], needed)
    assert max(map(len, words.seen)) <= 1000
    assert len(ids) == sum(map(len, words.seen)) <= most + 2
    assert len(ids) >= min(needed, len(text))
    lines = [int(line) for line in "".join(map(chr, ids.tolist())).split()]
    assert lines == sorted(lines) and lines[0] == 0 and lines[-1] > 25_000


def test_windows_with_a_limit_need_only_the_beginning(small_pieces: None) -> None:
    words = Characters()
    assert len(tokenize(words, "a line of text\n" * 10_000, 2500)) == 2500
    assert sum(map(len, words.seen)) < 4000
