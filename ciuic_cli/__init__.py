"""ciuic: compress a causal language model into a byte budget, with the least damage that many bytes allow.

Importing the package registers the `ciuic` format with transformers, so that
`AutoModelForCausalLM.from_pretrained(artifact)` loads compressed models; nothing heavy is imported before it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ciuic_cli._version import __version__
from ciuic_cli.runtime.registration import install as _install

if TYPE_CHECKING:
    from ciuic_cli.artifact.tensors import read_tensor
    from ciuic_cli.compression.in_place import apply_ciuic_compression
    from ciuic_cli.compression.pipeline import compress
    from ciuic_cli.runtime.loading import load


__all__ = ["__version__", "apply_ciuic_compression", "compress", "load", "read_tensor"]

_HOMES = {
    "compress": "ciuic_cli.compression.pipeline",
    "load": "ciuic_cli.runtime.loading",
    "read_tensor": "ciuic_cli.artifact.tensors",
    "apply_ciuic_compression": "ciuic_cli.compression.in_place",
}

_install()


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
