"""What a model predicts in the windows of a text, part by part: with a large vocabulary the logits of a window take
gigabytes. A checkpoint that does not fit into memory runs layer by layer, straight from its files."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ciuic_cli.checkpoint.architecture import config_faults
from ciuic_cli.checkpoint.model_map import map_model
from ciuic_cli.checkpoint.reader import open_checkpoint
from ciuic_cli.layerwise.layer_stream import LayerStream, Progress, logit_tokens

Predict = Callable[[int], Iterator[torch.Tensor]]
"""Logits (some tokens, vocabulary) of all tokens of a window but the first, in consecutive parts, by its number."""


def loaded(model: Any, windows: Sequence[torch.Tensor], config: Path) -> Predict:
    """Predictions of a transformers model.

    Its body, all that comes before the head, runs once for a window. What follows is the model's own forward, for some
    tokens at a time, in which the body answers with the hidden states that it gave for them.

    Args:
        windows: LongTensors (length,).
        config: the file that is named where transformers cannot run the model.
    """
    size = logit_tokens(model.config.get_text_config().vocab_size)

    def run(module: Any, ids: torch.Tensor) -> Any:
        with config_faults(config):
            return module(input_ids=ids, use_cache=False)

    def predict(number: int) -> Iterator[torch.Tensor]:
        ids, last = windows[number][None].to(model.device), len(windows[number]) - 1
        if last <= size or model.base_model is model:
            yield run(model, ids).logits[0, :-1]
            return
        output = run(model.base_model, ids)
        for begin in range(0, last, size):
            some = slice(begin, min(begin + size, last))
            part = replace(output, last_hidden_state=output.last_hidden_state[:, some])
            with _answering_with(model.base_model, part):
                logits = run(model, ids[:, some]).logits[0]
            yield logits
            del logits  # before the next ones

    return predict


@contextmanager
def streamed(
    folder: Path,
    windows: Sequence[torch.Tensor],
    device: torch.device,
    dtype: torch.dtype,
    progress: Progress,
) -> Iterator[Predict]:
    """Predictions of a checkpoint, of which one layer is in memory at a time; hidden states lie in a temporary folder.

    Args:
        windows: LongTensors (length,). dtype: of products; the residual stream is float32.

    Raises:
        InputError: as `open_checkpoint` and `map_model`; activations that are not finite.
    """
    with tempfile.TemporaryDirectory(prefix="ciuic-") as scratch:
        model_map = map_model(open_checkpoint(folder))
        stream = LayerStream(
            model_map, [window[None] for window in windows], Path(scratch), device=device, dtype=dtype
        )
        stream.forward(lambda _, done, total: progress("layers", done, total))
        with stream.predicting() as parts:

            def predict(number: int) -> Iterator[torch.Tensor]:
                last = len(windows[number]) - 1
                for place, _, logits in parts(number):
                    if place.begin < last:
                        yield logits[0, : last - place.begin]
                    del logits  # before the next ones

            yield predict


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
