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

from polydecode.errors import UserError
from polydecode.generate.request import UNSET, Request, check_context, check_prompt, resolve
from polydecode.methods.base import ParallelDecoder
from polydecode.methods.batch import Step
from polydecode.ops.linear import fast_linear
from polydecode.ops.sampling import RowGenerators, draw, is_sampling, warpers


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
    eos_token_id: Any = UNSET,
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
    check_prompt(model, input_ids)
    request = resolve(
        model, input_ids, generation_config, logits_processor, stopping_criteria, tokenizer, seed, eos_token_id, kwargs
    )
    check_context(model, input_ids, attention_mask, request.max_new_tokens)
    if streamer is not None:
        if len(input_ids) > 1:
            raise UserError("a streamer takes one row at a time")
        streamer.put(input_ids.cpu())
    put_draft = getattr(streamer, "put_draft", None)
    loop = _Loop(model, input_ids, attention_mask, request)
    for new_tokens in loop.run():
        if streamer is not None and new_tokens[0]:
            streamer.put(torch.tensor(new_tokens[0]))
        if loop.draft and put_draft is not None:
            put_draft(torch.tensor(loop.draft))
    if streamer is not None:
        streamer.end()
    output = loop.output()
    as_dict = request.config.return_dict_in_generate if return_dict_in_generate is None else return_dict_in_generate
    return output if as_dict else output.sequences


class _Loop:
    """One call in progress. Rows leave the batch when they finish; `alive` maps batch rows to the caller's rows."""

    def __init__(self, model: ParallelDecoder, input_ids: Tensor, attention_mask: Tensor | None, request: Request):
        self.model, self.input_ids, self.attention_mask, self.request = model, input_ids, attention_mask, request
        self.new: list[list[int]] = [[] for _ in input_ids]
        self.finish_reason = ["length"] * len(input_ids)
        self.alive = list(range(len(input_ids)))
        sampling = is_sampling(request.config)
        self.generators = RowGenerators(request.seeds) if sampling else None
        self.warpers: Any = warpers(request.config)
        self.draft: list[int] = []
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
                state = self.model.prefill(
                    self.input_ids, self.attention_mask, self.request.seeds, **self.request.options
                )
                self.stats["forwards"] += 1
                while self.alive:
                    step = self.model.step(state, self._choose)
                    new = self._commit(step)
                    if self.stats["ttft_s"] == 0 and any(self.new):
                        self.stats["ttft_s"] = time.perf_counter() - started
                    self.stats["steps"] += 1
                    self.stats["forwards"] += step.forwards
                    self.stats["elapsed_s"] = time.perf_counter() - started
                    yield new
                    state = self._drop_finished(state)
        finally:
            self.model.train(was_training)

    def _choose(self, logits_NV: Tensor, rows: list[int] | None = None) -> Tensor:
        """The sampler: processors see the row's tokens so far, then warpers, then one token each."""
        scores_NV = logits_NV.float()
        processors: Any = self.request.processors
        if processors:
            owners = range(len(scores_NV)) if rows is None else rows
            scores_NV = torch.cat(
                [processors(self._so_far(self.alive[i]), scores_NV[n : n + 1]) for n, i in enumerate(owners)]
            )
        return draw(self.warpers(None, scores_NV), self.generators, rows)

    def _so_far(self, row: int) -> Tensor:
        prompt = self.input_ids[row]
        if self.attention_mask is not None:
            prompt = prompt[self.attention_mask[row].to(prompt.device).bool()]
        return torch.cat([prompt, prompt.new_tensor(self.new[row])])[None]

    def _commit(self, step: Step) -> list[list[int]]:
        """Append each row's committed tokens up to its end; tells what was appended."""
        appended: list[list[int]] = [[] for _ in self.new]
        room = self.request.max_new_tokens - len(self.new[self.alive[0]])
        self.draft = step.drafts[0][: max(room - int(step.num_committed[0]), 0)] if step.drafts else []
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
