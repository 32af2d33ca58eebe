"""Regular expressions in an adapter's options: matched first in a process of their own, which can be ended.

PEFT matches them against every module name. Python has no time limit for that, and an expression such as
`(\\w+\\.?)+x` takes time that doubles with each letter.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ciuic_cli.errors import InputError

MOST_SECONDS = 10.0
"""Time that all matches of an adapter may take, in seconds (chosen; 40 expressions on 1,220 names, about as many as
DeepSeek-V3 has modules, take 0.5)."""
_QUANTIFIERS = frozenset("*+?{")
"""Without one of these characters an expression is matched in a time that its length bounds."""
_MATCH = r"""
import json, re, sys
patterns, names = json.load(sys.stdin)
for pattern in patterns:
    for form in (r"(%s)$", r"(.*\.)?(%s)$", r"(^|.*\.)%s($|\..*)", r"(?:^|.*?\.)%s\.(?P<idx>\d+)\."):
        try:
            compiled = re.compile(form.replace("%s", pattern))
        except (re.error, RecursionError, OverflowError):
            continue
        for name in names:
            compiled.match(name)
"""
"""The forms in which PEFT matches: target and exclude_modules, rank_pattern and alpha_pattern, modules_to_save,
layers_pattern. What cannot be compiled is left to PEFT, which names the error."""


def require_prompt_patterns(options: Any, names: Iterable[str], file: Path) -> None:
    """Raise InputError if regular expressions in the options take more than `MOST_SECONDS` on the module names.

    Args:
        options: content of adapter_config.json. file: its path.
        names: of all modules of the model.
    """
    patterns = sorted({text for text in _texts(options) if _QUANTIFIERS & set(text)})
    if not patterns:
        return
    try:
        subprocess.run(
            [sys.executable, "-I", "-S", "-c", _MATCH],
            input=json.dumps([patterns, list(names)]),
            text=True,
            timeout=MOST_SECONDS,
            check=True,
            capture_output=True,
        )
    except subprocess.TimeoutExpired as error:
        raise InputError(
            f"its regular expressions do not end within {MOST_SECONDS:.0f} s on the model's module names: "
            f"{', '.join(patterns):.200}",
            file=file,
            remedy="write target_modules and similar options as lists of names, or without nested repetitions",
        ) from error


def _texts(value: Any) -> Iterator[str]:
    """All texts in a JSON value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from _texts(item)
