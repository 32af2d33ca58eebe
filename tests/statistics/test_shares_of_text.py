"""How the text is cut into chunks, and shared by workers."""

from __future__ import annotations

from itertools import chain

import pytest
import torch

from ciuic_cli.process.workers import Workers
from ciuic_cli.statistics.sums import chunks_of, gradient_sequences, share_of_text


@pytest.mark.parametrize(("sequences", "most"), [(1, 4), (2, 4), (5, 1), (20, 4), (60, 4), (7, 7), (9, 2)])
def test_chunks_are_nearly_equal_and_keep_two_threads_busy(sequences: int, most: int) -> None:
    numbers = torch.arange(sequences)
    chunks = chunks_of(numbers, torch.ones(sequences), most)
    sizes = [len(chunk) for chunk in chunks]
    assert torch.equal(torch.cat(chunks), numbers)
    assert max(sizes) <= most and max(sizes) - min(sizes) <= 1
    assert len(chunks) % 2 == 0 or len(chunks) == sequences


@pytest.mark.parametrize("gradient_every", [1, 2, 3])
@pytest.mark.parametrize("size", [1, 3, 12])
def test_workers_share_all_sequences(size: int, gradient_every: int) -> None:
    """Every sequence is in one chunk of one worker, beside sequences of the same weight; an even share of all runs
    backward. All workers have the same number of rounds."""
    weights = torch.where(torch.arange(14) < 5, 0.5, 1.0)
    shares = [share_of_text(weights, gradient_every, 4, Workers(number, size)) for number in range(size)]
    assert sorted(torch.cat([each for share in shares for each in share.chunks]).tolist()) == list(range(14))
    assert all(len(weights[chunk].unique()) == 1 for share in shares for chunk in share.chunks)
    for share in shares:
        assert list(chain(*share.backward, *share.only_forward)) == list(range(len(share.chunks)))
        assert [len(share.backward), len(share.only_forward)] == [
            len(shares[0].backward), len(shares[0].only_forward),
        ]  # fmt: skip
    backward = [share.chunks[chunk] for share in shares for chunk in chain(*share.backward)]
    assert torch.cat(backward).sort().values.tolist() == list(range(0, 14, gradient_every))
    assert gradient_sequences(14, gradient_every) == len(torch.cat(backward))
