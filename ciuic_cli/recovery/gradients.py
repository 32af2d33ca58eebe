"""Gradients of recovery's loss in the factors of rows and norms, layer by layer from files.

With KL_t = KL(original || compressed) at token t, the loss is

    mean over tokens of 2 (KL_t + KL_FLOOR)^½.

A few tokens have most of the KL, and in other text these are other tokens; so each token counts with the root of its KL
(measured: docs/experiments/recovery/factors-and-norms.md).

`prepare` runs the original over the text of all steps and keeps its last hidden states on disk. `accumulate` then takes
the sequences of one step:

1. Forward: the layers run one by one, with the rounded weights times the current factors.
2. Predictions: the original's p and the compressed model's q give the gradient of the loss with respect to the logits,
   (q - p) (KL_t + KL_FLOOR)^-½ per token (`root_kl_gradient`).
3. Backward: the layers run one by one in reverse. They give the gradient of the loss in the logarithm of each factor.
   For row i of a linear with outputs y_t = W x_t, bias excluded, and their gradients g_t, that is Σ_t g_ti y_ti
   (`RowGradients`). For a norm's weight w_j it is w_j (∂ loss / ∂ w_j). Divided by the factor, it is the gradient in
   the factor itself.

Several workers share the sequences of a step. Gradients are added up in the order of the sequences, so that factors
have the same bits for any number of workers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from ciuic_cli.checkpoint.model_map import ModelMap
from ciuic_cli.codecs.trellis import decode_dense
from ciuic_cli.evaluation.divergence import kl_divergence
from ciuic_cli.layerwise.activation_store import ActivationStore
from ciuic_cli.layerwise.layer_stream import LayerStream
from ciuic_cli.layerwise.linear_hooks import Hook, Key, LinearHook, Product, WatchedLinear, linears_of
from ciuic_cli.layerwise.logits import TokenSpan
from ciuic_cli.layerwise.operations.mixed_precision import compute_dtype
from ciuic_cli.layerwise.partial_model import Adjust
from ciuic_cli.process.progress import Progress
from ciuic_cli.process.workers import Workers
from ciuic_cli.recovery.row_factors import CodedLookup

STEP_SEQUENCES = 4
"""Sequences per step. No measurement is on record."""
KL_FLOOR = 1e-3
"""Nats per token that are added to a token's KL before the root; bounds the weight of tokens with nearly no KL. No
measurement is on record."""


class FactorGradients:
    """Gives the factors of a rounded model their gradients, step by step; one object per worker.

    Args:
        factors: the factors, whose `grad` is filled. Weights are multiplied by their current values.
        coded: the rounded matrices.
        adjust: other changes of the layers in the artifact (pruned experts).
        text: LongTensor (steps * STEP_SEQUENCES, length), of which each step takes the next sequences.
        first_step: the first step that will be taken.
        folder: of this worker alone, for activations.
    """

    def __init__(
        self,
        model_map: ModelMap,
        factors: Mapping[Key, nn.Parameter],
        coded: CodedLookup,
        adjust: Adjust,
        text: torch.Tensor,
        first_step: int,
        folder: Path,
        *,
        device: torch.device,
        workers: Workers,
    ) -> None:
        self.map, self.factors, self.coded, self.workers = model_map, factors, coded, workers
        self._tokens = STEP_SEQUENCES * text.shape[1]
        # This worker's sequences of all steps that are left. Each is one chunk of the streams.
        self._sequences = [
            number
            for number in range(first_step * STEP_SEQUENCES, len(text))
            if number % STEP_SEQUENCES % workers.size == workers.number
        ]
        chunks = [text[number : number + 1] for number in self._sequences]

        def stream(name: str) -> LayerStream:
            return LayerStream(model_map, chunks, folder / name, device=device, dtype=compute_dtype(device))

        self._original, self._tuned = stream("original"), stream("tuned")
        self._tuned.override, self._tuned.adjust = self._weights_with_factors, adjust
        self._predictions = ActivationStore(folder / "predictions")

    def prepare(self, progress: Progress) -> None:
        """Run the original over this worker's sequences of all steps. Does nothing without sequences."""
        if self._sequences:
            self._original.forward(lambda phase, done, total: progress("recovery, the original", done, total))
            self._tuned.begin()

    def accumulate(self, step: int) -> None:
        """Add the gradients of one step to the factors' `grad`; the sum is the same in all workers.

        All workers must call it, also those that have no sequence in the step.
        """
        numbers = range(step * STEP_SEQUENCES, (step + 1) * STEP_SEQUENCES)
        chunks = [chunk for chunk, number in enumerate(self._sequences) if number in numbers]
        layers = len(self._tuned.prefixes)
        if chunks:
            for layer in range(layers):
                self._tuned.forward_layer(layer, chunks)
        self._add(self._predict(chunks) if chunks else [])
        _delete(self._original, layers, chunks)
        _delete(self._tuned, layers, chunks)
        for layer in reversed(range(layers)):
            self._add(self._backward(layer, chunks) if chunks else [])
            _delete(self._tuned, layer, chunks)
        _delete(self._tuned, -1, chunks)  # the gradients at the first layer's inputs

    def _predict(self, chunks: Sequence[int]) -> list[dict[Key, torch.Tensor]]:
        """Write the gradients at the last layer's output; returns those of norms after it, one entry per chunk."""

        def store(span: TokenSpan, hidden: torch.Tensor, logits: torch.Tensor) -> None:
            self._predictions.put(span.name, logits[0].float().softmax(-1))

        def compare(span: TokenSpan, hidden: torch.Tensor, logits: torch.Tensor) -> None:
            p = self._predictions.get(span.name, logits.device)
            gradient = root_kl_gradient(logits.detach()[0].float(), p) / self._tokens
            logits.backward(gradient[None].to(logits.dtype))

        self._original.run_tail(store, chunks)
        gradients = []
        with self._tuned.tail(compare) as run_chunks:
            norms = self._tuned_norms(self._tuned.model, "")
            for chunk in chunks:
                run_chunks([chunk])
                gradients.append(_pop_norm_gradients(norms))
        self._predictions.clear()
        return gradients

    def _backward(self, number: int, chunks: Sequence[int]) -> list[dict[Key, torch.Tensor]]:
        """Write the gradients at a layer's input; returns those of its rows and norms, one entry per chunk."""
        prefix, gradients = self._tuned.prefixes[number], []
        with self._tuned.backward_layer(number) as (layer, run_chunks):
            watched = linears_of(layer, prefix, self.map.parameters)
            norms = self._tuned_norms(layer, prefix)
            for chunk in chunks:
                with RowGradients(watched) as rows:
                    run_chunks([chunk])
                of_rows = {key: value for key, value in rows.gradients.items() if key in self.factors}
                gradients.append({**of_rows, **_pop_norm_gradients(norms)})
        return gradients

    def _tuned_norms(self, module: nn.Module, prefix: str) -> dict[Key, torch.Tensor]:
        """The norm weights of a module that have factors; from now on autograd records their gradients.

        LayerNorm is not tuned: torch adds up the gradients of its weights thread by thread, and bits must not depend on
        the number of threads.
        """
        norms: dict[Key, torch.Tensor] = {}
        for name, owner in module.named_modules():
            if isinstance(owner, nn.LayerNorm):
                continue
            for full_name, parameter in owner.named_parameters(name, recurse=False):
                if (prefix + full_name, None) in self.factors and parameter.dim() == 1:
                    norms[prefix + full_name, None] = parameter.requires_grad_(True)
        return norms

    def _add(self, per_chunk: list[dict[Key, torch.Tensor]]) -> None:
        """Add the gradients of all workers to the factors' own, in the order of the step's sequences.

        per_chunk: gradients in the logarithms of factors, one entry for each of this worker's chunks of the step.
        """
        everyone = self.workers.gather(per_chunk)
        for sequence in range(STEP_SEQUENCES):
            turn, worker = divmod(sequence, self.workers.size)
            for key, log_gradient in everyone[worker][turn].items():
                factor = self.factors[key]
                gradient = log_gradient / factor.detach()
                factor.grad = gradient if factor.grad is None else factor.grad + gradient

    def _weights_with_factors(self, name: str, expert: int | None) -> torch.Tensor | None:
        """Weights times the current factors, which are not rounded to what can be stored."""
        packed, factor = self.coded(name, expert), self.factors.get((name, expert))
        if packed is None:
            return None if factor is None else self.map.read(name).float() * factor.detach()
        weight = decode_dense(packed)
        return weight if factor is None else weight * factor.detach()[:, None]


def _delete(stream: LayerStream, number: int, chunks: Sequence[int]) -> None:
    """Delete the files of a layer's inputs and of the gradients at its output, of these chunks."""
    stream.drop(number, chunks)
    stream.delete_dropped()


def _pop_norm_gradients(norms: Mapping[Key, torch.Tensor]) -> dict[Key, torch.Tensor]:
    """The gradients (n,) in the logarithms of norms' factors. Resets the weights' own, so that the next chunk starts
    from none."""
    gradients = {}
    for key, weight in norms.items():
        if weight.grad is not None:
            gradients[key] = (weight.detach() * weight.grad).float().cpu()
            weight.grad = None
    return gradients


class RowGradients(LinearHook):
    """Records Σ_t g_ti y_ti for each row i of the watched weights: y outputs without bias, g their gradients.

    This is the gradient in the logarithm of the row's factor. gradients: by matrix, (m,) float32 on the CPU.
    """

    def __init__(self, watched: Sequence[WatchedLinear]) -> None:
        super().__init__(watched)
        self.gradients: dict[Key, torch.Tensor] = {}

    def watch(self, product: Product) -> Hook:
        outputs, rows = product.outputs, product.rows
        if product.has_bias:
            # Computed again, not subtracted: in bfloat16 a large bias leaves nothing of the product.
            outputs = torch.nn.functional.linear(product.x, product.weight)

        def add(gradient: torch.Tensor) -> None:
            row_gradients = (gradient.float() * outputs.float()).flatten(0, -2).sum(0).cpu()
            total = self.gradients.setdefault(product.key, torch.zeros(product.shape[0]))
            total[rows] += row_gradients

        return add


def root_kl_gradient(logits: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """Gradient in the logits of 2 (KL_t + KL_FLOOR)^½, with KL_t = KL(p || softmax(logits)), for every token.

    All are (tokens, vocabulary) float32; `p` holds probabilities.
    """
    log_q = logits.log_softmax(-1)
    log_p = p.clamp_min(1e-30).log()  # finite where p underflowed to 0
    kl = kl_divergence(log_p, log_q, p=p, sum_dtype=torch.float32)[:, None]
    return (log_q.exp() - p) * (kl.clamp_min(0.0) + KL_FLOOR).rsqrt()
