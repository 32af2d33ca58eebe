"""Measures the KL divergence of a changed model from the original.

The original and models with changed weights run layer by layer from files; a finished artifact runs in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ciuic_cli.checkpoint.model_map import ModelMap
from ciuic_cli.errors import TargetError
from ciuic_cli.evaluation.divergence import kl_divergence
from ciuic_cli.evaluation.estimates import Floats, Mean, mean_of
from ciuic_cli.evaluation.logits import logits_in_parts
from ciuic_cli.evaluation.stored_predictions import BLOCK_TOKENS, StoredPredictions
from ciuic_cli.evaluation.variants import Mark, Variant, Variants
from ciuic_cli.layerwise.layer_stream import LayerStream
from ciuic_cli.layerwise.linear_hooks import Key
from ciuic_cli.layerwise.logits import TokenSpan
from ciuic_cli.layerwise.overrides import Override
from ciuic_cli.layerwise.partial_model import Adjust
from ciuic_cli.process.memory import limit_freed_memory
from ciuic_cli.process.progress import Progress

NONFINITE_REMEDY = "see with `ciuic eval` whether the original predicts this text, or ask for a lower --ratio"
CHECKED_TOKENS = 256
"""Tokens that the finished artifact runs, the first of a held-out sequence. Nearly every fault of loading shows in
them; 1,024 tokens took a twenty-fifth of a fast run of SmolLM2 (measured: docs/experiments/scale/account.md)."""


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
        self._stream = LayerStream(model_map, self._chunks, folder, device=device, dtype=torch.float32)
        self._original = StoredPredictions(folder / "original")
        self._progress = progress
        self._run(None)

    def measure_variants(
        self,
        variants: Sequence[tuple[Collection[Key], int]],
        override: Override,
        folder: Path,
        *,
        limit: int,
        progress: Callable[[int, int], None],
        mark: Mark,
    ) -> list[Mean]:
        """KL in nats per token of models that differ from the original in some weights.

        variants: of each model the weights for which it has the values of `override`, and how many tokens of every
        sequence run, the first ones. folder: for activations and values; limit: the most bytes of values. progress:
        called with the numbers of finished parts and of all. mark: how far a killed run came, whose activations
        are still in `folder`. Raises as `token_kls`.
        """
        count = len(self._chunks)
        chunks = [chunk[:, :tokens] for _, tokens in variants for chunk in self._chunks]
        stream = LayerStream(self._map, chunks, folder, device=self._device, dtype=torch.float32)
        runs = [
            Variant(frozenset(keys), range(number * count, (number + 1) * count))
            for number, (keys, _) in enumerate(variants)
        ]
        running = Variants(stream, runs, override, folder / "values", limit)
        kls: dict[int, list[Floats]] = {}

        def visit(span: TokenSpan, hidden: torch.Tensor, logits: torch.Tensor) -> None:
            original = span._replace(chunk=span.chunk % count)
            kls.setdefault(span.chunk, []).extend(self._span_kls(original, logits[0]))

        with torch.no_grad():
            running.run(visit, progress, mark)
        parts = [self._finite([np.concatenate(kls[chunk]) for chunk in run.chunks]) for run in runs]
        return [mean_of(part) for part in parts]

    def token_kls(self, override: Override, adjust: Adjust | None = None) -> list[Floats]:
        """KL of every token in nats, one array per sequence, with `override` for weights and `adjust` around layers.

        Raises TargetError if the predictions are NaN or infinite.
        """
        self._stream.adjust = adjust
        return self._finite(self._run(override))

    def _finite(self, kls: list[Floats]) -> list[Floats]:
        """The same; raises TargetError if the predictions are NaN or infinite."""
        if not all(np.isfinite(part).all() for part in kls):
            raise TargetError(
                "once its weights are rounded, the model's predictions are NaN or infinite",
                file=self._map.checkpoint.folder,
                remedy=NONFINITE_REMEDY,
            )
        return kls

    @torch.inference_mode()
    def token_kls_of_model(self, model: Any, config: Path, count: int) -> Floats:
        """KL of the first `count` tokens in nats, of a transformers model in memory; may be NaN. The first sequence has
        at least so many tokens.

        config: the model's config.json. Raises as `logits_in_parts`.
        """
        ids = self._chunks[0][0, :count]
        kls: list[Floats] = []
        # The allocator would keep the activations of every layer.
        hooks = [
            model.get_submodule(prefix.rstrip(".")).register_forward_hook(lambda *_: limit_freed_memory())
            for prefix in self._stream.prefixes
        ]
        begin = 0
        for logits in logits_in_parts(model, ids, count, self._stream.span_tokens, config):
            kls += self._span_kls(TokenSpan(0, 0, begin), logits)
            begin += len(logits)
            del logits  # frees them before the next ones are made
        for hook in hooks:
            hook.remove()
        return np.concatenate(kls)

    @torch.no_grad()
    def _run(self, override: Override | None) -> list[Floats]:
        """KL of every token, one array per sequence; without an override, stores the original's predictions instead."""
        self._stream.override = override
        self._stream.forward(self._progress)
        kls: dict[tuple[int, int], list[Floats]] = {}

        def visit(span: TokenSpan, hidden: torch.Tensor, logits: torch.Tensor) -> None:
            if override is None:
                self._original.put(span.name, logits[0])
            else:
                kls.setdefault((span.chunk, span.sequence), []).extend(self._span_kls(span, logits[0]))

        self._stream.run_tail(visit)
        return [np.concatenate(kls[sequence]) for sequence in sorted(kls)]

    def _span_kls(self, span: TokenSpan, logits: torch.Tensor) -> list[Floats]:
        """KL of the first tokens of a span, a block of them at a time; logits: (t, vocabulary)."""
        blocks = self._original.blocks(span.name, logits.device, len(logits))
        return [
            kl_divergence(log_p, block.float().log_softmax(-1)).cpu().numpy()
            for log_p, block in zip(blocks, logits.split(BLOCK_TOKENS), strict=True)
        ]
