"""Measured KL divergence of a model with changed weights, streamed layer by layer like the statistics."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch

from ciuic_cli.checkpoint.model_map import ModelMap
from ciuic_cli.errors import TargetError
from ciuic_cli.evaluation.estimates import Floats, Mean, mean_of
from ciuic_cli.layerwise.activation_store import ActivationStore
from ciuic_cli.layerwise.layer_stream import Adjust, LayerStream, Override, Place, Progress

CHUNK = 2
"""Sequences that run through a layer at a time."""
LOOK = "see with `ciuic eval` whether the original predicts this text, or ask for a lower --ratio"


class KLMeter:
    """KL(original || changed) per token over held-out sequences; the original's predictions are kept on disk.

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
        self._source = model_map.checkpoint.folder
        # Float32 throughout: in bfloat16 the rounding differences alone would look like a loss.
        self._stream = LayerStream(
            model_map, batches.split(CHUNK), folder, device=device, dtype=torch.float32
        )
        self._original = ActivationStore(folder / "original")
        self._progress = progress
        self._run(None)

    def measure(self, override: Override, adjust: Adjust | None = None) -> Mean:
        """Nats per token lost by the changed weights, and by what `adjust` does to the layers.

        Raises TargetError if the predictions become NaN or infinite.
        """
        self._stream.adjust = adjust
        found = mean_of(self._run(override))
        if not math.isfinite(found.value):
            raise TargetError(
                "once its weights are rounded, the model's predictions are NaN or infinite",
                file=self._source,
                remedy=LOOK,
            )
        return found

    @torch.no_grad()
    def _run(self, override: Override | None) -> list[Floats]:
        """KL of every token, one array per sequence; nothing while the original itself runs."""
        self._stream.override = override
        self._stream.forward(self._progress)
        found: dict[tuple[int, int], list[Floats]] = {}

        def visit(place: Place, hidden: torch.Tensor, logits: torch.Tensor) -> None:
            log_q = logits[0].float().log_softmax(-1)
            if override is None:
                self._original.put(place.name, log_q)
            else:
                log_p = self._original.get(place.name, log_q.device)
                lost = (log_p.exp() * (log_p - log_q)).sum(-1, dtype=torch.float64).cpu().numpy()
                found.setdefault((place.chunk, place.sequence), []).append(lost)

        with self._stream.tail(visit) as carry:
            carry(range(len(self._stream.chunks)))
        return [np.concatenate(parts) for parts in found.values()]
