"""Conditions of the libraries: a supported version, enough address space, environment variables that they accept.

They are checked before the libraries are imported, so this module imports none of them.
"""

from __future__ import annotations

import linecache
import logging
import os
import re
import resource
import traceback
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from ciuic_cli.errors import EnvironmentFault

SUPPORTED_TRANSFORMERS = ((5, 19), (6, 0))
"""First supported version and first unsupported one. pyproject.toml has the same range (tested)."""
_LEAST_ADDRESS_SPACE = 1 << 30
"""Bytes of address space that torch and OpenBLAS need to be loaded. With less they end the process (tried: 0.6 GB is
too little, 1 GB suffices)."""

_TORCHAO_LOGGERS = ("torchao", "torch.utils._pytree")
"""transformers imports torchao wherever it is installed. torchao then warns of its own extensions that do not load, and
torch of torchao's types. ciuic uses neither."""


def hide_torchao_warnings() -> None:
    """Hide the warnings of importing torchao, which would appear with every command. Errors are shown."""
    for name in _TORCHAO_LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)


def transformers_fault() -> EnvironmentFault | None:
    """The EnvironmentFault for an installed version of transformers that is not supported; None for a supported one."""
    first, end = (".".join(map(str, bound)) for bound in SUPPORTED_TRANSFORMERS)
    remedy = f'install a supported one: pip install "transformers>={first},<{end}"'
    try:
        installed = version("transformers")
    except PackageNotFoundError:
        return EnvironmentFault("transformers is not installed", remedy=remedy)
    numbers = re.match(r"(\d+)\.(\d+)", installed)
    if numbers is not None:
        release = int(numbers[1]), int(numbers[2])
        if SUPPORTED_TRANSFORMERS[0] <= release < SUPPORTED_TRANSFORMERS[1]:
            return None
    return EnvironmentFault(
        f"transformers {installed} is installed; ciuic supports {first} or newer, below {end}", remedy=remedy
    )


def require_supported_transformers() -> None:
    """Raise EnvironmentFault if the installed version of transformers is not supported."""
    fault = transformers_fault()
    if fault is not None:
        raise fault


def require_address_space() -> None:
    """Raise EnvironmentFault if a limit (ulimit -v) leaves too little address space for the numeric libraries."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY and limit < _LEAST_ADDRESS_SPACE:
        raise EnvironmentFault(
            f"the address space is limited to {limit / 1e9:.2f} GB; torch does not start with less than "
            f"{_LEAST_ADDRESS_SPACE / 1e9:.1f} GB",
            remedy="raise the limit (ulimit -v)",
        )


def import_fault(error: BaseException) -> EnvironmentFault | None:
    """The EnvironmentFault for an exception that a library raised while it was imported; None for any other exception.

    It names the environment variable that the library refuses, if the message or the library's code does.
    """
    for each in _chain(error):
        if isinstance(each, ModuleNotFoundError) and each.name and not _is_ours(each.name):
            return EnvironmentFault(f"{each.name} is not installed", remedy="install the package with pip")
        library = _imported_library(each)
        if library is None:
            continue
        reason = f"{type(each).__name__}: {' '.join(str(each).split()):.200}"
        variable = _environment_variable(each)
        if variable is None:
            return EnvironmentFault(
                f"the library {library} cannot be imported: {reason}",
                remedy="check the environment variables that configure it, or install it again",
            )
        return EnvironmentFault(
            f"the library {library} refuses the environment variable {variable}: {reason}",
            remedy=f"correct {variable}, or unset it",
        )
    return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The exception, and those that caused it."""
    seen: list[BaseException] = []
    following: BaseException | None = error
    while following is not None and following not in seen:
        seen.append(following)
        yield following
        following = following.__cause__ or following.__context__


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] in ("ciuic_cli", "__main__")


def _imported_library(error: BaseException) -> str | None:
    """The third-party library whose module was being imported when the error was raised; None without one."""
    found = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        name = frame.f_globals.get("__name__") or ""
        if frame.f_code.co_name == "<module>":
            found = None if _is_ours(name) else name.partition(".")[0]
    return found


def _environment_variable(error: BaseException) -> str | None:
    """An environment variable that is set and named by the message, or else by a failing line, the innermost first."""
    lines = [
        linecache.getline(frame.f_code.co_filename, number)
        for frame, number in traceback.walk_tb(error.__traceback__)
    ]
    names = [name for name in os.environ if "_" in name.strip("_")]
    for text in (str(error), *reversed(lines)):
        words = set(re.findall(r"\w+", text))
        for name in names:
            if name in words:
                return name
    return None


def require_training() -> None:
    """Raise EnvironmentFault unless the packages for training are installed."""
    for name in ("accelerate", "peft"):
        if find_spec(name) is None:
            raise EnvironmentFault(
                f"training needs the package {name}", remedy='pip install "ciuic-cli[train]"'
            )
