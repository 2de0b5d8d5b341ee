"""What a model is made of, from its config alone, and what each method predicts for it.

The model is built on torch's meta device, so it takes no weights and no time. The predictions come from the methods
themselves (`predicted_costs`).
"""

from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedModel

from polydecode.auto import load_tokenizer, read_config, resolve_source
from polydecode.auto.meta import meta_model
from polydecode.errors import UserError
from polydecode.methods import get_method, method_names
from polydecode.methods.base import ParallelDecoderConfig


@dataclass
class Inspection:
    """`head_share`: share of the weights read per forward that the head reads. `embedding_parameters` counts a tied matrix
    once, as the head reads it. `costs`: by method, rows of `predicted_costs`."""

    source: str
    method: str | None
    settings: dict[str, Any]
    architecture: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    context_length: int
    parameters: int
    embedding_parameters: int
    layer_parameters: int
    head_parameters: int
    head_share: float
    head_is_tied: bool
    tokenizer: bool
    chat_template: bool
    pad_is_eos: bool
    costs: dict[str, list[dict[str, Any]]] = field(default_factory=dict)


def inspect_source(source: str) -> Inspection:
    """Measures and predictions for any source or checkpoint; reads no weights. `UserError` for what cannot be opened."""
    config = read_config(resolve_source(source))
    own = config if isinstance(config, ParallelDecoderConfig) else None
    base_config: Any = own.base_config if own is not None else config
    base: Any = meta_model(base_config)
    tokenizer = _tokenizer(source)
    parameters = sum(p.numel() for p in base.parameters())
    head, embeddings = base.get_output_embeddings(), base.get_input_embeddings()
    head_parameters = sum(p.numel() for p in head.parameters())
    layer_parameters = sum(p.numel() for p in base.get_decoder().layers.parameters())
    return Inspection(
        source=source,
        method=own.method if own is not None else None,
        settings=own.settings() if own is not None else {},
        architecture=base_config.model_type,
        num_layers=base_config.num_hidden_layers,
        hidden_size=base_config.hidden_size,
        vocab_size=base_config.vocab_size,
        context_length=base_config.max_position_embeddings,
        parameters=parameters,
        embedding_parameters=embeddings.weight.numel(),
        layer_parameters=layer_parameters,
        head_parameters=head_parameters,
        head_share=head_parameters / (layer_parameters + head_parameters),
        head_is_tied=head.weight is embeddings.weight,
        tokenizer=tokenizer is not None,
        chat_template=bool(tokenizer is not None and tokenizer.chat_template),
        pad_is_eos=bool(tokenizer is not None and tokenizer.pad_token_id == tokenizer.eos_token_id is not None),
        costs=_costs(base, own),
    )


def _costs(base: PreTrainedModel, own: ParallelDecoderConfig | None) -> dict[str, list[dict[str, Any]]]:
    """Every method's predictions, those of the checkpoint's own method with its settings first."""
    costs = {}
    for name in method_names():
        settings = own.settings() if own is not None and own.method == name else None
        rows = get_method(name)[1].predicted_costs(base, settings)
        if rows:
            costs[name] = rows
    return costs


def _tokenizer(source: str) -> Any:
    try:
        return load_tokenizer(source)
    except UserError:
        return None
