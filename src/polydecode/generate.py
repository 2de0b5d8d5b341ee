"""The one decode loop, for every method: prompts in, tokens out, as transformers' `generate` does it.

The loop calls `prefill` once and `step` until every row is done. It owns what is common to all methods: the sampler, logits
processors, stopping, rows that leave when they are finished, streaming and the counts. What a step does is the method's.

Legend: B rows, P prompt tokens, K tokens a step commits, N new tokens, V vocabulary.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedTokenizerBase, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from polydecode.errors import UserError, unknown_name
from polydecode.methods.base import ParallelDecoder
from polydecode.methods.batch import Step
from polydecode.ops.linear import fast_linear
from polydecode.ops.sampling import RowGenerators, check_sampling, draw, is_sampling, mix_seed, warpers

DEFAULT_NEW_TOKENS = 128
_UNSET = object()
_FROM_TOKENIZERS = ("token_type_ids",)
"""What some tokenizers return besides ids and mask; decoder-only models have no use for it."""


@dataclass
class GenerateOutput:
    """What a call made and what it cost.

    `sequences` (B, P + N): prompts and new tokens, padded on the right. `num_new_tokens`: per row, the end token included.
    `steps`: calls of `step`. `forwards`: in forwards of the whole model, the prefill counted as one. `ttft_s`,
    `elapsed_s`: seconds to the first tokens and in all. `finish_reason`: per row "stop" or "length".
    """

    sequences: Tensor
    num_new_tokens: list[int]
    steps: int
    forwards: float
    ttft_s: float
    elapsed_s: float
    finish_reason: list[str]

    @property
    def tokens_per_forward(self) -> float:
        """New tokens per forward of the whole model, averaged over rows."""
        return sum(self.num_new_tokens) / max(len(self.num_new_tokens), 1) / max(self.forwards, 1e-9)


@dataclass
class _Request:
    """A call's settings, resolved."""

    config: GenerationConfig
    eos: set[int]
    pad: int
    max_new_tokens: int
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    options: dict[str, Any]
    seeds: list[int]


def generate(
    model: ParallelDecoder,
    input_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    generation_config: GenerationConfig | None = None,
    logits_processor: LogitsProcessorList | None = None,
    stopping_criteria: StoppingCriteriaList | None = None,
    streamer: BaseStreamer | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    seed: int | Sequence[int] | None = None,
    return_dict_in_generate: bool | None = None,
    eos_token_id: Any = _UNSET,
    **kwargs: Any,
) -> Tensor | GenerateOutput:
    """Prompts and new tokens (B, P + N) int64; a `GenerateOutput` with `return_dict_in_generate=True`.

    `input_ids` (B, P), padded on any side with `attention_mask` 0 there. `kwargs` are fields of `GenerationConfig`
    (max_new_tokens, do_sample, temperature, top_k, top_p, min_p, repetition_penalty, pad_token_id, stop_strings, ...) and the
    method's own options (`model.OPTIONS`). `eos_token_id=None` turns stopping off. `seed`: row b draws from (seed, b), or from
    its own entry of a list; None takes a seed from torch's global generator. Raises `UserError` for unknown names, values out
    of range, and prompts that do not fit the context.
    """
    if input_ids is None:
        raise UserError("generate needs input_ids (rows, tokens)")
    input_ids = input_ids.to(model.device)
    _check_prompt(model, input_ids)
    request = _resolve(
        model, input_ids, generation_config, logits_processor, stopping_criteria, tokenizer, seed, eos_token_id, kwargs
    )
    _check_context(model, input_ids, attention_mask, request.max_new_tokens)
    if streamer is not None:
        if len(input_ids) > 1:
            raise UserError("a streamer takes one row at a time")
        streamer.put(input_ids.cpu())
    loop = _Loop(model, input_ids, attention_mask, request)
    for new_tokens in loop.run():
        if streamer is not None and new_tokens[0]:
            streamer.put(torch.tensor(new_tokens[0]))
    if streamer is not None:
        streamer.end()
    output = loop.output()
    as_dict = request.config.return_dict_in_generate if return_dict_in_generate is None else return_dict_in_generate
    return output if as_dict else output.sequences


class _Loop:
    """One call in progress. Rows leave the batch when they finish; `alive` maps batch rows to the caller's rows."""

    def __init__(self, model: ParallelDecoder, input_ids: Tensor, attention_mask: Tensor | None, request: _Request):
        self.model, self.input_ids, self.attention_mask, self.request = model, input_ids, attention_mask, request
        self.new: list[list[int]] = [[] for _ in input_ids]
        self.finish_reason = ["length"] * len(input_ids)
        self.alive = list(range(len(input_ids)))
        sampling = is_sampling(request.config)
        self.generators = RowGenerators(request.seeds) if sampling else None
        self.warpers: Any = warpers(request.config)
        self.stats = {"steps": 0, "forwards": 0.0, "ttft_s": 0.0, "elapsed_s": 0.0}

    def run(self) -> Iterator[list[list[int]]]:
        """Decode; yields the new tokens of each of the caller's rows after every step."""
        if self.request.max_new_tokens == 0:
            return
        was_training = self.model.training
        self.model.eval()
        started = time.perf_counter()
        try:
            with torch.inference_mode(), fast_linear(self.model):
                state = self.model.prefill(self.input_ids, self.attention_mask, **self.request.options)
                self.stats["forwards"] += 1
                while self.alive:
                    step = self.model.step(state, self._choose)
                    new = self._commit(step)
                    if self.stats["steps"] == 0:
                        self.stats["ttft_s"] = time.perf_counter() - started
                    self.stats["steps"] += 1
                    self.stats["forwards"] += step.forwards
                    self.stats["elapsed_s"] = time.perf_counter() - started
                    yield new
                    state = self._drop_finished(state)
        finally:
            self.model.train(was_training)

    def _choose(self, logits_BV: Tensor) -> Tensor:
        """The sampler: processors see each row's tokens so far, then warpers, then one token per row."""
        scores_BV = logits_BV.float()
        processors: Any = self.request.processors
        if processors:
            scores_BV = torch.cat(
                [processors(self._so_far(row), scores_BV[i : i + 1]) for i, row in enumerate(self.alive)]
            )
        return draw(self.warpers(None, scores_BV), self.generators)

    def _so_far(self, row: int) -> Tensor:
        prompt = self.input_ids[row]
        if self.attention_mask is not None:
            prompt = prompt[self.attention_mask[row].to(prompt.device).bool()]
        return torch.cat([prompt, prompt.new_tensor(self.new[row])])[None]

    def _commit(self, step: Step) -> list[list[int]]:
        """Append each row's committed tokens up to its end; tells what was appended."""
        appended: list[list[int]] = [[] for _ in self.new]
        tokens, counts = step.tokens.tolist(), step.num_committed.tolist()
        for i, row in enumerate(self.alive):
            for token in tokens[i][: counts[i]]:
                if len(self.new[row]) >= self.request.max_new_tokens or self.finish_reason[row] == "stop":
                    break
                self.new[row].append(token)
                appended[row].append(token)
                if token in self.request.eos or self._criteria_met(row):
                    self.finish_reason[row] = "stop"
        return appended

    def _criteria_met(self, row: int) -> bool:
        if not self.request.criteria:
            return False
        return bool(torch.as_tensor(self.request.criteria(self._so_far(row), None)).all())

    def _drop_finished(self, state: Any) -> Any:
        going = [
            i
            for i, row in enumerate(self.alive)
            if self.finish_reason[row] != "stop" and len(self.new[row]) < self.request.max_new_tokens
        ]
        if len(going) == len(self.alive):
            return state
        self.alive = [self.alive[i] for i in going]
        if not going:
            return state
        if self.generators is not None:
            self.generators = self.generators.select(going)
        return self.model.keep_rows(state, torch.tensor(going, device=self.input_ids.device))

    def output(self) -> GenerateOutput:
        width = max(len(row) for row in self.new)
        padded = [row + [self.request.pad] * (width - len(row)) for row in self.new]
        new_BN = torch.tensor(padded, dtype=self.input_ids.dtype, device=self.input_ids.device).reshape(
            len(padded), width
        )
        return GenerateOutput(
            sequences=torch.cat([self.input_ids, new_BN], dim=1),
            num_new_tokens=[len(row) for row in self.new],
            steps=int(self.stats["steps"]),
            forwards=self.stats["forwards"],
            ttft_s=self.stats["ttft_s"],
            elapsed_s=self.stats["elapsed_s"],
            finish_reason=self.finish_reason,
        )


def _resolve(
    model: ParallelDecoder,
    input_ids: Tensor,
    generation_config: GenerationConfig | None,
    logits_processor: LogitsProcessorList | None,
    stopping_criteria: StoppingCriteriaList | None,
    tokenizer: PreTrainedTokenizerBase | None,
    seed: int | Sequence[int] | None,
    eos_token_id: Any,
    kwargs: dict[str, Any],
) -> _Request:
    config = _config(model, generation_config, kwargs)
    options = {name: kwargs[name] for name in kwargs if name in model.OPTIONS and kwargs[name] is not None}
    check_sampling(config)
    max_new_tokens = _max_new_tokens(config, input_ids.shape[1])
    if eos_token_id is _UNSET:
        eos_token_id = config.eos_token_id
    ids = [eos_token_id] if isinstance(eos_token_id, int) else list(eos_token_id or [])
    pad = config.pad_token_id if config.pad_token_id is not None else (ids[0] if ids else 0)
    config.eos_token_id = ids or None
    processors, criteria = _processors(model, config, input_ids, logits_processor, stopping_criteria, tokenizer)
    return _Request(
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


def _check_prompt(model: ParallelDecoder, input_ids: Tensor) -> None:
    if input_ids.dim() != 2 or input_ids.numel() == 0:
        raise UserError(
            f"input_ids has shape {tuple(input_ids.shape)}; it must be (rows, tokens) with at least one token"
        )
    if int(input_ids.max()) >= model.config.vocab_size or int(input_ids.min()) < 0:
        raise UserError(f"input_ids hold ids outside the vocabulary of {model.config.vocab_size}")


def _check_context(model: ParallelDecoder, input_ids: Tensor, attention_mask: Tensor | None, new_tokens: int) -> None:
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
