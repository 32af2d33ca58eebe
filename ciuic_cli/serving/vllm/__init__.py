"""The plug-in that lets vLLM serve artifacts. vLLM finds it by the entry point `vllm.general_plugins` and calls
`register` in each of its processes.

The other modules of this folder, except `names`, `local_experts` and `inductor`, import vLLM, which is no dependency
of this package. `make vllm-check` tests them in an environment with vLLM.
"""

from __future__ import annotations


def register() -> None:
    """Add the quantization method "ciuic" to vLLM's. Imports vLLM. Idempotent."""
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, register_quantization_config

    from ciuic_cli.artifact.schema import QUANT_METHOD
    from ciuic_cli.serving.vllm.quantization import CiuicVllmConfig

    if QUANT_METHOD not in QUANTIZATION_METHODS:
        register_quantization_config(QUANT_METHOD)(CiuicVllmConfig)
