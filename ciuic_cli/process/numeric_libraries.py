"""Environment variables of OpenMP and MKL. They are read early, so this module must not import torch."""

from __future__ import annotations

import os
import sys

from ciuic_cli.process.processor import is_intel


def configure_numeric_libraries() -> None:
    """Both settings below, for a command that computes for a long time; call it before torch is imported."""
    let_threads_sleep()
    make_products_reproducible()


def let_threads_sleep() -> None:
    """Let OpenMP's threads sleep while they wait for work, unless the user has set OMP_WAIT_POLICY.

    By default the threads spin and take the cores from other processes. Two compressions at once on two cores then
    take eight times as long as one alone, instead of a little more (measured:
    docs/experiments/runtime/waiting-threads.md). Waking sleeping threads costs a long computation a few percent, but
    token-by-token decoding a third, so only long computations call this. OpenMP reads the variable once, when torch is
    loaded; after that this function does nothing.
    """
    if "torch" not in sys.modules:
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def make_products_reproducible() -> None:
    """Let MKL give a product the same bits for any number of threads, unless the user has set MKL_CBWR.

    On Intel processors MKL otherwise divides the sums of products with few columns among its threads, so that the
    artifact would depend on their number (measured: docs/experiments/runtime/reproducible-products.md). On other
    processors its products do not depend on that number, and the setting would choose slower code. MKL reads the
    variable at its first product; after that this function has no effect.
    """
    if is_intel():
        os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")
