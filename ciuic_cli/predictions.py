"""A loaded model's predictions, part by part: with a large vocabulary the logits of a window take gigabytes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from ciuic_cli.statistics.streaming import logit_tokens


def predictions(model: Any, window: torch.Tensor) -> Iterator[torch.Tensor]:
    """Logits (some tokens, vocabulary) of all tokens of a window (length,) but the first, in consecutive parts.

    The body of a transformers model, all that comes before the head, runs once. What follows is the model's own
    forward, for some tokens at a time, in which the body answers with the hidden states that it gave for them.
    """
    ids, last = window[None].to(model.device), len(window) - 1
    size = logit_tokens(model.config.get_text_config().vocab_size)
    if last <= size or model.base_model is model:
        yield model(input_ids=ids, use_cache=False).logits[0, :-1]
        return
    output = model.base_model(input_ids=ids, use_cache=False)
    for begin in range(0, last, size):
        some = slice(begin, min(begin + size, last))
        part = replace(output, last_hidden_state=output.last_hidden_state[:, some])
        with _answering_with(model.base_model, part):
            logits = model(input_ids=ids[:, some], use_cache=False).logits[0]
        yield logits


@contextmanager
def _answering_with(module: Any, output: Any) -> Iterator[None]:
    """The module gives this output, whatever it is called with."""
    own = vars(module).get("forward")  # as accelerate's hooks are
    module.forward = lambda *arguments, **options: output
    try:
        yield
    finally:
        del module.forward
        if own is not None:
            module.forward = own
