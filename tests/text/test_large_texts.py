"""Texts of many megabytes are tokenized in pieces, and only as far as tokens are needed; others as a whole."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from ciuic_cli.text import tokenizer
from ciuic_cli.text.calibration import calibration_batch
from ciuic_cli.text.documents import split_documents
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


@pytest.mark.parametrize("passages", [1, 4])
@pytest.mark.parametrize(("nsamples", "seqlen"), [(24, 512), (64, 511), (848, 514), (16, 100_000)])
def test_passages_of_texts_of_ordinary_size_are_those_of_whole_documents(
    nsamples: int, seqlen: int, passages: int
) -> None:
    """Passages are at even distances over the text; together they are the text if all of it fits."""
    words = open_tokenizer(SAMPLES / "deepseek-v3-tiny")
    file = SAMPLES / "text" / "calibration.txt"
    ids = [
        token
        for document in split_documents(file.read_text())
        for token in words(document, add_special_tokens=False, verbose=False)["input_ids"]
    ]
    prefix = leading_special_tokens(words)
    batch = calibration_batch(
        words, [file], nsamples=nsamples, seqlen=seqlen, vocab_size=1 << 20, passages=passages
    )
    body = min(seqlen, len(ids) + len(prefix)) - len(prefix)
    count = min(nsamples, len(ids) // body)
    assert batch.dtype == torch.long and batch.shape == (count, len(prefix) + body)
    assert batch[:, : len(prefix)].tolist() == count * [prefix]
    ends = [body * passage // passages for passage in range(passages + 1)]
    found = [
        part.tolist()
        for begin, end in itertools.pairwise(ends)
        for part in batch[:, len(prefix) :][:, begin:end]
    ]
    unused = len(ids) - sum(map(len, found))
    begin = 0
    for place, passage in enumerate(found):
        start = begin + unused * place // len(found)
        assert passage == ids[start : start + len(passage)]
        begin += len(passage)


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
