"""Teach transformers the "ciuic" quantization method, without importing transformers.

`import ciuic_cli` has to stay light, and transformers takes seconds to import. So the plug-in is
registered at the moment at which transformers' own registry comes into being: at once if it is there
already, else by a finder on `sys.meta_path` that runs the registration right after that one module has
been executed.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence

REGISTRY_MODULE = "transformers.quantizers.auto"
"""The module that holds transformers' mapping from `quant_method` to quantizer classes."""
PLUGIN_MODULE = "ciuic_cli.runtime.plugin"
"""The module that holds ours: it imports the registry, and registers when it has run itself."""


def register() -> None:
    """Register the quantizer and its config class with transformers now (imports it; idempotent)."""
    # The registry first: imported from within our plug-in, it would be registered with a half-loaded one.
    importlib.import_module(REGISTRY_MODULE)
    from ciuic_cli.runtime.plugin import register_with_transformers

    register_with_transformers()


def install() -> None:
    """Register as soon as transformers' registry exists: now, or when something imports it. Idempotent."""
    if not any(isinstance(finder, _RegistryFinder) for finder in sys.meta_path):
        # It stays installed: a registry that is imported afresh (tests do that) needs the method again.
        sys.meta_path.insert(0, _RegistryFinder())
    if REGISTRY_MODULE in sys.modules:
        register()


class _RegistryFinder(importlib.abc.MetaPathFinder):
    """Finds only the registry module, as the other finders would, and registers once it has run."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != REGISTRY_MODULE:
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
            if not _plugin_is_half_loaded():  # unpickling imports it first; it registers at its end
                register()

        # On the instance, so that the loader keeps its type (tracebacks and `inspect` rely on it).
        loader.exec_module = execute_then_register  # type: ignore[method-assign]
        return spec


def _plugin_is_half_loaded() -> bool:
    plugin = sys.modules.get(PLUGIN_MODULE)
    return plugin is not None and not hasattr(plugin, "register_with_transformers")
