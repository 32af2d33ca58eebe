"""Measures the KL divergence of a changed model from the original.

The original and models with changed weights run layer by layer from files; a finished artifact runs in memory.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ciuic_cli.checkpoint.model_map import ModelMap
from ciuic_cli.errors import TargetError
from ciuic_cli.evaluation.divergence import kl_divergence
from ciuic_cli.evaluation.estimates import Floats, Mean, mean_of
from ciuic_cli.evaluation.logits import logits_in_parts
from ciuic_cli.evaluation.stored_predictions import StoredPredictions
from ciuic_cli.layerwise.chunk_threads import bytes_besides_layers
from ciuic_cli.layerwise.layer_stream import Adjust, LayerStream
from ciuic_cli.layerwise.logits import TokenSpan
from ciuic_cli.layerwise.overrides import Override
from ciuic_cli.process.memory import PARALLEL_WORK_BYTES, limit_freed_memory
from ciuic_cli.process.progress import Progress

_BLOCK = 16
"""Tokens whose predictions are compared at a time, so that temporaries stay in a cache. Chosen, not tuned."""
NONFINITE_REMEDY = "see with `ciuic eval` whether the original predicts this text, or ask for a lower --ratio"


class KLMeter:
    """KL(original || changed) on held-out sequences.

    The constructor runs the original, and keeps its log-probabilities on disk. Everything is computed in float32: in
    bfloat16 rounding differences alone would look like a loss.

    Args:
        batches: LongTensor (sequences, length), text that the statistics did not see.
        folder: for activations and the original's log-probabilities.
    """

    def __init__(
        self,
        model_map: ModelMap,
        batches: torch.Tensor,
        folder: Path,
        *,
        device: torch.device,
        progress: Progress,
    ) -> None:
        self._map, self._device = model_map, device
        # A sequence is a chunk: few are held out, and each thread runs a chunk of its own.
        self._chunks = batches.split(1)
        self._stream = self._new_stream(folder)
        self._original = StoredPredictions(folder / "original")
        self._progress = progress
        self._run(None)

    def twin(self, folder: Path) -> KLMeter:
        """Another meter of the same text, for another thread. It reads what this one keeps of the original.

        folder: for its activations.
        """
        other = copy.copy(self)
        other._stream = self._new_stream(folder)
        return other

    def meters_side_by_side(self) -> int:
        """How many meters may work at once, one thread each; 1 where the model's layers or its vocabulary are large."""
        numbers = range(len(self._stream.prefixes))
        fits = bytes_besides_layers(self._map) <= PARALLEL_WORK_BYTES
        return min(map(self._stream.side_by_side, numbers)) if fits else 1

    def measure(self, override: Override, *, tokens: int | None = None) -> Mean:
        """KL in nats per token, with `override` for weights, of the first `tokens` of each sequence (default: all).

        Raises as `token_kls`.
        """
        return mean_of(self.token_kls(override, tokens=tokens))

    def token_kls(
        self, override: Override, adjust: Adjust | None = None, *, tokens: int | None = None
    ) -> list[Floats]:
        """KL of every token in nats, one array per sequence, with `override` for weights and `adjust` around layers.

        tokens: of each sequence, the first ones; default: all. Raises TargetError if the predictions are NaN or
        infinite.
        """
        self._stream.adjust = adjust
        kls = self._run(override, tokens)
        if not all(np.isfinite(part).all() for part in kls):
            raise TargetError(
                "once its weights are rounded, the model's predictions are NaN or infinite",
                file=self._map.checkpoint.folder,
                remedy=NONFINITE_REMEDY,
            )
        return kls

    @torch.inference_mode()
    def token_kls_of_model(self, model: Any, config: Path) -> list[Floats]:
        """KL of every token in nats, one array per sequence, of a transformers model in memory; may be NaN.

        config: the model's config.json. Raises as `logits_in_parts`.
        """
        size = self._stream.span_tokens
        kls = []
        # The allocator keeps the activations of every layer otherwise: 950 MB instead of 70 MB with SmolLM2-135M.
        hooks = [
            model.get_submodule(prefix.rstrip(".")).register_forward_hook(lambda *_: limit_freed_memory())
            for prefix in self._stream.prefixes
        ]
        for chunk, tokens in enumerate(self._stream.chunks):
            for sequence, ids in enumerate(tokens):
                parts, begin = [], 0
                for logits in logits_in_parts(model, ids, len(ids), size, config):
                    span = TokenSpan(chunk, sequence, begin)
                    log_p = self._original.get(span.name, torch.device("cpu"), len(logits))
                    parts += _block_kls(log_p, logits)
                    begin += len(logits)
                    del logits, log_p  # frees them before the next ones are made
                kls.append(np.concatenate(parts))
        for hook in hooks:
            hook.remove()
        return kls

    def _new_stream(self, folder: Path) -> LayerStream:
        return LayerStream(self._map, self._chunks, folder, device=self._device, dtype=torch.float32)

    @torch.no_grad()
    def _run(self, override: Override | None, tokens: int | None = None) -> list[Floats]:
        """KL of every token, one array per sequence; without an override, stores the original's predictions instead."""
        self._stream.chunks = [chunk[:, :tokens] for chunk in self._chunks]
        self._stream.override = override
        self._stream.forward(self._progress)
        kls: dict[tuple[int, int], list[Floats]] = {}

        def visit(span: TokenSpan, hidden: torch.Tensor, logits: torch.Tensor) -> None:
            if override is None:
                self._original.put(span.name, logits[0])
            else:
                log_p = self._original.get(span.name, logits.device, logits.shape[1])
                kls.setdefault((span.chunk, span.sequence), []).extend(_block_kls(log_p, logits[0]))

        with self._stream.tail(visit) as run_chunks:
            run_chunks(range(len(self._stream.chunks)))
        return [np.concatenate(parts) for parts in kls.values()]


def _block_kls(log_p: torch.Tensor, logits: torch.Tensor) -> list[Floats]:
    """KL of tokens (t,), a block of them at a time; log_p, logits: (t, vocabulary)."""
    kls = []
    for p_block, q_block in zip(log_p.split(_BLOCK), logits.split(_BLOCK), strict=True):
        log_q = q_block.float().log_softmax(-1)
        kls.append(kl_divergence(p_block.to(log_q.device), log_q).cpu().numpy())
    return kls
