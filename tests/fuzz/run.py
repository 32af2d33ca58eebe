"""Coverage-guided fuzzing of one target: `python tests/fuzz/run.py TARGET [seconds] [libFuzzer options]`.

Needs atheris (pip install atheris). `native` expects CIUIC_NATIVE_LIBRARY to name a build with CIUIC_FUZZ=ON (see the
Makefile); its coverage comes from the library itself, that of the readers from their Python code.
"""

from __future__ import annotations

import atexit
import ctypes
import importlib.util
import os
import sys
from pathlib import Path

import atheris

HERE = Path(__file__).parent
LIMITS = ("-timeout=300", "-rss_limit_mb=6000", "-max_len=4096", "-print_final_stats=1")


class _PcTableEntry(ctypes.Structure):
    """An entry of libFuzzer's table of program counters."""

    _fields_ = (("address", ctypes.c_size_t), ("flags", ctypes.c_size_t))


def watch_library() -> None:
    """Register the native library's coverage counters with libFuzzer."""
    from atheris import core_with_libfuzzer  # contains libFuzzer's symbols

    from ciuic_cli.codecs.native import interface

    fuzzer, watched = ctypes.CDLL(core_with_libfuzzer.__file__), interface()
    size = ctypes.c_size_t.in_dll(watched, "ciuic_coverage_size").value
    counters = ctypes.addressof((ctypes.c_uint8 * size).in_dll(watched, "ciuic_coverage_counters"))
    places = (_PcTableEntry * size)(*((counters + number, 0) for number in range(size)))
    watch_library.places = places  # type: ignore[attr-defined]  # libFuzzer keeps the address
    begin = ctypes.addressof(places)
    pointer = ctypes.c_void_p
    fuzzer.__getattr__("__sanitizer_cov_8bit_counters_init")(pointer(counters), pointer(counters + size))
    fuzzer.__getattr__("__sanitizer_cov_pcs_init")(pointer(begin), pointer(begin + ctypes.sizeof(places)))


def read_from_source() -> None:
    """Import the package from this tree: atheris cannot instrument modules that an editable install's finder loads."""
    spec = importlib.util.find_spec("ciuic_cli")
    for place in (spec.submodule_search_locations if spec else None) or ():
        for library in Path(place).glob("libciuic_native.*"):
            os.environ.setdefault("CIUIC_NATIVE_LIBRARY", str(library))
    sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in type(finder).__module__]
    sys.path.insert(0, str(HERE.parents[1]))


def main() -> None:
    target, seconds, *options = [*sys.argv[1:], *["60"][: 3 - len(sys.argv)]]
    if target == "native":
        from targets import TARGETS, Folder

        watch_library()
    else:
        read_from_source()
        with atheris.instrument_imports(include=["ciuic_cli"]):
            from targets import TARGETS, Folder
    folder = Folder()
    atexit.register(folder.remove)
    found = HERE.parents[1] / "build" / "fuzz" / target
    found.mkdir(parents=True, exist_ok=True)
    atheris.Setup(
        [sys.argv[0], *LIMITS, f"-max_total_time={seconds}", f"-artifact_prefix={found}/finding-", *options,
         str(found), str(HERE / "corpus" / target)],
        lambda data: TARGETS[target](data, folder),
    )  # fmt: skip
    atheris.Fuzz()


if __name__ == "__main__":
    main()
