"""Calibration sequences, from the user's files, from the text that ships with the package, or from both."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from ciuic_cli.errors import InputError, UsageError
from ciuic_cli.integers import ceil_div
from ciuic_cli.text.documents import builtin_calibration_text
from ciuic_cli.text.mix_selection import complementing
from ciuic_cli.text.records import read_text_or_records
from ciuic_cli.text.shares import MIX_WEIGHT, shares_of
from ciuic_cli.text.tokenizer import (
    leading_special_tokens,
    require_known_tokens,
    tokenize_evenly,
    tokenizer_file,
)

MINIMUM_TOKENS = 256
"""Fewest calibration tokens that are accepted. Chosen, not tuned."""


@dataclass(frozen=True)
class CalibrationSequences:
    """Sequences of calibration tokens, those of the package's mix first.

    Attributes:
        tokens: LongTensor (sequences, length).
        own: how many of them, the last ones, are from the user's files.
        best_first: LongTensor of the numbers of the mix's sequences, that which completes the user's text best first;
            None: all complete it alike.
    """

    tokens: torch.Tensor
    own: int
    best_first: torch.Tensor | None = None

    @property
    def weights(self) -> torch.Tensor:
        """(sequences,) float32 weights of their losses in the statistics: MIX_WEIGHT for the mix beside a user's text,
        1 for all others."""
        weights = torch.ones(len(self.tokens))
        if self.own:
            weights[: -self.own] = MIX_WEIGHT
        return weights

    def sample(self, count: int) -> torch.Tensor:
        """Indices (LongTensor) of `count` sequences: as many of each text as `shares_of` says.

        Those of the user's text are evenly spaced, those of the mix the ones that complete it best.
        """
        mix = len(self.tokens) - self.own
        from_mix, from_own = shares_of(count, mix, self.own)
        of_the_mix = (
            _even(from_mix, mix) if self.best_first is None else self.best_first[:from_mix].sort().values
        )
        return torch.cat((of_the_mix, mix + _even(from_own, self.own)))


def _even(count: int, available: int) -> torch.Tensor:
    return torch.arange(count) * available // max(count, 1)


def calibration_sequences(
    tokenizer: Any,
    files: Sequence[Path],
    *,
    only: bool,
    nsamples: int,
    seqlen: int,
    vocab_size: int,
    passages: int = 1,
) -> CalibrationSequences:
    """At most `nsamples` sequences of the user's files and the package's mix, in the shares of `shares_of`.

    Without files all are from the mix, with files and `only` none is. The user's sequences are those of
    `calibration_batch`; those of the mix have passages that complete them (`mix_selection.complementing`). A text that
    is shorter than a sequence is filled up with tokens of the other text. Raises as `calibration_batch` does.

    passages: of a sequence: stretches of nearly equal length from distant parts of the text, one after the other. With
    one passage per sequence, 24 sequences missed whole kinds of text (measured:
    docs/experiments/statistics/passages.md).
    """
    size = {"nsamples": nsamples, "seqlen": seqlen, "vocab_size": vocab_size, "passages": passages}
    if only and files:
        tokens = calibration_batch(tokenizer, files, **size)
        return CalibrationSequences(tokens, len(tokens))
    leading = leading_special_tokens(tokenizer)  # first: a tokenizer that does not work is named here
    own = _text_tokens(tokenizer, files, nsamples * seqlen) if files else array("i")
    mix = _text_tokens(tokenizer, (), nsamples * seqlen)
    require_known_tokens(tokenizer, chain(leading, mix, own), vocab_size)
    body = _body(tokenizer, leading, seqlen, max(len(mix), len(own)))
    if not files:
        count = min(nsamples, len(mix) // body)
        return CalibrationSequences(_of_the_mix_alone(leading, mix, body, count, passages, vocab_size), 0)
    mix, own = _filled(mix, own, body), _filled(own, mix, body)
    from_mix, from_own = shares_of(nsamples, len(mix) // body, len(own) // body)
    of_the_user = _sequences(leading, own, body, from_own, passages)
    candidates = _candidates(mix, body, from_mix, passages)
    best_first = complementing(candidates, of_the_user, from_mix * passages, vocab_size)
    chosen = best_first.reshape(from_mix, passages)
    order = chosen[:, 0].argsort()
    of_the_mix = _joined(leading, candidates, chosen[order], body)
    return CalibrationSequences(torch.cat((of_the_mix, of_the_user)), from_own, order.argsort())


def calibration_batch(
    tokenizer: Any, files: Sequence[Path], *, nsamples: int, seqlen: int, vocab_size: int, passages: int = 1
) -> torch.Tensor:
    """Sequences of tokens of the files, from the whole text.

    Returns a LongTensor (n, seqlen) with n <= nsamples. Every sequence begins with the tokenizer's leading special
    tokens (BOS), and has `passages` passages of the text, which do not overlap. `seqlen` is reduced to the length of
    the text if that is shorter. `tokenize_evenly` leaves out parts of a large text.

    Raises InputError for text that is unreadable or too short, and for tokens outside `vocab_size`; UsageError if the
    leading special tokens fill `seqlen`.
    """
    leading = leading_special_tokens(tokenizer)  # first, as above
    ids = _text_tokens(tokenizer, files, nsamples * seqlen)
    require_known_tokens(tokenizer, chain(leading, ids), vocab_size)
    body = _body(tokenizer, leading, seqlen, len(ids))
    return _sequences(leading, ids, body, min(nsamples, len(ids) // body), passages)


def _text_tokens(tokenizer: Any, files: Sequence[Path], needed: int) -> array[int]:
    texts = (
        [read_text_or_records(path, tokenizer) for path in files] if files else [builtin_calibration_text()]
    )
    ids = tokenize_evenly(tokenizer, texts, needed)
    if len(ids) < MINIMUM_TOKENS:
        raise InputError(
            f"calibration text has {len(ids)} tokens; at least {MINIMUM_TOKENS} are needed",
            file=files[0] if files else None,
            remedy="give more text (--calibration can be repeated)",
        )
    return ids


def _body(tokenizer: Any, leading: Sequence[int], seqlen: int, longest: int) -> int:
    """Tokens of a sequence after the leading special ones, at most `longest`."""
    seqlen = min(seqlen, longest + len(leading))
    body = seqlen - len(leading)
    if body < 1:
        raise UsageError(
            f"sequences of {seqlen} tokens leave no room after the {len(leading)} that the tokenizer puts first",
            file=tokenizer_file(tokenizer.name_or_path),
            remedy="use a larger --seqlen if the model has as many positions, or check the tokenizer",
        )
    return body


def _filled(ids: array[int], other: array[int], body: int) -> array[int]:
    """The tokens; if they are fewer than `body`, tokens of the other text come before them."""
    missing = body - len(ids)
    return other[:missing] + ids if missing > 0 else ids


def _sequences(leading: Sequence[int], ids: array[int], body: int, count: int, passages: int) -> torch.Tensor:
    """LongTensor (count, leading and body tokens): sequences whose passages are at even distances over the text.

    count * body is at most the number of tokens. The passages do not overlap.
    """
    ends = [body * passage // passages for passage in range(passages + 1)]
    unused, places = len(ids) - count * body, count * passages
    rows = [list(leading) for _ in range(count)]
    begin = 0
    for place in range(places):
        passage, row = divmod(place, count)
        length = ends[passage + 1] - ends[passage]
        start = begin + unused * place // places
        rows[row] += ids[start : start + length]
        begin += length
    return torch.tensor(rows, dtype=torch.long).reshape(count, len(leading) + body)


def _of_the_mix_alone(
    leading: Sequence[int], ids: array[int], body: int, count: int, passages: int, vocab_size: int
) -> torch.Tensor:
    """LongTensor (count, leading and body tokens): sequences that stand for the whole mix.

    Their passages are at even distances, but the last one of each sequence, if there are several, completes those.
    """
    if passages == 1 or not count:
        return _sequences(leading, ids, body, count, passages)
    candidates = _candidates(ids, body, count, passages)
    evenly = _even((passages - 1) * count, len(candidates))
    rest = torch.ones(len(candidates), dtype=torch.bool)
    rest[evenly] = False
    others = rest.nonzero()[:, 0]
    last = others[complementing(candidates[others], candidates[evenly], count, vocab_size)]
    return _joined(leading, candidates, torch.stack((*evenly.split(count), last), 1), body)


def _candidates(ids: array[int], body: int, count: int, passages: int) -> torch.Tensor:
    """LongTensor (n, length): the whole text as passages, at least those of `count` sequences of `body` tokens.

    Where the text is short, neighbours overlap by a token or two.
    """
    length = ceil_div(body, passages)
    available = max(len(ids) // length, count * passages)
    starts = [min(place * len(ids) // available, len(ids) - length) for place in range(available)]
    return torch.tensor([ids[start : start + length] for start in starts], dtype=torch.long)


def _joined(
    leading: Sequence[int], candidates: torch.Tensor, chosen: torch.Tensor, body: int
) -> torch.Tensor:
    """Sequences (count, leading and body tokens) of the passages with the numbers chosen (count, passages)."""
    bodies = candidates[chosen].flatten(1)[:, :body]
    return torch.cat((torch.tensor(leading, dtype=torch.long).expand(len(chosen), len(leading)), bodies), 1)
