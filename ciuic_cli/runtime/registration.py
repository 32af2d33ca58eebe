"""Registers the "ciuic" quantization method with transformers, and its LoRA layers with PEFT, without importing either.

transformers takes seconds to import, and `import ciuic_cli` must stay fast. If transformers' registry of quantizers is
already imported, the plug-in registers at once. Otherwise a finder on `sys.meta_path` runs the registration right
after that module has been executed. The same holds for PEFT's LoRA model.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from typing import Any

from ciuic_cli.process.libraries import require_supported_transformers, transformers_fault

REGISTRY_MODULE = "transformers.quantizers.auto"
"""The module that holds transformers' mapping from `quant_method` to quantizer classes."""
PLUGIN_MODULE = "ciuic_cli.runtime.plugin"
"""The module with this package's quantizer. It imports the registry and registers at its end."""

PEFT_MODULE = "peft.tuners.lora.model"
"""The module that chooses PEFT's LoRA layers."""
LORA_MODULE = "ciuic_cli.train.lora_layers"
"""The module with this package's LoRA layers. A name, because loading a model does not need it."""


def register() -> None:
    """Register the quantizer and its config class now. Imports transformers. Idempotent.

    In a version of transformers that is not supported, other models can be loaded, and artifacts are refused.
    """
    # The registry first: if the plug-in imported it, registration would run while the plug-in is half loaded.
    registry = importlib.import_module(REGISTRY_MODULE)
    if transformers_fault() is not None:
        from ciuic_cli.artifact.schema import QUANT_METHOD

        for mapping in ("AUTO_QUANTIZATION_CONFIG_MAPPING", "AUTO_QUANTIZER_MAPPING"):
            getattr(registry, mapping, {})[QUANT_METHOD] = _Refusal
        return
    from ciuic_cli.runtime.plugin import register_with_transformers

    register_with_transformers()


def install() -> None:
    """Register now with what is imported, and with the rest as soon as it is. Idempotent."""
    if not any(isinstance(finder, _RegistryFinder) for finder in sys.meta_path):
        # The finder stays: if the registry is imported again (tests do that), it must be filled again.
        sys.meta_path.insert(0, _RegistryFinder())
    for module, action in _ACTIONS.items():
        if module in sys.modules:
            action()


def register_adapters() -> None:
    """Let PEFT find the LoRA layers for compressed modules. Imports PEFT. Idempotent."""
    if transformers_fault() is None:
        layers = importlib.import_module(LORA_MODULE)
        if hasattr(
            layers, "register"
        ):  # if the layers themselves import PEFT first, they register at their end
            layers.register()


_ACTIONS = {REGISTRY_MODULE: register, PEFT_MODULE: register_adapters}
"""What runs right after a module of another package has been imported."""


class _Refusal:
    """In the place of the quantizer and its config in a version of transformers that is not supported."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        require_supported_transformers()

    @classmethod
    def from_dict(cls, *arguments: Any, **options: Any) -> None:
        """Called for an artifact's config. Raises EnvironmentFault."""
        require_supported_transformers()


class _RegistryFinder(importlib.abc.MetaPathFinder):
    """Finds only the modules of _ACTIONS, through the other finders, and registers after they have been executed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in _ACTIONS:
            return None
        for finder in sys.meta_path:
            if finder is self:
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                break
        else:
            return None
        loader = spec.loader
        if loader is None:
            return spec
        execute = loader.exec_module

        def execute_then_register(module: types.ModuleType) -> None:
            execute(module)
            # If unpickling imported the plug-in first, it registers at its end.
            if fullname != REGISTRY_MODULE or not _plugin_is_half_loaded():
                _ACTIONS[fullname]()

        # Patched on the instance, so that the loader keeps its type, on which tracebacks and `inspect` rely.
        loader.exec_module = execute_then_register  # type: ignore[method-assign]
        return spec


def _plugin_is_half_loaded() -> bool:
    plugin = sys.modules.get(PLUGIN_MODULE)
    return plugin is not None and not hasattr(plugin, "register_with_transformers")
