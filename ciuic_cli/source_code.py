"""The syntax trees of classes and functions, from which ciuic reads how a model's code uses its weights."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
import threading
from collections.abc import Callable
from typing import Any

_PARSER = threading.Lock()
"""Held while the source is parsed: Python 3.11 raises a SystemError in one of two threads that parse at the same time
(https://github.com/python/cpython/issues/106905)."""


@functools.cache
def syntax_tree(code: type | Callable[..., Any]) -> ast.Module:
    """The parsed source of a class or function; empty if it was made at run time, so that it has no source."""
    try:
        with _PARSER:  # getsource parses, too
            return ast.parse(textwrap.dedent(inspect.getsource(code)))
    except (OSError, TypeError, SyntaxError):
        return ast.Module([], [])
