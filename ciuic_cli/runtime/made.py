"""Classes made while a model is loaded: a class of transformers', with something of ours mixed in.

No module has such a class under its name, so that copies and pickles name what it was made of, and make it again.
"""

from __future__ import annotations

import functools
from typing import Any


class Mixin:
    """Base of what is mixed in."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        how: Any = super().__reduce_ex__(max(2, protocol))
        return _new, type(self).__bases__, *how[2:]


@functools.cache
def made(mixin: Any, own: Any) -> Any:
    """The class `own` with `mixin` before it; always the same one."""
    # Under the same name: transformers looks up by it what a model can return, and writes it into config.json.
    names = {"__module__": own.__module__, "__qualname__": own.__qualname__}
    return type(own.__name__, (mixin, own), names)


def own_class(thing: Mixin) -> Any:
    """The class that the thing had before it became a made one."""
    return type(thing).__bases__[1]


def _new(mixin: Any, own: Any) -> Any:
    kind = made(mixin, own)
    return kind.__new__(kind)
