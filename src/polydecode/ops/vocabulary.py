"""More rows for a model's vocabulary, the same ones every time."""

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel


@torch.no_grad()
def grow_vocabulary(base: PreTrainedModel, num_rows: int, stored: torch.dtype | None = None) -> None:
    """Add rows to embeddings and head, up to `num_rows`, each the mean of the rows there were; a tied head stays tied.

    The new rows depend on the old ones alone, so whoever has the source can make them again: with `stored`, the dtype of a
    source that is loaded in a wider one, they are rounded as they would be there.
    """
    layers: Any = (base.get_input_embeddings(), base.get_output_embeddings())
    old = layers[0].weight.shape[0]
    if num_rows <= old:
        return
    base.resize_token_embeddings(num_rows, mean_resizing=False)
    layers = (base.get_input_embeddings(), base.get_output_embeddings())
    for layer in layers:
        layer.weight[old:] = mean_row(layer.weight[:old], stored)
        if getattr(layer, "bias", None) is not None:
            layer.bias[old:] = layer.bias[:old].float().mean().to(stored or layer.bias.dtype)


def mean_row(weight_VD: Tensor, stored: torch.dtype | None = None) -> Tensor:
    """The mean (D,) of all rows, summed in float64 and rounded to float32 (and `stored`), so that it is the same on every
    machine."""
    return weight_VD.double().mean(0).float().to(stored or weight_VD.dtype).to(weight_VD.dtype)
