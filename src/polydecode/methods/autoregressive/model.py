"""The AR model behind the contract: prefill, then one forward per token.

It runs the base model's own layers over the position-addressed cache. Greedy output equals transformers' `generate` token
for token.

Legend: B rows, P prompt tokens, T tokens, N targets, D width, V vocabulary.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from polydecode.methods.autoregressive.config import AutoregressiveConfig
from polydecode.methods.base import Choose, ParallelDecoder
from polydecode.methods.batch import Batch, LossOutput, Score, Step, left_aligned
from polydecode.ops.cache import KVCache, append, prompt_plan
from polydecode.ops.distillation import TokenLosses, token_losses
from polydecode.ops.losses import mean_or_zero
from polydecode.ops.sampling import RowGenerators


@dataclass
class AutoregressiveState:
    """`lengths`: tokens read per row. `last_B`: the token chosen last, not read yet. `ready`: rows whose next logits are
    already in `logits_BV`."""

    cache: KVCache
    lengths: list[int]
    last_B: Tensor
    logits_BV: Tensor
    ready: list[bool]


class AutoregressiveModel(ParallelDecoder):
    """One token per step."""

    config_class = AutoregressiveConfig

    def prefill(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        seeds: list[int] | None = None,
        **options: Any,
    ) -> AutoregressiveState:
        self.check_options(options)
        rows = left_aligned(input_ids, attention_mask)
        num_rows, width = rows.input_ids_BP.shape
        cache = KVCache(self.stack.num_layers, num_rows)
        cache.plan(prompt_plan(cache, rows.length_B, width))
        hidden_BPD = self._hidden(rows.input_ids_BP, torch.arange(width, device=input_ids.device)[None], cache=cache)
        last_BD = hidden_BPD[torch.arange(num_rows, device=input_ids.device), rows.length_B - 1]
        logits_BV = self.stack.head(self.stack.norm(last_BD))
        return AutoregressiveState(
            cache, rows.length_B.tolist(), input_ids.new_zeros(num_rows), logits_BV, [True] * num_rows
        )

    def step(self, state: AutoregressiveState, choose: Choose) -> Step:
        rows = [b for b, ready in enumerate(state.ready) if not ready]
        if rows:
            self._read_last(state, rows)
        state.last_B = choose(state.logits_BV)
        state.ready = [False] * len(state.ready)
        return Step(state.last_B[:, None], torch.ones_like(state.last_B), forwards=1.0 if rows else 0.0)

    def _read_last(self, state: AutoregressiveState, rows: list[int]) -> None:
        """Forward the last token of `rows` and leave the next logits in the state."""
        device = state.last_B.device
        starts = [state.lengths[b] for b in rows]
        pass_ = append(state.cache, starts, [s + 1 for s in starts], rows, device)
        state.cache.plan(pass_.plan)
        rows_R = pass_.plan.rows_R
        last_R1 = (state.last_B if rows_R is None else state.last_B[rows_R])[:, None]
        stack = self.stack
        hidden_R1D = stack.embed(last_R1)
        attention = stack.attention(hidden_R1D, pass_.position_ids_RT, pass_.key_positions_1K, dense=pass_.dense)
        hidden_R1D = stack.run(hidden_R1D, 0, stack.num_layers, attention, state.cache)
        logits_RV = stack.head(stack.norm(hidden_R1D[:, 0]))
        state.logits_BV = logits_RV if rows_R is None else state.logits_BV.index_copy(0, rows_R, logits_RV)
        for b in rows:
            state.lengths[b] += 1

    def keep_rows(self, state: AutoregressiveState, rows: Tensor) -> AutoregressiveState:
        chosen = rows.tolist()
        state.cache.select_rows(rows)
        return AutoregressiveState(
            state.cache,
            [state.lengths[b] for b in chosen],
            state.last_B[rows],
            state.logits_BV[rows],
            [state.ready[b] for b in chosen],
        )

    def join(self, state: AutoregressiveState, other: AutoregressiveState) -> AutoregressiveState:
        state.cache.join(other.cache)
        return AutoregressiveState(
            state.cache,
            state.lengths + other.lengths,
            torch.cat([state.last_B, other.last_B]),
            torch.cat([state.logits_BV, other.logits_BV]),
            state.ready + other.ready,
        )

    def logits(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:  # type: ignore[override]
        position_1T = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        return self.stack.head(self.stack.norm(self._hidden(input_ids, position_1T)))

    def hidden(self, batch: Batch) -> Tensor:
        return self.stack.norm(self._hidden(batch.input_ids, batch.position_ids(), batch.document_ids))

    def loss(self, batch: Batch, generator: RowGenerators) -> LossOutput:
        losses, _ = self._token_losses(batch)
        count = len(losses.hit_N)
        sums = {"accuracy": float(losses.hit_N.sum()), "accuracy_count": float(count), **losses.sums()}
        return LossOutput(mean_or_zero(losses.loss_N), count, sums)

    def score(self, batch: Batch) -> Score:
        losses, target_BT = self._token_losses(batch)
        loss_N, rows_N = losses.cross_entropy_N, target_BT.nonzero()[:, 0]
        per_row_B = loss_N.new_zeros(len(target_BT)).index_add(0, rows_N, -loss_N)
        return Score(per_row_B, target_BT.sum(1), exact=True)

    def forwards_per_token(self, count_head: bool = False, **options: Any) -> float:
        self.check_options(options)
        return 1.0

    def _token_losses(self, batch: Batch) -> tuple[TokenLosses, Tensor]:
        """The losses of every target, in row order, and which tokens are targets."""
        hidden_BTD = self.hidden(batch)
        target_BT = batch.predicted()
        source_ND = hidden_BTD[:, :-1][target_BT[:, 1:]]
        said = None if batch.source is None else batch.source.rows_where(target_BT)
        return self.stack.with_head(token_losses, source_ND, batch.input_ids[target_BT], said), target_BT

    def _hidden(
        self, input_ids_BT: Tensor, position_ids: Tensor, documents: Tensor | None = None, cache: KVCache | None = None
    ) -> Tensor:
        stack = self.stack
        hidden_BTD = stack.embed(input_ids_BT)
        attention = stack.attention(hidden_BTD, position_ids.expand(input_ids_BT.shape), documents_BT=documents)
        return stack.run(hidden_BTD, 0, stack.num_layers, attention, cache)
