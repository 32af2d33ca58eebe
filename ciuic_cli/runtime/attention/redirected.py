"""Attention modules of transformers whose own `forward` calls an attention function of this package."""

from __future__ import annotations

import copy
from typing import Any, ClassVar

from ciuic_cli.runtime.mixed_classes import Mixin


class RedirectedAttention(Mixin):
    """Mixin for attention classes that look their attention function up by a name in `config`."""

    implementation: ClassVar[str]
    """Name of the attention function that `forward` calls, among transformers' own."""

    replaced: ClassVar[str | None] = None
    """The only implementation of the model that is redirected; None stands for all."""

    @property
    def config(self: Any) -> Any:
        """A copy of the model's configuration that names `implementation`, or the configuration itself (`replaced`).

        `implementation_of_model` is the name that the model's configuration has. The copy is made again when that has
        changed, but not for other fields.
        """
        redirected = self.__dict__.get("redirected_config")
        config = self.__dict__["config"]
        if self.replaced is not None and config._attn_implementation != self.replaced:
            return config
        if redirected is None or redirected.implementation_of_model != config._attn_implementation:
            redirected = copy.copy(config)
            redirected.implementation_of_model = config._attn_implementation
            redirected._attn_implementation_internal = self.implementation
            self.__dict__["redirected_config"] = redirected
        return redirected
