"""Settings of the autoregressive method: none of its own."""

from typing import ClassVar

from polydecode.methods.base import ParallelDecoderConfig


class AutoregressiveConfig(ParallelDecoderConfig):
    """An AR model behind the contract."""

    model_type = "polydecode_autoregressive"
    method = "autoregressive"
    SETTINGS: ClassVar = {}
