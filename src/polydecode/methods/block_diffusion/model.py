"""Efficient-DLM (arXiv 2512.14067): an AR model that fills blocks of masked tokens, several per forward.

In training a row is [noisy ; clean] (`layout.py`): each noisy block reads itself and the clean blocks before it, and the loss
is the cross-entropy of the masked tokens, each at its own position (no shift), weighted by 1/t.

In decoding the text grows block by block. A block starts all masked; each forward proposes a token for every masked
position and commits the sure ones. While a block is being filled its keys and values are provisional: every forward writes
them to the same slots of the cache again. Once it is full they are written a last time, without any mask in it; by default
the next block's first forward does that in one pass over [finished block ; masked block], in which the finished block does
not read the masked one. So the cache holds what recomputing the clean text would give.

With `attention` "bidirectional" nothing can be cached, and every forward reads the whole text.

Legend: B rows, P prompt tokens, T tokens, A noisy tokens, S tokens of a pass, N masked tokens, K keys, D width, V vocabulary.
"""

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from polydecode.methods.base import Choose, ParallelDecoder, cost_row
from polydecode.methods.batch import Batch, Finding, LossOutput, Score, Step, TrainingPass, per_row
from polydecode.methods.block_diffusion import decoding
from polydecode.methods.block_diffusion.advice import advise
from polydecode.methods.block_diffusion.config import BlockDiffusionConfig, check_count, check_decoding
from polydecode.methods.block_diffusion.corruption import corrupt
from polydecode.methods.block_diffusion.layout import (
    Places,
    attention_pattern,
    context_half,
    copies,
    noisy_half,
    predictors,
    read_batch,
)
from polydecode.methods.block_diffusion.mask_token import resolve_mask_token
from polydecode.ops.distillation import SourceRows, token_losses
from polydecode.ops.losses import token_cross_entropy
from polydecode.ops.sampling import RowGenerators


class BlockDiffusionModel(ParallelDecoder):
    """A pretrained decoder that denoises blocks of tokens."""

    config_class = BlockDiffusionConfig
    OPTIONS = ("threshold", "block_size", "steps", "selector")
    TRAINS_EMBEDDINGS = True

    @classmethod
    def from_base(cls, base: PreTrainedModel, tokenizer: Any = None, **settings: Any) -> "ParallelDecoder":
        """As in `ParallelDecoder`; chooses the mask token, and adds a row to `base` when no row is free."""
        cls.config_class.check_names(settings)
        cls.config_class(base_config=base.config.to_dict(), **settings)
        mask_token_id = resolve_mask_token(base, tokenizer, settings.get("mask_token_id"))
        return super().from_base(base, tokenizer, **(settings | {"mask_token_id": mask_token_id}))

    @property
    def mask_token_id(self) -> int:
        """The id that stands for a masked token."""
        assert self.config.mask_token_id is not None, "from_base chooses one"
        return self.config.mask_token_id

    # --- full sequences --------------------------------------------------------------------------------------------

    def _hidden(self, ids_BS: Tensor, places: Places, attention: str | None = None) -> Tensor:
        """Normalised hidden states (B, S, D) of a pass over `places`, with the config's `attention` unless one is given."""
        pattern = attention_pattern(places, attention or self.config.attention, self.config.prompt_attention)
        return self.stack.norm(self.stack.read(ids_BS, places.position, pattern))

    def logits(  # type: ignore[override]
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        prompt_lengths: Tensor | list[int] | None = None,
        block_size: int | None = None,
    ) -> Tensor:
        """Logits (B, T, V) over right-padded rows as they are, masks included, with block-causal attention.

        The first `prompt_lengths[b]` tokens of row b are its prompt (None: there is none), and blocks count from there.
        """
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        lengths_B = torch.as_tensor([0] * len(input_ids) if prompt_lengths is None else prompt_lengths)
        index_T = torch.arange(input_ids.shape[1], device=input_ids.device)
        is_prompt_BT = index_T < lengths_B.to(input_ids.device)[:, None]
        batch = Batch(input_ids, attention_mask, is_prompt_BT, attention_mask)
        size = self.config.block_size if block_size is None else block_size
        check_count("block_size", size)
        places = read_batch(batch, torch.full((len(input_ids),), size)).to(input_ids.device)
        return self.stack.head(self._hidden(input_ids, places))

    def hidden(self, batch: Batch) -> Tensor:
        """Normalised hidden states (B, T, D), every token reading its whole document on both sides."""
        real_BT = batch.attention_mask.bool()
        document_BT = torch.zeros_like(batch.input_ids) if batch.document_ids is None else batch.document_ids

        def document(b: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return ((document_BT[b, q] == document_BT[b, k]) & real_BT[b, k] & real_BT[b, q]) | (q == k)

        return self.stack.norm(self.stack.read(batch.input_ids, batch.position_ids(), document))

    def _end_ids(self) -> set[int]:
        """The tokens behind which a block is filled up in training."""
        if not self.config.fill_last_block:
            return set()
        values = (self.config.eos_token_id, getattr(self.generation_config, "eos_token_id", None))
        return {i for value in values for i in (value if isinstance(value, list) else [value]) if i is not None}

    def _noise(self, batch: Batch, generator: RowGenerators) -> tuple[Places, Places, Tensor, Tensor]:
        """The two halves, which noisy tokens are masked (B, A) and their blocks' noise levels; on the CPU.

        The only random draws of training, in this order for each document: its block size, its levels, its positions.
        """
        config = self.config
        choices = config.training_block_sizes or [config.block_size]
        rows, documents = len(batch.input_ids), batch.num_documents()
        drawn = generator.integers([len(choices)] * documents) if len(choices) > 1 else [0] * documents
        size_N = torch.tensor([choices[i] for i in drawn])
        clean = read_batch(batch, size_N)
        one = noisy_half(clean, size_N, self._end_ids(), config.max_position_embeddings)
        may_mask_BA = one.is_real & one.is_target
        if config.token_shift:
            may_mask_BA &= one.position > 0
        width = one.token.shape[1]
        is_masked = torch.zeros(rows, config.noise_draws, width, dtype=torch.bool)
        level = torch.ones(rows, config.noise_draws, width)
        for b in range(rows):
            count = int(one.is_real[b].sum())
            numbers, lengths = torch.unique_consecutive(one.document[b, :count], return_counts=True)
            start = 0
            for number, length in zip(numbers.tolist(), lengths.tolist(), strict=True):
                part = slice(start, start + length)
                start += length
                is_masked[b, :, part], level[b, :, part] = corrupt(
                    one.block[b, part],
                    may_mask_BA[b, part],
                    config.half_life_ratio,
                    config.min_noise_level,
                    config.noise_draws,
                    generator.row(number),
                )
        noisy = copies(one, config.noise_draws)
        return noisy, context_half(clean, config.attention), is_masked.flatten(1), level.flatten(1)

    def num_targets(self, batch: Batch, generator: RowGenerators) -> int:
        """Tokens that `loss` would mask, with the same draws."""
        return int(self._noise(batch, generator)[2].sum())

    def training_pass(self, prompt: int, answer: int) -> TrainingPass:
        """Every noisy copy of the answer, its last block filled up, and the context."""
        noisy = self.config.noise_draws * -(-answer // self._places_logged()) * self._places_logged()
        context = prompt + answer if self.config.attention == "clean_context" else prompt
        return TrainingPass(noisy + context, noisy, has_mask=True)

    def advice(self, answers: list[int], tokenizer: Any = None) -> list[Finding]:
        config: Any = self.config
        return advise(config, answers, tokenizer)

    def _masked_hidden(
        self,
        noisy: Places,
        context: Places,
        is_masked_BA: Tensor,
        wanted_BA: Tensor,
        device: torch.device,
        attention: str | None = None,
    ) -> Tensor:
        """Normalised hidden states (N, D) that predict the `wanted_BA` tokens, in row order."""
        places = noisy.joined(context)
        ids_BS = places.token.clone()
        ids_BS[:, : noisy.token.shape[1]].masked_fill_(is_masked_BA, self.mask_token_id)
        row_N, index_N = wanted_BA.nonzero(as_tuple=True)
        if self.config.token_shift:
            index_N = predictors(noisy, context)[row_N, index_N]
        hidden_BSD = self._hidden(ids_BS.to(device), places.to(device), attention)
        return hidden_BSD[row_N.to(device), index_N.to(device)]

    def loss(self, batch: Batch, generator: RowGenerators) -> LossOutput:
        """The sum of cross-entropy / t over the masked tokens, divided by their number (equation 1 of the paper, averaged
        over masked tokens). `sums` hold the unweighted cross-entropy and accuracy, also by place in the block, without
        filling; "uniform" is the cross-entropy of a model that knows nothing, ln V."""
        device = batch.input_ids.device
        noisy, context, is_masked_BA, level_BA = self._noise(batch, generator)
        hidden_ND = self._masked_hidden(noisy, context, is_masked_BA, is_masked_BA, device)
        said = _source_rows(batch, noisy, is_masked_BA)
        losses = self.stack.with_head(token_losses, hidden_ND, noisy.token[is_masked_BA].to(device), said)
        loss_N, hit_N = losses.loss_N, losses.hit_N
        weighted_N = loss_N / level_BA[is_masked_BA].to(device, loss_N.dtype)
        counted_N, place_N = ~noisy.is_filling[is_masked_BA], noisy.place[is_masked_BA]
        plain_N, right_N = losses.cross_entropy_N.float().cpu(), hit_N.float().cpu()
        sums = losses.sums()
        buckets = {"": counted_N} | {f"_place_{i}": counted_N & (place_N == i) for i in range(self._places_logged())}
        for suffix, chosen_N in buckets.items():
            count = float(chosen_N.sum())
            for name, values_N in (("cross_entropy", plain_N), ("accuracy", right_N)):
                sums[f"{name}{suffix}"] = float(values_N[chosen_N].sum())
                sums[f"{name}{suffix}_count"] = count
        count = sums["accuracy_count"]
        sums |= {"uniform_loss": count * math.log(self.config.vocab_size), "uniform_loss_count": count}
        return LossOutput(weighted_N.sum() / max(len(loss_N), 1), len(loss_N), sums)

    def _places_logged(self) -> int:
        return max(self.config.training_block_sizes or [self.config.block_size])

    @torch.no_grad()
    def score(self, batch: Batch) -> Score:
        """Log-likelihood of decoding the targets one token per forward, left to right in each block.

        One pass per place i of a block gives the probability of the token there with what stands before it known and the
        rest of the block masked; by the chain rule their product is the probability of the whole text in that order. It is
        an estimate of the model's likelihood (which averages over orders), and deterministic: no noise is drawn. Blocks before
        are known, as in decoding, so a noisy context is a clean one here. With bidirectional attention, where a block must not
        read later ones, it is a pass per place and block.
        """
        by_block = self.config.attention == "bidirectional"
        attention = "bidirectional" if by_block else "clean_context"
        size_N = torch.full((batch.num_documents(),), self.config.block_size)
        clean = read_batch(batch, size_N)
        noisy, context = noisy_half(clean, size_N, set()), context_half(clean, attention)
        device = batch.input_ids.device
        target_BA = noisy.is_real & noisy.is_target
        if self.config.token_shift:
            target_BA &= noisy.position > 0
        total_B = torch.zeros(len(target_BA), dtype=torch.promote_types(self.dtype, torch.float32), device=device)
        for block in noisy.block[target_BA].unique().tolist() if by_block else [None]:
            open_BA, shown, around = noisy.is_real, noisy, context
            if block is not None:
                open_BA = noisy.is_real & (noisy.block == block)
                shown, around = (replace(h, is_real=h.is_real & (h.block <= block)) for h in (noisy, context))
            for place in noisy.place[target_BA & open_BA].unique().tolist():
                wanted_BA = target_BA & open_BA & (noisy.place == place)
                masked_BA = open_BA & (noisy.place >= place)
                hidden_ND = self._masked_hidden(shown, around, masked_BA, wanted_BA, device, attention)
                loss_N, _ = self.stack.with_head(token_cross_entropy, hidden_ND, noisy.token[wanted_BA].to(device))
                total_B.index_add_(0, wanted_BA.nonzero()[:, 0].to(device), -loss_N)
        return Score(total_B, target_BA.sum(1).to(device), exact=False)

    # --- decoding --------------------------------------------------------------------------------------------------

    def prefill(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        seeds: list[int] | None = None,
        **options: Any,
    ) -> decoding.BlockDiffusionState:
        self.check_options(options)
        rows = len(input_ids)
        config = self.config
        chosen = {name: options.get(name, getattr(config, name)) for name in self.OPTIONS}
        if chosen["block_size"] is None:
            chosen["block_size"] = config.block_size
        if chosen["selector"] is None:
            chosen["selector"] = config.selector
        by_row = {name: per_row(name, value, rows) for name, value in chosen.items()}
        for values in zip(*by_row.values(), strict=True):
            check_decoding(**dict(zip(by_row, values, strict=True)), context=config.max_position_embeddings)
        decoding.warn_above_trained(by_row["block_size"], self._places_logged())
        return decoding.prefill(self, input_ids, attention_mask, by_row, seeds or [0] * rows)

    def step(self, state: decoding.BlockDiffusionState, choose: Choose) -> Step:
        return decoding.step(self, state, choose)

    def keep_rows(self, state: decoding.BlockDiffusionState, rows: Tensor) -> decoding.BlockDiffusionState:
        state.cache.select_rows(rows)
        return decoding.BlockDiffusionState(state.cache, [state.rows[b] for b in rows.tolist()])

    def join(
        self, state: decoding.BlockDiffusionState, other: decoding.BlockDiffusionState
    ) -> decoding.BlockDiffusionState:
        state.cache.join(other.cache)
        return decoding.BlockDiffusionState(state.cache, state.rows + other.rows)

    # --- predictions -----------------------------------------------------------------------------------------------

    def forwards_per_token(self, count_head: bool = False, **options: Any) -> float | None:
        """Forwards per token where the options fix them: `steps`, threshold 0, one token per forward; else None, since how
        many tokens reach a threshold depends on the text. A separate write is counted."""
        self.check_options(options)
        size = options.get("block_size") or self.config.block_size
        steps = options.get("steps", self.config.steps)
        threshold = options.get("threshold", self.config.threshold)
        if steps is not None:
            forwards = min(steps, size)
        elif threshold is None or threshold > 1:
            forwards = size
        elif threshold == 0:
            forwards = 1
        else:
            return None
        return (forwards + self._extra_writes()) / size

    def _extra_writes(self) -> int:
        return 0 if self.config.fuse_write or self.config.attention == "bidirectional" else 1

    @classmethod
    def predicted_costs(cls, base: PreTrainedModel, settings: dict[str, Any] | None = None) -> list[dict[str, Any]]:
        """Forwards per token for blocks of 16 (or the checkpoint's own size) by commit rate, fused write and separate."""
        size = (settings or {}).get("block_size", BlockDiffusionConfig.block_size)
        rows = []
        for fused in (True, False):
            for rate in (1, 1.5, 2, 2.5, 3, 4, 6):
                if rate > size:
                    continue
                forwards = (math.ceil(size / rate) + (0 if fused else 1)) / size
                settled = {"block_size": size, "fuse_write": fused}
                rows.append(cost_row(settled, {"commits_per_forward": rate}, forwards, forwards))
        return rows


def _source_rows(batch: Batch, noisy: Places, is_masked_BA: Tensor) -> SourceRows | None:
    """What the source says of the masked tokens given the clean ones before them; of filling it says nothing."""
    if batch.source is None:
        return None
    said = batch.source.rows(is_masked_BA.nonzero()[:, 0], noisy.column[is_masked_BA])
    said.known_N = said.known_N & ~noisy.is_filling[is_masked_BA].to(said.known_N.device)
    return said
