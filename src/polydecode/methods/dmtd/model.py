"""Direct Multi-Token Decoding (arXiv 2510.11958): the gated forward, and decoding with cyclical refilling.

The layers are three groups: encoding [0, E), thinking [E, E+T), decoding [E+T, L). A full forward is

    h_enc = encoding(embed(x));  h_think = thinking(h_enc);  logits = head(decoding(merge(h_enc, h_think)))

where `merge` hands the thinking output to the decoding layers only at the heads of cycles (and at prompt tokens); other
tokens enter them with h_enc alone, and reach the thinking of their head only through attention inside the decoding layers.
All groups attend causally with true positions.

Decoding therefore skips the thinking layers for all but the heads. What was skipped is made up at the next head: the
thinking layers run over the pending tokens and the head in one pass (the refill), which writes the same keys and values the
full forward would have. Only the head's row goes on through the decoding layers. So cached decoding equals the full forward,
and every token passes every layer exactly once.

Legend: B rows, P prompt tokens, R rows taking part, C pending tokens, T tokens, N targets, D width, V vocabulary.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from polydecode.methods.base import Choose, ParallelDecoder, cost_row
from polydecode.methods.batch import Batch, Finding, LossOutput, Score, Step, left_aligned, per_row
from polydecode.methods.dmtd.advice import advise
from polydecode.methods.dmtd.config import DMTDConfig, check_cycle_length
from polydecode.methods.dmtd.phase import PROMPT, phases
from polydecode.ops.cache import KVCache, append, prompt_plan
from polydecode.ops.distillation import TokenLosses, token_losses
from polydecode.ops.losses import mean_or_zero
from polydecode.ops.sampling import RowGenerators


@dataclass
class DMTDState:
    """One batch in decoding.

    `lengths`: tokens that encoding and decoding layers have read, per row; `refilled`: tokens that the thinking layers
    have read. `pending_BCD`: h_enc of the tokens in between. `origins` and `cycle_lengths`: a row's token at position i is
    a head where (i - origin) % cycle_length == 0. `last_B`: the token chosen last, not read yet. `ready`: rows whose next
    logits are already in `logits_BV`.
    """

    cache: KVCache
    lengths: list[int]
    refilled: list[int]
    origins: list[int]
    cycle_lengths: list[int]
    pending_BCD: Tensor
    last_B: Tensor
    logits_BV: Tensor
    ready: list[bool]


class DMTDModel(ParallelDecoder):
    """A pretrained decoder whose last D layers emit the tokens between two heads."""

    config_class = DMTDConfig
    OPTIONS = ("cycle_length",)

    @property
    def _split(self) -> tuple[int, int, int]:
        """(E, E + T, L): where thinking starts, where decoding starts, where the layers end."""
        total = self.stack.num_layers
        return self.config.num_encoding_layers, total - self.config.num_decoding_layers, total

    def _merge(self, h_enc: Tensor, h_think: Tensor, phase: Tensor) -> Tensor:
        """What the decoding layers read, by phase (one dimension less than the hidden states)."""
        head = h_think if self.config.merge == "replace" else h_enc + h_think
        merged = torch.where((phase == 0)[..., None], head, h_enc)
        return torch.where((phase == PROMPT)[..., None], h_think, merged)

    # --- full sequences --------------------------------------------------------------------------------------------

    def _gated(
        self,
        input_ids_BT: Tensor,
        position_ids_BT: Tensor,
        phase_BT: Tensor,
        documents_BT: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """Hidden states (B, T, D) after the last layer, by the gated forward."""
        stack, (think, decode, end) = self.stack, self._split
        h_emb_BTD = stack.embed(input_ids_BT)
        attention = stack.attention(h_emb_BTD, position_ids_BT, documents_BT=documents_BT)
        h_enc_BTD = stack.run(h_emb_BTD, 0, think, attention, cache)
        h_think_BTD = stack.run(h_enc_BTD, think, decode, attention, cache)
        return stack.run(self._merge(h_enc_BTD, h_think_BTD, phase_BT), decode, end, attention, cache)

    def logits(  # type: ignore[override]
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        prompt_lengths: Tensor | list[int] | None = None,
        cycle_length: int | None = None,
    ) -> Tensor:
        """Logits (B, T, V) of the gated forward over right-padded rows.

        The first `prompt_lengths[b]` tokens of row b are its prompt; None means a prompt of one token.
        """
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        lengths_B = torch.as_tensor([1] * len(input_ids) if prompt_lengths is None else prompt_lengths)
        index_T = torch.arange(input_ids.shape[1], device=input_ids.device)
        is_prompt_BT = index_T < lengths_B.to(input_ids.device)[:, None]
        batch = Batch(input_ids, attention_mask, is_prompt_BT, attention_mask)
        cycle_B = torch.tensor(self._cycle_lengths(cycle_length, len(input_ids)), device=input_ids.device)
        phase_BT = phases(batch, cycle_B, self.config.prompt_gate, None)
        hidden_BTD = self._gated(input_ids, batch.position_ids(), phase_BT)
        return self.stack.head(self.stack.norm(hidden_BTD))

    def hidden(self, batch: Batch) -> Tensor:
        phase_BT = torch.full_like(batch.input_ids, PROMPT)
        return self.stack.norm(self._gated(batch.input_ids, batch.position_ids(), phase_BT, batch.document_ids))

    def advice(self, answers: list[int], tokenizer: Any = None) -> list[Finding]:
        config: Any = self.config
        return advise(config, answers)

    def loss(self, batch: Batch, generator: RowGenerators) -> LossOutput:
        choices = self.config.training_cycle_lengths or [self.config.cycle_length]
        documents = batch.num_documents()
        drawn = generator.integers([len(choices)] * documents) if len(choices) > 1 else [0] * documents
        cycle_lengths = [choices[i] for i in drawn]
        losses, phase_N, _ = self._token_losses(batch, cycle_lengths, generator)
        hit_N = losses.hit_N
        sums = {"accuracy": float(hit_N.sum()), "accuracy_count": float(len(hit_N)), **losses.sums()}
        for phase in range(max(choices)):
            here_N = phase_N == phase
            count = float(here_N.sum())
            sums[f"loss_phase_{phase}"] = float(losses.cross_entropy_N[here_N].sum())
            sums[f"loss_phase_{phase}_count"] = count
            sums[f"accuracy_phase_{phase}"] = float(hit_N[here_N].sum())
            sums[f"accuracy_phase_{phase}_count"] = count
        return LossOutput(mean_or_zero(losses.loss_N), len(hit_N), sums)

    def score(self, batch: Batch) -> Score:
        cycle_lengths = [self.config.cycle_length] * batch.num_documents()
        losses, _, target_BT = self._token_losses(batch, cycle_lengths, None)
        loss_N, rows_N = losses.cross_entropy_N, target_BT.nonzero()[:, 0]
        per_row_B = loss_N.new_zeros(len(target_BT)).index_add(0, rows_N, -loss_N)
        return Score(per_row_B, target_BT.sum(1), exact=True)

    def _token_losses(
        self, batch: Batch, cycle_lengths: list[int], generator: RowGenerators | None
    ) -> tuple[TokenLosses, Tensor, Tensor]:
        """The losses and the phase of the predicting token for every target, and which tokens are targets; one cycle length per
        document."""
        cycle_N = torch.tensor(cycle_lengths, device=batch.input_ids.device)
        phase_BT = phases(batch, cycle_N, self.config.prompt_gate, generator)
        hidden_BTD = self._gated(batch.input_ids, batch.position_ids(), phase_BT, batch.document_ids)
        target_BT = batch.predicted()
        predicts_BT = target_BT[:, 1:]
        source_ND = self.stack.norm(hidden_BTD[:, :-1][predicts_BT])
        said = None if batch.source is None else batch.source.rows_where(target_BT)
        losses = self.stack.with_head(token_losses, source_ND, batch.input_ids[target_BT], said)
        return losses, phase_BT[:, :-1][predicts_BT].clamp_min(0), target_BT

    # --- decoding --------------------------------------------------------------------------------------------------

    def _cycle_lengths(self, given: Any, num_rows: int) -> list[int]:
        lengths = per_row("cycle_length", self.config.cycle_length if given is None else given, num_rows)
        for length in lengths:
            check_cycle_length(length)
        return lengths

    def prefill(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        seeds: list[int] | None = None,
        **options: Any,
    ) -> DMTDState:
        self.check_options(options)
        cycle_lengths = self._cycle_lengths(options.get("cycle_length"), len(input_ids))
        rows = left_aligned(input_ids, attention_mask)
        num_rows, width = rows.input_ids_BP.shape
        position_BP = torch.arange(width, device=input_ids.device).expand(num_rows, -1)
        lengths = rows.length_B.tolist()
        if self.config.prompt_gate == "full":
            phase_BP, origins = torch.full_like(position_BP, PROMPT), [length - 1 for length in lengths]
        else:
            phase_BP = position_BP % torch.tensor(cycle_lengths, device=input_ids.device)[:, None]
            origins = [0] * num_rows
        cache = KVCache(self.stack.num_layers, num_rows)
        cache.plan(prompt_plan(cache, rows.length_B, width))
        hidden_BPD = self._gated(rows.input_ids_BP, position_BP, phase_BP, cache=cache)
        last_BD = hidden_BPD[torch.arange(num_rows, device=input_ids.device), rows.length_B - 1]
        return DMTDState(
            cache=cache,
            lengths=lengths,
            refilled=list(lengths),
            origins=origins,
            cycle_lengths=cycle_lengths,
            pending_BCD=hidden_BPD.new_zeros(num_rows, max(cycle_lengths), hidden_BPD.shape[-1]),
            last_B=input_ids.new_zeros(num_rows),
            logits_BV=self.stack.head(self.stack.norm(last_BD)),
            ready=[True] * num_rows,
        )

    def step(self, state: DMTDState, choose: Choose) -> Step:
        rows = [b for b, ready in enumerate(state.ready) if not ready]
        forwards = self._read_last(state, rows) if rows else 0.0
        state.last_B = choose(state.logits_BV)
        state.ready = [False] * len(state.ready)
        return Step(state.last_B[:, None], torch.ones_like(state.last_B), forwards)

    def _read_last(self, state: DMTDState, rows: list[int]) -> float:
        """Read the last token of `rows`, leave the next logits in the state, return the cost in full forwards."""
        stack, (think, decode, end) = self.stack, self._split
        starts = [state.lengths[b] for b in rows]
        pass_ = append(state.cache, starts, [s + 1 for s in starts], rows, state.last_B.device)
        rows_R = pass_.plan.rows_R
        h_R1D = stack.embed((state.last_B if rows_R is None else state.last_B[rows_R])[:, None])
        attention = stack.attention(h_R1D, pass_.position_ids_RT, pass_.key_positions_1K, dense=pass_.dense)

        state.cache.plan(pass_.plan)
        h_R1D = stack.run(h_R1D, 0, think, attention, state.cache)
        self._keep_pending(state, rows, h_R1D)
        for b in rows:
            state.lengths[b] += 1

        heads = [b for b in rows if (state.lengths[b] - 1 - state.origins[b]) % state.cycle_lengths[b] == 0]
        if heads:
            h_think_HD = self._refill(state, heads)
            h_R1D = self._with_heads(h_R1D, h_think_HD, [rows.index(b) for b in heads])
        state.cache.plan(pass_.plan)
        h_R1D = stack.run(h_R1D, decode, end, attention, state.cache)
        logits_RV = stack.head(stack.norm(h_R1D[:, 0]))
        state.logits_BV = logits_RV if rows_R is None else state.logits_BV.index_copy(0, rows_R, logits_RV)
        return (end - decode + think + (decode - think if heads else 0)) / end

    @staticmethod
    def _keep_pending(state: DMTDState, rows: list[int], h_enc_R1D: Tensor) -> None:
        """Remember h_enc of the token at position `lengths[b]` of each row for the next refill."""
        columns = [state.lengths[b] - state.refilled[b] for b in rows]
        if rows == list(range(len(state.lengths))) and len(set(columns)) == 1:
            state.pending_BCD[:, columns[0]] = h_enc_R1D[:, 0]
        else:
            device = h_enc_R1D.device
            state.pending_BCD[torch.tensor(rows, device=device), torch.tensor(columns, device=device)] = h_enc_R1D[:, 0]

    def _refill(self, state: DMTDState, heads: list[int]) -> Tensor:
        """Run the thinking layers over the pending tokens of the rows at a head; h_think (H, D) of the heads."""
        stack, (think, decode, _) = self.stack, self._split
        starts, stops = [state.refilled[b] for b in heads], [state.lengths[b] for b in heads]
        pass_ = append(state.cache, starts, stops, heads, state.last_B.device)
        rows_H = pass_.plan.rows_R
        start_H1 = torch.tensor(starts, device=state.last_B.device)[:, None]
        columns_HC = pass_.position_ids_RT - start_H1
        row_H1 = (torch.arange(len(heads), device=columns_HC.device) if rows_H is None else rows_H)[:, None]
        h_enc_HCD = state.pending_BCD[row_H1, columns_HC]
        attention = stack.attention(h_enc_HCD, pass_.position_ids_RT, pass_.key_positions_1K, dense=pass_.dense)
        state.cache.plan(pass_.plan)
        h_think_HCD = stack.run(h_enc_HCD, think, decode, attention, state.cache)
        for b in heads:
            state.refilled[b] = state.lengths[b]
        return h_think_HCD[:, -1]

    def _with_heads(self, h_enc_R1D: Tensor, h_think_HD: Tensor, where: list[int]) -> Tensor:
        """The input of the decoding layers: h_enc, and the merge at the rows that are heads."""
        phase_R1 = torch.ones(len(h_enc_R1D), 1, dtype=torch.long, device=h_enc_R1D.device)
        index_H = torch.tensor(where, device=h_enc_R1D.device)
        phase_R1[index_H] = 0
        h_think_R1D = torch.zeros_like(h_enc_R1D).index_copy(0, index_H, h_think_HD[:, None].to(h_enc_R1D.dtype))
        return self._merge(h_enc_R1D, h_think_R1D, phase_R1)

    def keep_rows(self, state: DMTDState, rows: Tensor) -> DMTDState:
        chosen = rows.tolist()
        state.cache.select_rows(rows)

        def pick(values: list) -> list:
            return [values[b] for b in chosen]

        return DMTDState(
            state.cache,
            pick(state.lengths),
            pick(state.refilled),
            pick(state.origins),
            pick(state.cycle_lengths),
            state.pending_BCD[rows],
            state.last_B[rows],
            state.logits_BV[rows],
            pick(state.ready),
        )

    def join(self, state: DMTDState, other: DMTDState) -> DMTDState:
        state.cache.join(other.cache)
        width = max(state.pending_BCD.shape[1], other.pending_BCD.shape[1])

        def widen(pending_BCD: Tensor) -> Tensor:
            return torch.nn.functional.pad(pending_BCD, (0, 0, 0, width - pending_BCD.shape[1]))

        return DMTDState(
            state.cache,
            state.lengths + other.lengths,
            state.refilled + other.refilled,
            state.origins + other.origins,
            state.cycle_lengths + other.cycle_lengths,
            torch.cat([widen(state.pending_BCD), widen(other.pending_BCD)]),
            torch.cat([state.last_B, other.last_B]),
            torch.cat([state.logits_BV, other.logits_BV]),
            state.ready + other.ready,
        )

    def forwards_per_token(self, count_head: bool = False, **options: Any) -> float:
        """PLT, the share of the layers run per token: [L + (c - 1)(E + D)] / (c L) for cycle length c.

        With `count_head`, layers and head are weighed by their parameters, which is what a memory-bound forward reads.
        """
        self.check_options(options)
        cycle = self._cycle_lengths(options.get("cycle_length"), 1)[0]
        think, decode, end = self._split
        always = think + end - decode
        if not count_head:
            return (end + (cycle - 1) * always) / (cycle * end)
        layer, head = self.stack.parameter_counts()
        return ((end + (cycle - 1) * always) * layer + cycle * head) / (cycle * (end * layer + head))

    @classmethod
    def predicted_costs(cls, base: PreTrainedModel, settings: dict[str, Any] | None = None) -> list[dict[str, Any]]:
        """Cycle lengths 1 to 8 for the splits of `splits` and that of `settings`."""
        rows = []
        own = [(settings["num_encoding_layers"], settings["num_decoding_layers"])] if settings else []
        for encoding, decoding in dict.fromkeys([*own, *splits(base.config.num_hidden_layers)]):
            split = {"num_encoding_layers": encoding, "num_decoding_layers": decoding}
            model = cls(DMTDConfig(base_config=base.config, **split), base)
            for cycle_length in range(1, 9):
                plain = model.forwards_per_token(cycle_length=cycle_length)
                with_head = model.forwards_per_token(count_head=True, cycle_length=cycle_length)
                rows.append(cost_row(split, {"cycle_length": cycle_length}, plain, with_head))
        return rows


def splits(num_layers: int) -> list[tuple[int, int]]:
    """Some (encoding, decoding) layers that leave at least one thinking layer."""
    half = num_layers // 2
    wanted = [(0, 4), (0, 8), (0, half), (4, 8), (8, 8), (half // 2, half // 2)]
    return [(e, d) for e, d in dict.fromkeys(wanted) if d > 0 and e + d < num_layers]
