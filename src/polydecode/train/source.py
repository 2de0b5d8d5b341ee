"""The source model that a conversion learns from beside its data: what it says of each target, at full depth.

Where low-rank adapters are all that is trained, the source is the same weights with the adapters switched off, and costs no
memory. Where more is trained it is a frozen copy of the weights as they were, or a model named by `distill_source`.

Legend: B rows, T tokens, N targets, k tokens kept of the source's distribution, K = k + 1.
"""

import copy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from polydecode.auto import load_base, load_tokenizer
from polydecode.config import TrainConfig
from polydecode.errors import UserError
from polydecode.methods.base import ParallelDecoder
from polydecode.methods.batch import Batch
from polydecode.ops.distillation import SourceDistribution, most_likely
from polydecode.ops.layers import DecoderStack
from polydecode.train.distributed import is_first_process


class Source:
    """A frozen model that reads clean text causally. `adapter`: what to switch off first where the weights are shared."""

    def __init__(self, base: PreTrainedModel, adapter: Any, config: TrainConfig):
        self.base, self.adapter = base, adapter
        self.weight, self.temperature, self.top_k = (
            config.distill_weight,
            config.distill_temperature,
            config.distill_top_k,
        )

    @torch.no_grad()
    def read(self, batch: Batch) -> SourceDistribution:
        """What the source says of every target (B, T) that a token before it in its document can predict."""
        known_BT = batch.predicted()
        position_BT = batch.position_ids()
        with self._asleep():
            stack = DecoderStack(self.base)
            hidden_BTD = stack.embed(batch.input_ids)
            attention = stack.attention(hidden_BTD, position_BT, documents_BT=batch.document_ids)
            hidden_BTD = stack.run(hidden_BTD, 0, stack.num_layers, attention)
            before_ND = stack.norm(hidden_BTD[:, :-1][known_BT[:, 1:]])
            ids_Nk, log_probs_NK = most_likely(before_ND, stack.head, self.top_k, self.temperature)
        ids_BTk = ids_Nk.new_zeros(*known_BT.shape, ids_Nk.shape[-1])
        log_probs_BTK = log_probs_NK.new_zeros(*known_BT.shape, log_probs_NK.shape[-1])
        ids_BTk[known_BT], log_probs_BTK[known_BT] = ids_Nk, log_probs_NK
        return SourceDistribution(ids_BTk, log_probs_BTK, known_BT, self.weight, self.temperature)

    @contextmanager
    def _asleep(self) -> Iterator[None]:
        """In evaluation mode, and without the adapter."""
        was_training = self.base.training
        self.base.eval()
        try:
            if self.adapter is None:
                yield
            else:
                with self.adapter.disable_adapter():
                    yield
        finally:
            self.base.train(was_training)


def frozen_base(
    model: ParallelDecoder, tokenizer: PreTrainedTokenizerBase, config: TrainConfig
) -> PreTrainedModel | None:
    """A model of its own to learn from, made before anything is trained: the one that `distill_source` names, or a copy of the
    weights; None where nothing is distilled or the weights can be shared. Raises `UserError` for another vocabulary."""
    if not config.distill_weight:
        return None
    if config.distill_source:
        base = load_base(config.distill_source, torch.float32)
        theirs = load_tokenizer(config.distill_source).get_vocab()
        sizes = (model.config.vocab_size, base.config.vocab_size)
        if theirs != tokenizer.get_vocab() or sizes[0] - sizes[1] not in (0, 1):
            raise UserError(
                f"distill_source {config.distill_source!r} has another vocabulary ({sizes[1]} rows) than "
                f"{config.checkpoint!r} ({sizes[0]} rows); name a model with the same tokenizer"
            )
    elif shares_weights(model, config):
        return None
    else:
        base = copy.deepcopy(model.base)
    return base.requires_grad_(False).eval()


def shares_weights(model: ParallelDecoder, config: TrainConfig) -> bool:
    """Whether adapters are all that is trained, so that the source is the same weights without them."""
    beside = (config.train_embeddings, config.train_norms)
    return bool(config.lora_rank) and not any(type(model).TRAINS_EMBEDDINGS if b is None else b for b in beside)


def make_source(
    model: ParallelDecoder, adapter: Any, frozen: PreTrainedModel | None, config: TrainConfig
) -> Source | None:
    """The source of a run whose parameters are prepared; says on stderr which one it is. None without distillation."""
    if not config.distill_weight:
        return None
    if frozen is None:
        assert adapter is not None
        told = "the same weights without the adapter"
    else:
        told = repr(config.distill_source) if config.distill_source else "a frozen copy of the weights"
    if is_first_process():
        print(f"distilling from {told}, weight {config.distill_weight}", file=sys.stderr)
    if frozen is None:
        return Source(model.base, adapter, config)
    torch.nn.Module.to(frozen, model.device)
    return Source(frozen, None, config)
