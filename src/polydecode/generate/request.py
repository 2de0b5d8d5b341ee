"""What a call of `generate` asks for, resolved and checked before any work.

Legend: B rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedTokenizerBase, StoppingCriteriaList

from polydecode.errors import UserError, unknown_name
from polydecode.methods.base import ParallelDecoder
from polydecode.ops.sampling import check_sampling, mix_seed

DEFAULT_NEW_TOKENS = 128
UNSET = object()
_FROM_TOKENIZERS = ("token_type_ids",)
"""What some tokenizers return besides ids and mask; decoder-only models have no use for it."""


@dataclass
class Request:
    """A call's settings, resolved."""

    config: GenerationConfig
    eos: set[int]
    pad: int
    max_new_tokens: int
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    options: dict[str, Any]
    seeds: list[int]


def resolve(
    model: ParallelDecoder,
    input_ids: Tensor,
    generation_config: GenerationConfig | None,
    logits_processor: LogitsProcessorList | None,
    stopping_criteria: StoppingCriteriaList | None,
    tokenizer: PreTrainedTokenizerBase | None,
    seed: int | Sequence[int] | None,
    eos_token_id: Any,
    kwargs: dict[str, Any],
) -> Request:
    config = _config(model, generation_config, kwargs)
    options = {name: kwargs[name] for name in kwargs if name in model.OPTIONS}
    check_sampling(config)
    max_new_tokens = _max_new_tokens(config, input_ids.shape[1])
    if eos_token_id is UNSET:
        eos_token_id = config.eos_token_id
    ids = [eos_token_id] if isinstance(eos_token_id, int) else list(eos_token_id or [])
    pad = config.pad_token_id if config.pad_token_id is not None else (ids[0] if ids else 0)
    config.eos_token_id = ids or None
    processors, criteria = _processors(model, config, input_ids, logits_processor, stopping_criteria, tokenizer)
    return Request(
        config=config,
        eos=set(ids),
        pad=int(pad),
        max_new_tokens=max_new_tokens,
        processors=processors,
        criteria=criteria,
        options=options,
        seeds=_seeds(seed, len(input_ids)),
    )


def _config(model: ParallelDecoder, given: GenerationConfig | None, kwargs: dict[str, Any]) -> GenerationConfig:
    """The generation settings of a call; a caller's `given` is copied, names that are no setting are refused."""
    source = given if given is not None else model.generation_config
    config = GenerationConfig.from_dict(source.to_dict() if source is not None else {})
    for name, value in kwargs.items():
        if name in model.OPTIONS or name in _FROM_TOKENIZERS:
            continue
        if not hasattr(config, name):
            raise unknown_name("generation setting", name, [*_common_settings(), *model.OPTIONS])
        setattr(config, name, value)
    if getattr(config, "num_beams", 1) not in (None, 1):
        raise UserError("beam search is not supported: a cycle or block commits tokens it cannot take back")
    if getattr(config, "num_return_sequences", 1) not in (None, 1):
        raise UserError("num_return_sequences is not supported; repeat the prompt rows instead")
    if config.do_sample is None and kwargs.get("temperature"):
        config.do_sample = True
    return config


def _common_settings() -> list[str]:
    return (
        "max_new_tokens max_length do_sample temperature top_k top_p min_p repetition_penalty no_repeat_ngram_size "
        "eos_token_id pad_token_id stop_strings seed"
    ).split()


def _max_new_tokens(config: GenerationConfig, prompt_width: int) -> int:
    if config.max_new_tokens is not None:
        value = config.max_new_tokens
    elif config.max_length is not None and config.max_length > prompt_width:
        value = config.max_length - prompt_width
    else:
        value = DEFAULT_NEW_TOKENS
    if not isinstance(value, int) or value < 0:
        raise UserError(f"max_new_tokens is {value!r}; it must be an integer of 0 or more")
    return value


def check_prompt(model: ParallelDecoder, input_ids: Tensor) -> None:
    if input_ids.dim() != 2 or input_ids.numel() == 0:
        raise UserError(
            f"input_ids has shape {tuple(input_ids.shape)}; it must be (rows, tokens) with at least one token"
        )
    if int(input_ids.max()) >= model.config.vocab_size or int(input_ids.min()) < 0:
        raise UserError(f"input_ids hold ids outside the vocabulary of {model.config.vocab_size}")


def check_context(model: ParallelDecoder, input_ids: Tensor, attention_mask: Tensor | None, new_tokens: int) -> None:
    longest = input_ids.shape[1] if attention_mask is None else int(attention_mask.sum(1).max())
    context = model.config.max_position_embeddings
    if longest + new_tokens > context:
        raise UserError(
            f"the prompt has {longest} tokens and max_new_tokens is {new_tokens}; together they must fit the model's "
            f"context of {context}"
        )


def _processors(
    model: ParallelDecoder,
    config: GenerationConfig,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList | None,
    stopping_criteria: StoppingCriteriaList | None,
    tokenizer: PreTrainedTokenizerBase | None,
) -> tuple[LogitsProcessorList, StoppingCriteriaList]:
    """transformers' own processors for repetition, n-grams, forced and banned tokens, plus the caller's; stop strings."""
    ours = ("temperature", "top_k", "top_p", "min_p", "max_new_tokens", "max_length", "do_sample")
    greedy = GenerationConfig.from_dict({k: v for k, v in config.to_dict().items() if k not in ours})
    mixin: Any = model  # its private builders are typed for other classes
    mixin._prepare_special_tokens(greedy, kwargs_has_attention_mask=True, device=input_ids.device)
    processors = mixin._get_logits_processor(
        generation_config=greedy,
        input_ids_seq_length=input_ids.shape[1],
        encoder_input_ids=input_ids,
        logits_processor=logits_processor or LogitsProcessorList(),
        device=str(input_ids.device),
        model_kwargs={},
    )
    criteria = StoppingCriteriaList(stopping_criteria or [])
    if config.stop_strings:
        if tokenizer is None:
            raise UserError("stop_strings need tokenizer=... in the call")
        from transformers import StopStringCriteria

        criteria.append(StopStringCriteria(tokenizer, config.stop_strings))
    return processors, criteria


def _seeds(seed: int | Sequence[int] | None, rows: int) -> list[int]:
    if seed is None:
        seed = int(torch.randint(0, 2**31, (1,)))
    if isinstance(seed, int):
        return [mix_seed(seed, row) for row in range(rows)]
    if len(seed) != rows:
        raise UserError(f"seed has {len(seed)} entries for {rows} rows; give one, or one per row")
    return [mix_seed(int(s), 0) for s in seed]
