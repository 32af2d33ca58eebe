"""The fixtures of the runtime's tests: artifacts built without `compress`, and the dense models that they decode to."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

_spec = importlib.util.spec_from_file_location(
    "runtime_fixtures", Path(__file__).parents[1] / "runtime" / "conftest.py"
)
assert _spec is not None and _spec.loader is not None
_runtime = importlib.util.module_from_spec(_spec)
sys.modules["runtime_fixtures"] = _runtime
_spec.loader.exec_module(_runtime)

artifact = _runtime.artifact
prompt = _runtime.prompt
