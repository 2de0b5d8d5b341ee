"""The token that stands for "not known yet": a row of the vocabulary that nothing else uses.

It must differ from padding, start and end tokens and from what the chat template writes, because a mask never stands in real
text; its logit is -inf in decoding, so it is never emitted.
"""

from typing import Any

from transformers import PreTrainedModel

from polydecode.errors import UserError
from polydecode.ops.vocabulary import grow_vocabulary


def resolve_mask_token(base: PreTrainedModel, tokenizer: Any, given: int | None) -> int:
    """The mask token's id; adds a row to `base` (its embeddings stay tied if they were) when the id is the next new one.

    `given` None takes the tokenizer's own mask token, else the first row behind all that the tokenizer uses, else a new
    row; without a tokenizer nobody knows which rows are free, so it is a new one. Raises `UserError` for an id outside the
    vocabulary or with another use.
    """
    rows = _num_rows(base)
    token_id = _choose(rows, tokenizer) if given is None else given
    if token_id > rows:
        raise UserError(f"mask_token_id is {token_id}; the vocabulary has {rows} rows, so {rows} would be a new one")
    use = _other_use(base, tokenizer, token_id)
    if use:
        raise UserError(f"mask_token_id {token_id} is {use}; choose a token that no text contains, or leave it out")
    if token_id == rows:
        grow_vocabulary(base, rows + 1)
    return token_id


def _num_rows(base: PreTrainedModel) -> int:
    embeddings: Any = base.get_input_embeddings()
    return embeddings.weight.shape[0]


def _choose(rows: int, tokenizer: Any) -> int:
    if tokenizer is None:
        return rows
    if tokenizer.mask_token_id is not None and tokenizer.mask_token_id < rows:
        return tokenizer.mask_token_id
    used = set(tokenizer.get_vocab().values())
    return next((i for i in range(max(used) + 1, rows)), rows)


def _other_use(base: PreTrainedModel, tokenizer: Any, token_id: int) -> str:
    """What else `token_id` is for, in words; "" for nothing."""
    for place in (base.config, base.generation_config, tokenizer):
        for name in ("pad_token_id", "eos_token_id", "bos_token_id", "unk_token_id"):
            value = getattr(place, name, None)
            if token_id in (value if isinstance(value, list) else [value]):
                return f"the model's {name}"
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, str) and token_id < len(tokenizer):
        token = tokenizer.convert_ids_to_tokens(token_id)
        if token in tokenizer.all_special_tokens + list(tokenizer.get_added_vocab()) and token in template:
            return f"{token!r}, which the chat template writes"
    return ""
