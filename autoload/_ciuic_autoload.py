"""Makes artifacts load in every program of this environment: `import ciuic_cli` when transformers is imported.

Python calls `install` at each start: up to version 3.14 through `ciuic_cli.pth`, later through `ciuic_cli.start`. So
this module imports nothing that the interpreter has not imported already.
"""

import os
import sys

VARIABLE = "CIUIC_AUTOLOAD"
"""Environment variable; "0" leaves the format unregistered until `import ciuic_cli`."""
TRIGGER = "transformers.quantizers.auto"
"""The module with transformers' registry of quantizers. Its import imports `ciuic_cli`."""


class Finder:
    """Finds no module itself. When TRIGGER is looked for, it imports `ciuic_cli`, whose own finder then registers."""

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        """None, except for TRIGGER: its spec, from the finders of `sys.meta_path` (a ModuleSpec)."""
        if name != TRIGGER:
            return None
        sys.meta_path.remove(cls)
        _import_package()
        for finder in sys.meta_path:
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                return spec
        return None


def install():
    """Put the finder first in `sys.meta_path`, unless CIUIC_AUTOLOAD is 0. Idempotent."""
    if os.environ.get(VARIABLE) != "0" and Finder not in sys.meta_path:
        sys.meta_path.insert(0, Finder)


def _import_package():
    try:
        import ciuic_cli  # noqa: F401 (registers with transformers)
    except Exception as error:  # other models must load nevertheless
        import warnings

        warnings.warn(
            f"ciuic artifacts cannot be loaded: import ciuic_cli failed with {type(error).__name__}: {error}",
            stacklevel=2,
        )
