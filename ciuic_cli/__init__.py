"""ciuic: compress a causal language model to a byte budget, with the least loss that the budget allows.

Importing the package registers the `ciuic` format with transformers, so that
`AutoModelForCausalLM.from_pretrained(artifact)` loads compressed models. Heavy modules are imported when they are first
used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ciuic_cli._version import __version__
from ciuic_cli.runtime.registration import install as _install

if TYPE_CHECKING:
    from ciuic_cli.artifact.tensors import read_tensor
    from ciuic_cli.compression.in_place import apply_ciuic_compression
    from ciuic_cli.compression.pipeline import compress
    from ciuic_cli.errors import CiuicError
    from ciuic_cli.export.dense import export_dense
    from ciuic_cli.export.gguf.writing import export_gguf
    from ciuic_cli.runtime.loading import load
    from ciuic_cli.runtime.plugin import CiuicConfig


__all__ = [
    "CiuicConfig",
    "CiuicError",
    "__version__",
    "apply_ciuic_compression",
    "compress",
    "export_dense",
    "export_gguf",
    "load",
    "read_tensor",
]

_MODULES = {
    "compress": "ciuic_cli.compression.pipeline",
    "load": "ciuic_cli.runtime.loading",
    "export_dense": "ciuic_cli.export.dense",
    "export_gguf": "ciuic_cli.export.gguf.writing",
    "CiuicConfig": "ciuic_cli.runtime.plugin",
    "read_tensor": "ciuic_cli.artifact.tensors",
    "apply_ciuic_compression": "ciuic_cli.compression.in_place",
    "CiuicError": "ciuic_cli.errors",
}
"""Where the public functions and classes are defined; they are imported on first access."""

_install()


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        from importlib import import_module

        from ciuic_cli.process.libraries import require_supported_transformers

        require_supported_transformers()
        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
