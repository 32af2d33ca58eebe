"""Calibration sequences, from the user's files or from the text that ships with the package."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from ciuic_cli.errors import InputError, UsageError
from ciuic_cli.text.documents import builtin_calibration_text, read_text
from ciuic_cli.text.tokenizer import (
    leading_special_tokens,
    require_known_tokens,
    tokenize_evenly,
    tokenizer_file,
)

MINIMUM_TOKENS = 256
"""Fewest calibration tokens that are accepted. Chosen, not tuned."""


def calibration_batch(
    tokenizer: Any, files: Sequence[Path], *, nsamples: int, seqlen: int, vocab_size: int
) -> torch.Tensor:
    """Sequences of calibration tokens, at even distances over the whole text.

    Returns a LongTensor (n, seqlen) with n <= nsamples. Every sequence begins with the tokenizer's leading special
    tokens (BOS). The sequences do not overlap. `seqlen` is reduced to the length of the text if that is shorter.
    `tokenize_evenly` leaves out parts of a large text.

    Raises InputError for text that is unreadable or too short, and for tokens outside `vocab_size`; UsageError if the
    leading special tokens fill `seqlen`.
    """
    texts = [read_text(path) for path in files] if files else [builtin_calibration_text()]
    ids = tokenize_evenly(tokenizer, texts, nsamples * seqlen)
    leading = leading_special_tokens(tokenizer)
    if len(ids) < MINIMUM_TOKENS:
        raise InputError(
            f"calibration text has {len(ids)} tokens; at least {MINIMUM_TOKENS} are needed",
            file=files[0] if files else None,
            remedy="give more text (--calibration can be repeated)",
        )
    require_known_tokens(tokenizer, chain(leading, ids), vocab_size)
    seqlen = min(seqlen, len(ids) + len(leading))
    body = seqlen - len(leading)
    if body < 1:
        raise UsageError(
            f"sequences of {seqlen} tokens leave no room after the {len(leading)} that the tokenizer puts first",
            file=tokenizer_file(tokenizer.name_or_path),
            remedy="use a larger --seqlen if the model has as many positions, or check the tokenizer",
        )
    count = min(nsamples, len(ids) // body)
    distance = len(ids) / count
    starts = [min(int(index * distance), len(ids) - body) for index in range(count)]
    return torch.tensor([[*leading, *ids[start : start + body]] for start in starts], dtype=torch.long)
