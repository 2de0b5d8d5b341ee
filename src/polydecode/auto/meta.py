"""Models without weights, on torch's meta device: their shapes and their cost, in no time and no memory."""

from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from polydecode.errors import UserError
from polydecode.methods import get_method
from polydecode.methods.base import ParallelDecoder


def meta_model(base_config: PreTrainedConfig) -> PreTrainedModel:
    """The model of `base_config` without weights; `UserError` for what is no decoder-only model."""
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(base_config, attn_implementation="sdpa")
    except (ValueError, KeyError) as error:
        raise UserError(f"{base_config.model_type!r} is not a supported architecture: {error}") from error
    if not hasattr(model.get_decoder(), "layers"):
        raise UserError(f"architecture {base_config.model_type!r} is not supported: its decoder has no 'layers'")
    return model


def meta_decoder(
    base_config: PreTrainedConfig, method: str, settings: dict[str, Any], tokenizer: Any = None
) -> ParallelDecoder:
    """The model of `method` around `base_config` without weights, float32 as in training; `UserError` for wrong settings."""
    base_config.dtype = torch.float32
    return get_method(method)[1].from_base(meta_model(base_config), tokenizer, **settings)
