"""A repair of torch's compiler for CPUs, without which compiled models may read numbers before they are computed.

torch 2.13 records "this kernel reads what that operator wrote into an argument" by renaming the buffer. When its C++
backend fuses two kernels whose loops it must make equal, it computes the list of what they read again, and then the
renaming is lost, unless the list has entries of another kind (`SchedulerNode.recompute_size_and_body`). A later pass,
which orders kernels for low memory, may then put the reader before the writer.

vLLM's dense linears for CPUs write into an argument (`_C::onednn_mm`), among them the gates of routers. In models of
DeepSeek-V3's kind, sigmoid and correction bias of the router are two such kernels: experts were chosen by uninitialised
memory, and predictions were wrong or NaN. It is torch's issue 185509.
"""

from __future__ import annotations

import functools
from typing import Any

from ciuic_cli.errors import UsageError


def keep_order_of_writes() -> None:
    """Repair torch's compiler in this process. Idempotent, and without effect where torch renames by itself.

    Raises UsageError if torch has no such function any more.
    """
    try:
        from torch._inductor.scheduler import SchedulerNode

        nodes: Any = SchedulerNode
        original = nodes.recompute_size_and_body
    except (ImportError, AttributeError) as fault:
        raise UsageError(
            "it is not known whether this version of torch compiles the model correctly for a CPU",
            remedy="add --enforce-eager (in Python: enforce_eager=True), or install torch 2.13",
        ) from fault
    if hasattr(original, "renames"):
        return

    @functools.wraps(original)
    def recompute_size_and_body(node: Any, *args: Any, **options: Any) -> None:
        original(node, *args, **options)
        node.set_read_writes(node.read_writes.rename(node.mutation_renames))

    recompute_size_and_body.renames = True  # type: ignore[attr-defined]
    nodes.recompute_size_and_body = recompute_size_and_body
