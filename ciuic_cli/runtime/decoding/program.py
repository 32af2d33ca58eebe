"""Programs of the native library: norms, products, rotary embedding and gates in one call.

Between the products of a small model, Python and the start of threads take as long as the products themselves. A
program does these steps in one native call with one team of threads (`native/programs/run.cpp`). Buffers hold float32,
so values between two steps are not rounded to the model's dtype.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import torch

from ciuic_cli.codecs import native
from ciuic_cli.codecs.trellis import Factor, is_exact

MAX_ARGUMENTS = 8
"""Arrays of the caller that a program may use; more than any program here needs."""


class Kind(IntEnum):
    """CiuicStepKind of `ciuic_native.h`."""

    LOAD, STORE, NORM, MULTIPLY, ROTATE, GATE, ADD, CACHE, ATTEND = range(9)


class Activation(IntEnum):
    """CiuicActivation of `ciuic_native.h`."""

    SILU, GELU_TANH = range(2)


@dataclass
class ProgramBuilder:
    """Collects the steps of a program. Buffers are numbered from 0; a method's result is the buffer that it writes.

    Neighbouring products run together, so they must not depend on each other; all other steps run in order.
    """

    _factors: list[Factor] = field(default_factory=list)
    _steps: list[native.CiuicStep] = field(default_factory=list)
    _sizes: list[int] = field(default_factory=list)
    _alive: list[torch.Tensor] = field(default_factory=list)
    _free: dict[int, list[int]] = field(default_factory=dict)

    def load(self, argument: int, size: int) -> int:
        """A buffer with the caller's array `argument`, [rows, size]."""
        out = self._buffer(size)
        self._steps.append(native.CiuicStep(kind=Kind.LOAD, out=out, argument=argument, size=size))
        return out

    def store(self, source: int, argument: int) -> None:
        """Writes a buffer to the caller's array `argument`."""
        size = self._sizes[source]
        self._steps.append(native.CiuicStep(kind=Kind.STORE, source=source, argument=argument, size=size))

    def norm(self, source: int, weight: torch.Tensor, epsilon: float) -> int:
        """RMSNorm of each run of `len(weight)` values: x / sqrt(mean(x^2) + epsilon) * weight, float32 [n]."""
        out = self._buffer(self._sizes[source])
        self._alive.append(weight)
        step = native.CiuicStep(
            kind=Kind.NORM,
            source=source,
            out=out,
            size=weight.numel(),
            number=epsilon,
            vector=weight.data_ptr(),
        )
        self._steps.append(step)
        return out

    def multiply(self, source: int, factor: Factor) -> int:
        """The product of a matrix with a buffer."""
        out = self._buffer(factor.rows)
        step = native.CiuicStep(kind=Kind.MULTIPLY, source=source, out=out, matrix=len(self._factors))
        self._factors.append(factor)
        self._steps.append(step)
        return out

    def rotate(self, source: int, size: int, argument: int) -> None:
        """Rotary embedding in place, of each run of `size` values in two halves.

        Arguments `argument` and `argument` + 1 are the cosines and the sines, each [rows, size].
        """
        self._steps.append(native.CiuicStep(kind=Kind.ROTATE, source=source, size=size, argument=argument))

    def gate(self, source: int, other: int, activation: Activation) -> int:
        """activation(source) * other."""
        out = self._buffer(self._sizes[source])
        step = native.CiuicStep(kind=Kind.GATE, source=source, second=other, out=out, activation=activation)
        self._steps.append(step)
        return out

    def add(self, source: int, other: int) -> int:
        """source + other."""
        out = self._buffer(self._sizes[source])
        self._steps.append(native.CiuicStep(kind=Kind.ADD, source=source, second=other, out=out))
        return out

    def cache(self, source: int, head_dim: int, array: int) -> None:
        """Writes a buffer, [kv heads x head_dim], as the last token of cache array `array`."""
        heads = self._sizes[source] // head_dim
        step = native.CiuicStep(kind=Kind.CACHE, source=source, size=head_dim, argument=array, heads=heads)
        self._steps.append(step)

    def attend(self, query: int, head_dim: int, kv_heads: int, scaling: float, array: int) -> int:
        """Attention of the query heads, [heads x head_dim], over cache arrays `array` and `array` + 1: keys, values."""
        out = self._buffer(self._sizes[query])
        step = native.CiuicStep(
            kind=Kind.ATTEND,
            source=query,
            out=out,
            argument=array,
            heads=kv_heads,
            size=head_dim,
            number=scaling,
        )
        self._steps.append(step)
        return out

    def release(self, *buffers: int) -> None:
        """Lets later steps write to these buffers, which no later step reads."""
        for buffer in buffers:
            self._free.setdefault(self._sizes[buffer], []).append(buffer)

    def build(self) -> Program:
        """The program. Raises UsageError if a step does not fit its buffers."""
        return Program(self._factors, self._steps, self._sizes, self._alive)

    def _buffer(self, size: int) -> int:
        if self._free.get(size):
            return self._free[size].pop()
        self._sizes.append(size)
        return len(self._sizes) - 1


class Program:
    """A checked list of steps. It holds what the native library has addresses of."""

    def __init__(
        self,
        factors: Sequence[Factor],
        steps: Sequence[native.CiuicStep],
        sizes: Sequence[int],
        alive: Sequence[torch.Tensor],
    ) -> None:
        self._alive = (tuple(factors), tuple(alive))
        self._library = native.interface()
        handle = ctypes.c_void_p()
        status = self._library.ciuic_program_create(
            (native.CiuicMatrix * len(factors))(*(factor.native for factor in factors)),
            len(factors),
            (native.CiuicStep * len(steps))(*steps),
            len(steps),
            (ctypes.c_int64 * len(sizes))(*sizes),
            len(sizes),
            ctypes.byref(handle),
        )
        native.check(status, "preparing a program")
        self._handle = handle
        self._arguments = ctypes.c_void_p * MAX_ARGUMENTS

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self._library.ciuic_program_free(self._handle)

    def run(
        self,
        arguments: Sequence[torch.Tensor],
        rows: int,
        *,
        caches: native.CiuicCaches | None = None,
        threads: int | None = None,
    ) -> None:
        """Run the steps.

        Args:
            arguments: contiguous CPU tensors [rows, ...], all bfloat16 or all float32, whose sizes the caller answers
                for. bfloat16 activations are rounded to int8 as in `Factor.multiply`.
            rows: tokens, each of another sequence.
            caches: keys and values, of the dtype of the arguments, if steps read them.
            threads: default torch.get_num_threads(). The result does not depend on it.

        Raises:
            EnvironmentFault: not enough memory.
        """
        dtype = arguments[0].dtype
        status = self._library.ciuic_program_run(
            self._handle,
            self._arguments(*(tensor.data_ptr() for tensor in arguments)),
            len(arguments),
            None if caches is None else ctypes.byref(caches),
            rows,
            dtype == torch.bfloat16,
            is_exact(dtype),
            threads or torch.get_num_threads(),
        )
        if status:
            native.check(status, "running a program")
