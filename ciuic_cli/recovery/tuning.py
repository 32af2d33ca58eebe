"""Recovery: after rounding, factors of rows and norms are tuned by gradient descent on the KL divergence.

Each matrix was rounded by itself. Tuning numbers that are stored anyway corrects part of the combined error. Row i of
a linear has a factor f_i, and so has each weight of a norm (`row_factors.py`). All factors start at 1 and follow the
gradient of

    loss = mean over tokens of 2 (KL_t + KL_FLOOR)^½,     KL_t = KL(original || compressed) at token t,

on calibration text by Adam (Kingma and Ba, 2015). A few tokens have most of the KL, and in other text these are other
tokens; so each token counts with the root of its KL (measured: docs/experiments/recovery/factors-and-norms.md).

Before the first step the original runs over the text of all steps, layer by layer, and its last hidden states stay on
disk. A step takes `STEP_SEQUENCES` sequences (`_accumulate_gradients`):

1. Forward: the layers run one by one, with the rounded weights times the current factors.
2. Predictions: the original's p and the compressed model's q give the gradient of the loss with respect to the logits,
   (q - p) (KL_t + KL_FLOOR)^-½ per token (`root_kl_gradient`).
3. Backward: the layers run one by one in reverse. With outputs y_t = W x_t, bias excluded, and their gradients g_t, the
   gradient in f_i is Σ_t g_ti y_ti / f_i (`RowGradients`); for a norm's weight w_j it is w_j (∂ loss / ∂ w_j) / f_j.
4. Adam changes all factors; `schedule.py` has the learning rate.

Several workers share the sequences of a step. Gradients are added up in the order of the sequences, so that factors
have the same bits for any number of workers.

At `CHECKS` check points the KL of the artifact, with factors as it would store them, is measured on held-out text. The
factors with the least KL are the result; after two rises in a row no further step is made. Check points also save the
state from which a killed run resumes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load, save
from torch import nn

from ciuic_cli.checkpoint.model_map import ModelMap
from ciuic_cli.codecs.trellis import decode_dense
from ciuic_cli.evaluation.divergence import kl_divergence
from ciuic_cli.layerwise.activation_store import ActivationStore
from ciuic_cli.layerwise.layer_stream import Adjust, LayerStream, TokenSpan, compute_dtype
from ciuic_cli.layerwise.linear_hooks import Hook, Key, LinearHook, Product, WatchedLinear, linears_of
from ciuic_cli.process.progress import Progress
from ciuic_cli.process.workers import Workers
from ciuic_cli.recovery.row_factors import CodedLookup, Factors, tunable_shapes
from ciuic_cli.recovery.schedule import PEAK_LEARNING_RATE, learning_rate

STEP_SEQUENCES = 4
"""Sequences per step. No measurement is on record."""
CHECKS = 4
"""Check points of a run, evenly spread. No measurement is on record."""
ADAM_BETAS = (0.9, 0.95)
"""Adam's decay rates. No measurement is on record."""
KL_FLOOR = 1e-3
"""Nats per token that are added to a token's KL before the root; bounds the weight of tokens with nearly no KL. No
measurement is on record."""


@dataclass(frozen=True)
class RecoveryResult:
    """The factors with the least held-out KL (empty if no check point was below the start), the number of steps that
    were made, and the held-out KL in nats per token without and with the factors."""

    factors: dict[Key, torch.Tensor]
    steps: int
    kl_before: float
    kl_after: float


class Recovery:
    """Tunes the factors of a rounded model step by step; one object per worker.

    Args:
        coded: the rounded matrices.
        adjust: other changes of the layers in the artifact (pruned experts).
        text: LongTensor (steps * STEP_SEQUENCES, length), of which each step takes the next sequences.
        folder: of this worker alone, for activations.
        state: the last state that `run` saved, in an earlier process.
    """

    def __init__(
        self,
        model_map: ModelMap,
        coded: CodedLookup,
        adjust: Adjust,
        text: torch.Tensor,
        folder: Path,
        *,
        device: torch.device,
        workers: Workers,
        state: bytes | None = None,
    ) -> None:
        self.map, self.coded, self.workers = model_map, coded, workers
        shapes = tunable_shapes(model_map, coded)
        self._factors = {key: nn.Parameter(torch.ones(shape)) for key, shape in shapes.items()}
        self._optimizer = torch.optim.Adam(
            [{"params": [*self._factors.values()]}], PEAK_LEARNING_RATE, ADAM_BETAS
        )
        self._best: dict[Key, torch.Tensor] = {}
        self._kls: list[float] = []  # held-out KL at the start and at each check point so far
        self._steps, self._step = len(text) // STEP_SEQUENCES if shapes else 0, 0
        if state is not None:
            self._restore(state)
        self._tokens = STEP_SEQUENCES * text.shape[1]
        # This worker's sequences of all steps that are left; each is one chunk of the streams.
        self._sequences = [
            number
            for number in range(self._step * STEP_SEQUENCES, len(text))
            if number % STEP_SEQUENCES % workers.size == workers.rank
        ]
        chunks = [text[number : number + 1] for number in self._sequences]

        def stream(name: str) -> LayerStream:
            return LayerStream(model_map, chunks, folder / name, device=device, dtype=compute_dtype(device))

        self._original, self._tuned = stream("original"), stream("tuned")
        self._tuned.override, self._tuned.adjust = self._weights_with_factors, adjust
        self._predictions = ActivationStore(folder / "predictions")

    def run(
        self,
        measure: Callable[[Factors], float],
        save_state: Callable[[Callable[[], bytes]], None],
        progress: Progress,
    ) -> RecoveryResult:
        """Make all steps that are left, until held-out KL has risen twice in a row or a gradient is not finite.

        measure: KL of the artifact with these factors on held-out text, in nats per token. save_state: called at each
        check point with a function that returns the state as bytes.
        """
        if not self._kls:
            self._kls.append(measure({}))
        # Skipped if an earlier process made all steps, or this worker has no sequences.
        if self._has_steps_left() and self._sequences:
            self._original.forward(lambda phase, done, total: progress("recovery, the original", done, total))
            self._tuned.begin()
        while self._has_steps_left() and self._take_step():
            progress("recovery", self._step, self._steps)
            if self._step % -(-self._steps // CHECKS) == 0 or self._step == self._steps:
                values = {key: factor.detach() for key, factor in self._factors.items()}
                changed = {key: value.clone() for key, value in values.items() if bool((value != 1).any())}
                kl = measure(changed)
                if kl < min(self._kls):
                    self._best = changed
                self._kls.append(kl)
                save_state(self._state)
        return RecoveryResult(self._best, self._step, self._kls[0], min(self._kls))

    def _has_steps_left(self) -> bool:
        rising = len(self._kls) > 2 and self._kls[-3] < self._kls[-2] < self._kls[-1]
        return self._step < self._steps and not rising

    # --- one step

    def _take_step(self) -> bool:
        """Change all factors once; returns False, without a change, if a gradient is NaN or infinite."""
        begin = self._step * STEP_SEQUENCES
        chunks = [
            chunk for chunk, number in enumerate(self._sequences) if begin <= number < begin + STEP_SEQUENCES
        ]
        self._optimizer.zero_grad()
        self._accumulate_gradients(chunks)
        gradients = [factor.grad for factor in self._factors.values() if factor.grad is not None]
        if not all(bool(gradient.isfinite().all()) for gradient in gradients):
            return False
        self._optimizer.param_groups[0]["lr"] = learning_rate(self._step, self._steps, self._kls[0])
        self._optimizer.step()
        self._step += 1
        return True

    def _accumulate_gradients(self, chunks: Sequence[int]) -> None:
        """Give all factors their gradients of this step: forward, predictions, backward.

        chunks: this worker's of the step. A worker without any still takes part in `_add_gradients`.
        """
        last = len(self._tuned.prefixes)
        for number in range(last if chunks else 0):
            self._tuned.forward_layer(number, chunks)
        self._add_gradients(self._predict(chunks) if chunks else [])
        self._original.release(last, chunks)
        self._original.delete_released()
        for number in reversed(range(last)):
            self._add_gradients(self._backward(number, chunks) if chunks else [])
            self._tuned.release(number + 1, chunks)
            self._tuned.delete_released()
        for number in (0, -1):  # the inputs of the first layer, and the gradients there
            self._tuned.release(number, chunks)
        self._tuned.delete_released()

    def _predict(self, chunks: Sequence[int]) -> list[dict[Key, torch.Tensor]]:
        """Write the gradients at the last layer's output; returns those of norms after it, one entry per chunk."""

        def store(span: TokenSpan, hidden: torch.Tensor, logits: torch.Tensor) -> None:
            self._predictions.put(span.name, logits[0].float().softmax(-1))

        def compare(span: TokenSpan, hidden: torch.Tensor, logits: torch.Tensor) -> None:
            p = self._predictions.get(span.name, logits.device)
            gradient = root_kl_gradient(logits.detach()[0].float(), p) / self._tokens
            logits.backward(gradient[None].to(logits.dtype))

        with torch.no_grad(), self._original.tail(store) as run_chunks:
            run_chunks(chunks)
        gradients = []
        with self._tuned.tail(compare) as run_chunks:
            norms = self._enable_norm_gradients(self._tuned.model, "")
            for chunk in chunks:
                run_chunks([chunk])
                gradients.append(_take_norm_gradients(norms))
            self._predictions.clear()
        return gradients

    def _backward(self, number: int, chunks: Sequence[int]) -> list[dict[Key, torch.Tensor]]:
        """Write the gradients at a layer's input; returns those of its rows and norms, one entry per chunk."""
        prefix, gradients = self._tuned.prefixes[number], []
        with self._tuned.backward_layer(number) as (layer, run_chunks):
            watched = linears_of(layer, prefix, self.map.parameters)
            norms = self._enable_norm_gradients(layer, prefix)
            for chunk in chunks:
                with RowGradients(watched) as rows:
                    run_chunks([chunk])
                of_rows = {key: value for key, value in rows.gradients.items() if key in self._factors}
                gradients.append({**of_rows, **_take_norm_gradients(norms)})
        return gradients

    def _enable_norm_gradients(self, module: nn.Module, prefix: str) -> dict[Key, torch.Tensor]:
        """The norm weights of a module that are tuned; from now on they require gradients.

        LayerNorm is left out: torch adds up the gradients of its weights thread by thread, and bits must not depend on
        the number of threads.
        """
        norms: dict[Key, torch.Tensor] = {}
        for name, owner in module.named_modules():
            if isinstance(owner, nn.LayerNorm):
                continue
            for full_name, parameter in owner.named_parameters(name, recurse=False):
                if (prefix + full_name, None) in self._factors and parameter.dim() == 1:
                    norms[prefix + full_name, None] = parameter.requires_grad_(True)
        return norms

    def _add_gradients(self, per_chunk: list[dict[Key, torch.Tensor]]) -> None:
        """Add the gradients of all workers to the factors' own, in the order of the step's sequences.

        per_chunk: value times gradient of this worker's tuned weights, one entry per chunk of the step; divided by the
        factor, that is the gradient in the factor.
        """
        everyone = self.workers.gather(per_chunk)
        for number in range(STEP_SEQUENCES):
            theirs = everyone[number % self.workers.size]
            for key, gradient in theirs[number // self.workers.size].items():
                factor = self._factors[key]
                gradient = gradient / factor.detach()
                factor.grad = gradient if factor.grad is None else factor.grad + gradient

    def _weights_with_factors(self, name: str, expert: int | None) -> torch.Tensor | None:
        """Weights times the current factors, which are not rounded to what can be stored."""
        packed, factor = self.coded(name, expert), self._factors.get((name, expert))
        if packed is None:
            return None if factor is None else self.map.read(name).float() * factor.detach()
        weight = decode_dense(packed)
        return weight if factor is None else weight * factor.detach()[:, None]

    # --- the state between processes

    def _state(self) -> bytes:
        """A safetensors file with the step, the KLs, and "<kind>/<number>" for each factor: its value, Adam's tensors,
        and its best value."""
        tensors = {"step": torch.tensor(self._step), "kls": torch.tensor(self._kls, dtype=torch.float64)}
        for number, (key, factor) in enumerate(self._factors.items()):
            of_factor = {"factor": factor.detach(), **self._optimizer.state[factor]}
            if key in self._best:
                of_factor["best"] = self._best[key]
            tensors |= {f"{kind}/{number}": tensor for kind, tensor in of_factor.items()}
        return save(tensors)

    def _restore(self, state: bytes) -> None:
        tensors = load(state)
        self._step, self._kls = int(tensors.pop("step")), tensors.pop("kls").tolist()
        factors = [*self._factors.items()]
        for name, tensor in tensors.items():
            kind, _, number = name.partition("/")
            key, factor = factors[int(number)]
            if kind == "factor":
                factor.data.copy_(tensor)
            elif kind == "best":
                self._best[key] = tensor
            else:
                self._optimizer.state[factor][kind] = tensor


class RowGradients(LinearHook):
    """Records Σ_t g_ti y_ti for each row i of the watched weights: y outputs without bias, g their gradients.

    This is the gradient in a factor of 1 on the row. gradients: by matrix, (m,) float32 on the CPU.
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


def _take_norm_gradients(norms: Mapping[Key, torch.Tensor]) -> dict[Key, torch.Tensor]:
    """Value times gradient (n,) of the norm weights that have a gradient; the gradients are removed."""
    gradients = {}
    for key, norm in norms.items():
        if norm.grad is not None:
            gradients[key] = (norm.detach() * norm.grad).float().cpu()
            norm.grad = None
    return gradients
