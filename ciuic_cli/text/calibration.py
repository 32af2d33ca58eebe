"""Calibration text to token sequences: the user's files, or the package's own mix."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from ciuic_cli.errors import InputError, UsageError
from ciuic_cli.text.documents import own_calibration_text, read_text
from ciuic_cli.text.tokenizer import beginning, require_known, tokenize, tokenizer_file

MINIMUM_TOKENS = 256


def calibration_batch(
    tokenizer: Any, files: Sequence[Path], *, nsamples: int, seqlen: int, vocab_size: int
) -> torch.Tensor:
    """Sequences of calibration tokens, spread evenly over all the text.

    Returns a LongTensor (n, seqlen) with n <= nsamples: every sequence begins with the tokenizer's own
    beginning (BOS), windows do not overlap, and they are taken at even distances, so that a short run
    still sees every part of the mix. Raises `InputError` for text that is unreadable or too short.
    """
    texts = [read_text(path) for path in files] if files else [own_calibration_text()]
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
            file=tokenizer_file(tokenizer.name_or_path),
            remedy="use longer sequences, or check the tokenizer",
        )
    count = min(nsamples, len(ids) // body)
    step = len(ids) / count
    starts = [min(int(index * step), len(ids) - body) for index in range(count)]
    return torch.tensor([prefix + ids[start : start + body] for start in starts], dtype=torch.long)
