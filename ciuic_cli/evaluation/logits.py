"""Predictions of a model for the windows of a text, in parts: with a large vocabulary, the logits of a whole window
take gigabytes. A checkpoint that does not fit into memory runs layer by layer from its files (`streamed`)."""

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
from ciuic_cli.layerwise.layer_stream import LayerStream
from ciuic_cli.layerwise.logits import logit_tokens
from ciuic_cli.process.progress import Progress

PredictWindow = Callable[[int], Iterator[torch.Tensor]]
"""Yields the logits (tokens, vocabulary) of the window with this number, in consecutive parts. They predict all tokens
of the window but the first."""


def loaded(model: Any, windows: Sequence[torch.Tensor], config: Path) -> PredictWindow:
    """Predictions of a transformers model in memory.

    Args:
        windows: LongTensors (length,).
        config: config.json, for messages where transformers cannot run the model.
    """
    size = logit_tokens(model.config.get_text_config().vocab_size)

    def predict(number: int) -> Iterator[torch.Tensor]:
        return logits_in_parts(model, windows[number], len(windows[number]) - 1, size, config)

    return predict


def logits_in_parts(
    model: Any, tokens: torch.Tensor, count: int, size: int, config: Path
) -> Iterator[torch.Tensor]:
    """Logits of a transformers model for the first `count` of the tokens (length,), at most `size` at a time.

    The model's body, which is everything before the head, runs once. Then the model's own forward runs for some tokens
    at a time, while the body returns the hidden states that it gave for them.

    Yields:
        (at most `size`, vocabulary), in order.

    Raises:
        InputError: transformers cannot run the model of this config.json.
    """

    def run(module: Any, ids: torch.Tensor) -> Any:
        with config_faults(config):
            return module(input_ids=ids, use_cache=False)

    ids = tokens[None].to(model.device)
    if count <= size or model.base_model is model:
        yield run(model, ids).logits[0, :count]
        return
    output = run(model.base_model, ids)
    for begin in range(0, count, size):
        part = slice(begin, min(begin + size, count))
        states = replace(output, last_hidden_state=output.last_hidden_state[:, part])
        with _returning(model.base_model, states):
            logits = run(model, ids[:, part]).logits[0]
        yield logits
        del logits  # frees them before the next ones are made


@contextmanager
def _returning(module: Any, output: Any) -> Iterator[None]:
    """Inside the block the module returns this output for any input."""
    instance_forward = vars(module).get("forward")  # set on the instance by accelerate's hooks, for example
    module.forward = lambda *arguments, **options: output
    try:
        yield
    finally:
        del module.forward
        if instance_forward is not None:
            module.forward = instance_forward


@contextmanager
def streamed(
    folder: Path,
    windows: Sequence[torch.Tensor],
    device: torch.device,
    dtype: torch.dtype,
    progress: Progress,
) -> Iterator[PredictWindow]:
    """Predictions of a checkpoint with one layer in memory at a time; hidden states are kept in a temporary folder.

    Args:
        windows: LongTensors (length,).
        dtype: of matrix products; the residual stream is float32.

    Raises:
        InputError: as `open_checkpoint` and `map_model`; activations that are NaN or infinite.
    """
    with tempfile.TemporaryDirectory(prefix="ciuic-") as scratch:
        model_map = map_model(open_checkpoint(folder))
        stream = LayerStream(
            model_map, [window[None] for window in windows], Path(scratch), device=device, dtype=dtype
        )
        stream.forward(lambda _, done, total: progress("layers", done, total))
        with stream.tail_logits() as logits_of_chunk:

            def predict(number: int) -> Iterator[torch.Tensor]:
                last = len(windows[number]) - 1
                for span, _, logits in logits_of_chunk(number):
                    if span.begin < last:
                        yield logits[0, : last - span.begin]
                    del logits  # frees them before the next ones are made

            yield predict
