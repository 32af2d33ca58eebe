"""How long a step takes, by arithmetic: multiplications, the wire, the way to main memory, and the block code.

The parts are added as if nothing overlapped. Rates are those of a data sheet, so only ratios between strategies mean
something, and those only roughly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from transformers.modeling_layers import GradientCheckpointingLayer

from ciuic_cli.checkpoint.config.numbers import experts_per_token
from ciuic_cli.train.memory.activations import CODE
from ciuic_cli.train.options import TrainOptions
from ciuic_cli.train.planning.memory_plan import MemoryPlan
from ciuic_cli.train.planning.step import Sharding

FLOAT32_RATE, BFLOAT16_RATE = 19.5e12, 312e12
"""Operations per second in float32 (without TF32) and in bfloat16. Source: data sheet of NVIDIA's A100."""
USED = 0.4
"""Share of those rates that training reaches. Estimated."""
WIRE_RATE, LINK_RATE = 300e9, 25e9
"""Bytes per second and direction between GPUs (NVLink 3), and between a GPU and main memory (PCIe 4 with 16 lanes).
Source: the same data sheet, and 0.8 of the link's 31.5 GB/s."""
CODE_SECONDS = 1e-10
"""Seconds to encode and decode a number with the block code. Estimated: 20 float32 passes over a memory of 1.5 TB/s."""
DECODING = 1.55
"""Time of a step on 4:1 over that on bfloat16. Measured on a CPU: docs/experiments/training/lora-memory.md."""


class Named(Protocol):
    """What `step_time` asks of a strategy."""

    @property
    def compressed(self) -> bool: ...

    @property
    def sharding(self) -> Sharding | None: ...


@dataclass(frozen=True)
class Counts:
    """Numbers of a model.

    Attributes:
        parameters: all.
        active: weights with which a token is multiplied. layers_active: those in layers.
        attention: multiplications and additions per token with cached keys and values, forward.
    """

    parameters: int
    active: float
    layers_active: float
    attention: float

    @classmethod
    def of(cls, model: Any, tokens: int) -> Counts:
        """Of a dense model on the meta device, for rows of `tokens`; tokens share the experts evenly."""
        parameters = sum(parameter.numel() for parameter in model.parameters())
        layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
        config = model.config.get_text_config()
        chosen = experts_per_token(config)
        active = 0.0
        for layer in layers:
            for module in layer.modules():
                experts: Any = getattr(module, "num_experts", None)
                share = chosen / experts if isinstance(experts, int) and experts else 1.0
                own = (p for p in module._parameters.values() if p is not None and p.dim() > 1)
                active += min(1.0, share) * float(sum(p.numel() for p in own))
        head = model.get_output_embeddings()
        heads = getattr(config, "num_attention_heads", 1)
        size = getattr(config, "head_dim", None) or config.hidden_size // heads
        keys = (getattr(config, "qk_nope_head_dim", 0) + getattr(config, "qk_rope_head_dim", 0)) or size
        values = getattr(config, "v_head_dim", None) or size
        attention = (
            len(layers) * heads * (keys + values) * tokens
        )  # the half that causality leaves, 2 per product
        return cls(parameters, active + head.weight.numel(), active, attention)


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step: products; bytes between processes; bytes to main memory and back; the block code."""

    computation: float
    wire: float
    link: float
    code: float

    @property
    def total(self) -> float:
        return self.computation + self.wire + self.link + self.code

    @property
    def bound(self) -> str:
        """The longest part."""
        names = {
            "computation": "computation", "wire": "the wire", "link": "the way to main memory",
            "code": "the block code",
        }  # fmt: skip
        return names[max(names, key=lambda name: getattr(self, name))]


def step_time(
    counts: Counts, options: TrainOptions, memory: MemoryPlan, tokens: int, strategy: Named
) -> StepTime:
    """The time of a step of one process.

    Args:
        tokens: of its rows in a step, all passes together.
    """
    passes = options.gradient_accumulation_steps
    forward = 2 * counts.active + counts.attention
    again = 0.0
    if options.activation_checkpointing:
        again = (2 * counts.layers_active + counts.attention) / options.every_n_layers
    backward = forward if options.method == "lora" else 2 * forward
    in_bfloat16 = options.method == "lora" or (
        strategy.sharding is not None and strategy.sharding.comm == "bf16"
    )
    rate = USED * (BFLOAT16_RATE if in_bfloat16 else FLOAT32_RATE)
    computation = tokens * (forward + backward + again) / rate * (DECODING if strategy.compressed else 1.0)
    coded = 0.0
    if options.activations is not None:
        coded += passes * (memory.activations + memory.moved) / (CODE.nbytes(CODE.block) / CODE.block)
    link = 2.0 * passes * memory.moved
    if options.weights is not None:
        coded += 3 * counts.parameters  # decoded forward and backward, encoded after the update
        link += 4 * counts.parameters  # rounding errors
    if strategy.sharding is not None and strategy.sharding.comm == "int8":
        coded += 2 * counts.parameters
    return StepTime(computation, memory.sent / WIRE_RATE, link / LINK_RATE, coded * CODE_SECONDS)
