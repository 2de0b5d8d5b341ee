"""Answers in large batches: rows that end leave, and waiting prompts take their places.

A window of prompts is decoded longest first, so that the rows of one prefill are alike and the last rows are short. What is
drawn for an answer depends on its seed alone. A window starts with an empty batch, so it gives the same answers whatever
was decoded before it: that is what makes a resumed run equal an uninterrupted one.

Legend: B rows, P prompt tokens, N logits, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from polydecode.distill.prompts import Prompt
from polydecode.distill.settings import DistillConfig
from polydecode.generate.request import UNSET, resolve
from polydecode.methods.base import ParallelDecoder
from polydecode.ops.linear import fast_linear
from polydecode.ops.sampling import RowGenerators, draw, is_sampling, mix_seed, warpers

REFILL_SHARE = 4
"""Waiting prompts enter when this part (1 / REFILL_SHARE) of the rows is free: a prefill of one row costs almost as much."""


@dataclass
class Answer:
    """`tokens`: the answer without its end token. `finished`: whether it ended by itself."""

    prompt: Prompt
    sample: int
    tokens: list[int] = field(default_factory=list)
    finished: bool = False


class Engine:
    """Decodes answers in batches; `steps`, `new_tokens` count over all windows."""

    def __init__(self, model: ParallelDecoder, config: DistillConfig, tokenizer: Any):
        self.model, self.config = model, config
        first_11 = torch.zeros(1, 1, dtype=torch.long, device=model.device)
        settings = {"max_new_tokens": config.max_new_tokens, **config.sampling()}
        self.request = resolve(model, first_11, None, None, None, tokenizer, 0, UNSET, settings)
        if tokenizer.eos_token_id is not None:
            self.request.eos.add(tokenizer.eos_token_id)
        self.warpers: Any = warpers(self.request.config)
        self.new_tokens = 0
        self._alive: list[Answer] = []
        self._draws: RowGenerators | None = None

    def answers(self, window: Sequence[Answer], tell: Callable[[int], None]) -> None:
        """Fill in the answers of `window`; `tell` is called after every step with how many are done."""
        waiting = sorted(window, key=lambda a: (len(a.prompt.ids), a.prompt.index, a.sample))
        state: Any = None
        with torch.inference_mode(), fast_linear(self.model):
            while waiting or self._alive:
                free = self.config.batch_size - len(self._alive)
                if waiting and (not self._alive or free * REFILL_SHARE >= self.config.batch_size):
                    entering = [waiting.pop() for _ in range(min(free, len(waiting)))]
                    state = self._enter(state, entering)
                state = self._step(state)
                tell(len(window) - len(waiting) - len(self._alive))

    def _enter(self, state: Any, entering: list[Answer]) -> Any:
        """Prefill `entering` and join them to the rows that are being decoded."""
        seeds = [mix_seed(self.config.seed, answer.prompt.index, answer.sample) for answer in entering]
        width = max(len(answer.prompt.ids) for answer in entering)
        rows = [answer.prompt.ids + [0] * (width - len(answer.prompt.ids)) for answer in entering]
        mask = [[1] * len(answer.prompt.ids) + [0] * (width - len(answer.prompt.ids)) for answer in entering]
        device = self.model.device
        new = self.model.prefill(torch.tensor(rows, device=device), torch.tensor(mask, device=device), seeds)
        if is_sampling(self.request.config):
            fresh = RowGenerators(seeds)
            self._draws = fresh if not self._alive or self._draws is None else self._draws.joined(fresh)
        state = self.model.join(state, new) if self._alive else new
        self._alive = self._alive + entering
        return state

    def _step(self, state: Any) -> Any:
        step = self.model.step(state, self._choose)
        tokens, counts = step.tokens.tolist(), step.num_committed.tolist()
        going = []
        for i, answer in enumerate(self._alive):
            for token in tokens[i][: counts[i]]:
                self.new_tokens += 1
                answer.finished = token in self.request.eos
                if answer.finished:
                    break
                answer.tokens.append(token)
                if len(answer.tokens) == self.config.max_new_tokens:
                    break
            if not answer.finished and len(answer.tokens) < self.config.max_new_tokens:
                going.append(i)
        if len(going) == len(self._alive):
            return state
        self._alive = [self._alive[i] for i in going]
        if not going:
            return None
        if self._draws is not None:
            self._draws = self._draws.select(going)
        return self.model.keep_rows(state, torch.tensor(going, device=self.model.device))

    def _choose(self, logits_NV: Tensor, rows: list[int] | None = None) -> Tensor:
        """The sampler of `generate`: processors see a row's tokens so far, then warpers, then one token each."""
        scores_NV = logits_NV.float()
        processors: Any = self.request.processors
        if processors:
            owners = range(len(scores_NV)) if rows is None else rows
            so_far = [self._alive[i].prompt.ids + self._alive[i].tokens for i in owners]
            scores_NV = torch.cat(
                [
                    processors(torch.tensor([ids], device=scores_NV.device), scores_NV[n : n + 1])
                    for n, ids in enumerate(so_far)
                ]
            )
        return draw(self.warpers(None, scores_NV), self._draws, rows)
