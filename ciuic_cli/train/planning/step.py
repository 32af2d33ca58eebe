"""Runs a training step on fake tensors and returns its peak of memory: the model's own code decides what is kept.

Nothing is allocated: fake tensors have shapes and no memory. Weights are those of a model on the meta device, in
compressed modules or dense ones.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import masking_utils

from ciuic_cli.errors import InputError
from ciuic_cli.runtime import blobs
from ciuic_cli.train.loss import chunked_loss
from ciuic_cli.train.planning.allocations import LiveBytes
from ciuic_cli.train.planning.product_memory import MatrixKind, gradient_bytes, product_bytes


@dataclass(frozen=True)
class StepBytes:
    """Most bytes of a step's activations, gradients and temporaries together, and of the gradients alone."""

    peak: int
    gradients: int


def step_bytes(
    model: nn.Module,
    kinds: Mapping[str, Sequence[MatrixKind]],
    *,
    rows: int,
    tokens: int,
    experts: int,
    masked: bool,
    accumulates: bool,
) -> StepBytes:
    """Peak memory of one forward and backward pass, beyond weights and optimizer states.

    Args:
        model: a causal language model of transformers, or a PeftModel of one, on the meta device and in training mode,
            with activation checkpointing as in the run. Its parameters are replaced by fake ones.
        kinds: parameter name -> the matrices in its blob.
        rows, tokens: shape of a batch. All tokens are taken to be learned.
        experts: of a layer with routed experts, among which tokens are taken to be shared evenly; 1 without any.
        masked: whether rows hold several examples or padding, so that attention needs a mask.
        accumulates: whether gradients of an earlier pass exist.

    Raises:
        InputError: the model's code decides by values of tensors, which fake tensors do not have.
    """
    with FakeTensorMode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        by_blob = _make_fake(model, kinds)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        gradients = sum(parameter.numel() * parameter.element_size() for parameter in trained)
        counter = LiveBytes(_call_bytes(by_blob), experts)
        counter.exclude([*model.parameters(), *model.buffers()])
        if accumulates:
            for parameter in trained:
                parameter.grad = torch.empty_like(parameter)
            counter.exclude([parameter.grad for parameter in trained if parameter.grad is not None])
        ids = torch.zeros((rows, tokens), dtype=torch.int64)
        inputs = {"input_ids": ids, "position_ids": torch.zeros((rows, tokens), dtype=torch.int64)}
        count = rows * (tokens - 1)
        learned = (torch.zeros(count, dtype=torch.int64), torch.zeros(count, dtype=torch.int64))
        try:
            with counter:
                with _attention_mask(masked):
                    loss = chunked_loss(model, inputs, ids, count, learned)
                loss.backward()
        except (RuntimeError, ValueError, NotImplementedError, TypeError) as error:
            reason = " ".join(str(error).split())
            raise InputError(
                f"the memory of a step cannot be planned for {type(model).__name__}: {reason:.300}",
                remedy="leave out --max-memory",
            ) from error
        for parameter in trained:
            parameter.grad = None
        return StepBytes(counter.peak + (gradients if accumulates else 0), gradients)


@contextmanager
def _attention_mask(masked: bool) -> Iterator[None]:
    """Let transformers make no attention mask unless `masked`.

    It decides by the values of position ids whether rows hold several examples, and takes fake ones for such.
    """
    original = masking_utils.find_packed_sequence_indices
    if not masked:
        vars(masking_utils)["find_packed_sequence_indices"] = lambda position_ids: None
    try:
        yield
    finally:
        vars(masking_utils)["find_packed_sequence_indices"] = original


def _make_fake(
    model: nn.Module, kinds: Mapping[str, Sequence[MatrixKind]]
) -> dict[int, Sequence[MatrixKind]]:
    """Replace all parameters and buffers by fake CPU tensors, in place; returns the id of each blob -> its kinds."""
    made: dict[int, torch.Tensor] = {}
    keep: list[torch.Tensor] = []
    by_blob: dict[int, Sequence[MatrixKind]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for tensors in (module._parameters, module._buffers):
            for short, tensor in tensors.items():
                if tensor is None:
                    continue
                if id(tensor) not in made:
                    keep.append(tensor)
                    fake = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
                    if isinstance(tensor, nn.Parameter):
                        fake = nn.Parameter(fake, requires_grad=tensor.requires_grad)
                    made[id(tensor)] = fake
                tensors[short] = made[id(tensor)]
                name = f"{path}.{short}".replace("base_model.model.", "").replace(".base_layer", "")
                if name in kinds:
                    by_blob[id(made[id(tensor)])] = kinds[name]
    return by_blob


def _call_bytes(by_blob: Mapping[int, Sequence[MatrixKind]]) -> Callable[[Any, Sequence[Any]], int]:
    """The most bytes of a call of an operator with codes; 0 for other operators."""
    small_batch = blobs.small_batch()

    def held(function: Any, arguments: Sequence[Any]) -> int:
        if function.namespace != "ciuic" or len(arguments) < 2:
            return 0
        x, kinds = arguments[0], by_blob.get(id(arguments[1]))
        if kinds is None:
            return 0
        limit, name = small_batch.of(x.dtype), function.name().partition("::")[2].partition(".")[0]
        batch = x.numel() // x.shape[-1]
        if name == "linear":
            return product_bytes(kinds[0], batch, x.dtype, limit)
        if name == "linear_backward":
            return gradient_bytes(kinds[0], batch, x.dtype)
        if name not in ("routed_linear", "routed_linear_backward"):
            return 0
        ids = arguments[2]
        share = max(1, ids.numel() // len(kinds))
        size = x.dtype.itemsize
        if name == "routed_linear":
            whole = ids.numel() * kinds[0].rows * size
            chosen = share * kinds[0].cols * size
            return whole + chosen + max(product_bytes(kind, share, x.dtype, limit) for kind in kinds)
        whole = ids.shape[0] * kinds[0].cols * 4
        chosen = share * kinds[0].rows * size
        return whole + chosen + max(gradient_bytes(kind, share, x.dtype) for kind in kinds)

    return held
