"""Cross entropy in chunks of rows: the logits of a whole batch never exist.

Of a batch of 2 x 512 tokens, the float32 logits of a vocabulary of 49,152 take 200 MB, and transformers' loss holds
several copies of them. Here the loss and its gradient for the hidden states are computed together, chunk by chunk;
between the passes only that gradient is kept, in the size of the hidden states.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import cross_entropy

from ciuic_cli.train.examples import IGNORED

LOGITS_PER_CHUNK = 8 << 20
"""Most logits of a chunk. Each takes up to 16 bytes: in the model's dtype, in float32, their log-probabilities, and
the gradients. Chosen: a head of 49,152 rows is then decoded once per 170 rows of hidden states and pass."""

Logits = Callable[[torch.Tensor], torch.Tensor]
"""Hidden states (n, H) to logits (n, V)."""


def chunked_loss(
    model: Any,
    inputs: dict[str, Any],
    labels: torch.Tensor,
    count: torch.Tensor | int | None = None,
    learned: tuple[torch.Tensor, ...] | None = None,
) -> torch.Tensor:
    """The mean cross entropy of the next token, in float32, as transformers' causal models compute it.

    Args:
        model: a causal language model of transformers, or a PeftModel of one.
        inputs: of its forward, without labels.
        labels: int64 (rows, tokens), of the same positions as the tokens; IGNORED where nothing is learned.
        count: tokens by which the sum is divided; default: the labels that are learned.
        learned: int64 row numbers and positions of the tokens that predict a label; default: those with one.

    Returns:
        A scalar with a gradient for the head's trained parameters and whatever the hidden states depend on.
    """
    causal = model.get_base_model() if hasattr(model, "get_base_model") else model
    if count is None:
        count = int((labels[:, 1:] != IGNORED).sum())
    with _replaced_hidden_states(causal) as hidden_states:
        vocabulary = causal(**inputs, use_cache=False).logits.shape[-1]
        outputs = hidden_states.outputs
        if learned is None:
            learned = (labels[:, 1:] != IGNORED).nonzero(as_tuple=True)
        hidden = outputs.last_hidden_state[:, :-1][learned]

        def logits_of(part: torch.Tensor) -> torch.Tensor:
            hidden_states.replacement = part[None]
            logits: torch.Tensor = causal(**inputs, use_cache=False).logits[0]
            return logits

        chunk = max(1, LOGITS_PER_CHUNK // vocabulary)
        trained = [weight for weight in causal.get_output_embeddings().parameters() if weight.requires_grad]
        loss: torch.Tensor = _ChunkedCrossEntropy.apply(
            hidden, labels[:, 1:][learned], logits_of, count, chunk, *trained
        )
        return loss


class _HiddenStates:
    """What the decoder returned, and what the causal model sees in its place."""

    def __init__(self) -> None:
        self.outputs: Any = None
        self.replacement: torch.Tensor | None = None

    def seen(self, replacement: torch.Tensor) -> Any:
        outputs = copy.copy(self.outputs)
        outputs.last_hidden_state = replacement
        return outputs


@contextmanager
def _replaced_hidden_states(causal: Any) -> Iterator[_HiddenStates]:
    """The decoder of `causal` runs once, and the head sees the first token only; later it sees `replacement`.

    So the model's own forward computes the logits of any hidden states, with its scales and caps.
    """
    decoder, state = causal.base_model, _HiddenStates()
    original = decoder.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        if state.replacement is not None:
            return state.seen(state.replacement)
        state.outputs = original(*args, **kwargs)
        return state.seen(state.outputs.last_hidden_state[:, :1].detach())

    decoder.forward = forward
    try:
        yield state
    finally:
        del decoder.forward


def _kept_as_they_are() -> Any:
    """Tensors that are saved in this context are not compressed: the gradient of a chunk needs them at once."""
    return saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)


class _ChunkedCrossEntropy(torch.autograd.Function):
    """The sum of cross entropies over `count`, `chunk` rows at a time. Hidden (n, H) floating, targets int64 (n,)."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        targets: torch.Tensor,
        logits_of: Logits,
        count: torch.Tensor | int,
        chunk: int,
        *weights: torch.Tensor,
    ) -> torch.Tensor:
        of_hidden, of_weights = ctx.needs_input_grad[0], any(ctx.needs_input_grad[5:])
        gradient = torch.empty_like(hidden) if of_hidden else None
        sums = [torch.zeros_like(weight) for weight in weights] if of_weights else []
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        for begin in range(0, len(hidden), chunk):
            end = begin + chunk
            with torch.set_grad_enabled(of_hidden or of_weights), _kept_as_they_are():
                part = hidden[begin:end].detach().requires_grad_(of_hidden)
                logits = logits_of(part)
                loss = cross_entropy(logits.float(), targets[begin:end], reduction="sum") / count
                del logits
                if gradient is not None or sums:
                    found = torch.autograd.grad(loss, [*([part] if of_hidden else []), *weights[: len(sums)]])
                    if gradient is not None:
                        gradient[begin:end] = found[0]
                    for sum_, of_chunk in zip(sums, found[len(found) - len(sums) :], strict=True):
                        sum_ += of_chunk
            total += loss.detach()
        ctx.save_for_backward(gradient)
        ctx.sums = (
            sums  # gradients of weights, not activations: they are not to be rounded with saved tensors
        )
        return total

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (gradient,), sums = ctx.saved_tensors, ctx.sums
        ctx.sums = None  # the loss, which lives through the whole backward pass, would keep them
        of_hidden = None if gradient is None else gradient * grad.to(gradient.dtype)
        of_weights = [sum_.mul_(grad.to(sum_.dtype)) for sum_ in sums]
        missing = len(ctx.needs_input_grad) - 5 - len(of_weights)
        return of_hidden, None, None, None, None, *of_weights, *[None] * missing
