"""Run a slice of a transformers decoder stack: the only user of the layers' signatures.

`DecoderStack` views an unmodified `...ForCausalLM` as embedding, numbered layers and head, so that a method can run layers
[a, b) on its own and feed the result to layers [c, d). Nothing is copied: the layers, the rotary embedding and the head are
the model's own. Two scalings live outside the layers in some families (granite's embedding multiplier and logit scaling)
and are applied here. Anything else that a family does between its layers makes the sliced run differ from the model's own
forward; `slice_error` measures that, and conversion refuses what differs.

Legend: B rows, T tokens, K keys, D width, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from polydecode.errors import UserError
from polydecode.ops.cache import KVCache
from polydecode.ops.masks import (
    Pattern,
    Predicate,
    causal,
    mask_of,
    same_document,
    sliding_window,
    two_sided_window,
)


@dataclass(frozen=True)
class Attention:
    """What every layer of one pass shares: positions, the rotary table, and a mask per layer type. No mask (None) is plain
    causality, or every key for every query where `reads_all`.
    """

    position_ids_BT: Tensor
    position_embeddings: tuple[Tensor, Tensor]
    masks: dict[str, Any]
    reads_all: bool = False


class DecoderStack:
    """The embedding, the numbered layers and the head of a decoder-only model, to be run in slices."""

    def __init__(self, base: PreTrainedModel):
        decoder = base.get_decoder()
        for part in ("embed_tokens", "layers", "norm", "rotary_emb"):
            if not hasattr(decoder, part):
                raise UserError(
                    f"architecture {base.config.model_type!r} is not supported: its decoder has no {part!r}; {SUPPORTED}"
                )
        self.base, self.decoder, self.config = base, decoder, base.config
        self.layers = decoder.layers[: base.config.num_hidden_layers]
        self.num_layers = len(self.layers)
        self._window: int | None = getattr(base.config, "sliding_window", None)
        default = "sliding_attention" if self._window else "full_attention"
        self.layer_types = list(getattr(base.config, "layer_types", None) or [default] * self.num_layers)
        unknown = set(self.layer_types) - {"full_attention", "sliding_attention"}
        if unknown:
            raise UserError(f"layers of type {', '.join(sorted(unknown))} are not supported; {SUPPORTED}")

    def embed(self, input_ids_BT: Tensor) -> Tensor:
        """Input embeddings (B, T, D), scaled as the family scales them."""
        return self.decoder.embed_tokens(input_ids_BT) * getattr(self.decoder, "embedding_multiplier", 1)

    def attention(
        self,
        hidden_BTD: Tensor,
        position_ids_BT: Tensor,
        key_positions_BK: Tensor | None = None,
        documents_BT: Tensor | None = None,
        dense: bool = True,
    ) -> Attention:
        """Causal attention for queries at `position_ids_BT` over keys at `key_positions_BK` (None: the queries are the keys).

        `dense` says that a full layer needs no mask beyond plain causality of a pass in order: the queries are the keys, or
        a single query reads every key. It is what keeps the fused kernels. `documents_BT` numbers packed documents, whose
        positions restart; they are for full passes only.
        """
        implementation, rows = self.config._attn_implementation, len(hidden_BTD)
        queries = position_ids_BT.shape[1]
        queries_BT = position_ids_BT.expand(rows, -1)
        keys_BK = queries_BT if key_positions_BK is None else key_positions_BK.expand(rows, -1)
        reach = keys_BK.shape[1]

        def mask(allowed: Predicate) -> Any:
            def pattern(b: Tensor, q: Tensor, k: Tensor) -> Tensor:
                if documents_BT is None:
                    return allowed(queries_BT[b, q], keys_BK[b, k])
                return same_document(allowed, documents_BT[b, q], documents_BT[b, k])(q, k)

            return self._mask(pattern, hidden_BTD, reach)

        unmasked = dense and documents_BT is None and (implementation == "sdpa" or queries == 1)
        masks: dict[str, Any] = {}
        for kind in set(self.layer_types):
            if kind == "sliding_attention" and self._window and reach > self._window:
                masks[kind] = mask(sliding_window(self._window))
            else:
                masks[kind] = None if unmasked else mask(causal)
        return Attention(position_ids_BT, self.decoder.rotary_emb(hidden_BTD, position_ids=position_ids_BT), masks)

    def _mask(self, pattern: Pattern, hidden_BTD: Tensor, reach: int) -> Any:
        shape = (*hidden_BTD.shape[:2], reach)
        return mask_of(pattern, shape, self.config._attn_implementation, hidden_BTD.dtype, hidden_BTD.device)

    def patterned(
        self,
        hidden_BTD: Tensor,
        position_ids_BT: Tensor,
        pattern: Pattern | None,
        key_positions_BK: Tensor | None = None,
    ) -> Attention:
        """Attention by `pattern` instead of causality, for queries at `position_ids_BT` over keys at `key_positions_BK` (None:
        the queries are the keys). Layers with a sliding window also keep to it, on both sides. Without a pattern every query
        reads every key, which needs no mask.
        """
        position_ids_BT = position_ids_BT.expand(hidden_BTD.shape[:2])
        keys_BK = position_ids_BT if key_positions_BK is None else key_positions_BK.expand(len(hidden_BTD), -1)
        masks: dict[str, Any] = {}
        for kind in set(self.layer_types):
            chosen = pattern
            if kind == "sliding_attention" and self._window and keys_BK.shape[1] > self._window:
                near = two_sided_window(self._window)

                def chosen(b: Tensor, q: Tensor, k: Tensor, near: Predicate = near) -> Tensor:
                    inside = near(position_ids_BT[b, q], keys_BK[b, k])
                    return inside if pattern is None else pattern(b, q, k) & inside

            masks[kind] = None if chosen is None else self._mask(chosen, hidden_BTD, keys_BK.shape[1])
        rotary = self.decoder.rotary_emb(hidden_BTD, position_ids=position_ids_BT)
        return Attention(position_ids_BT, rotary, masks, reads_all=pattern is None)

    def run(
        self, hidden_BTD: Tensor, start: int, stop: int, attention: Attention, cache: KVCache | None = None
    ) -> Tensor:
        """Layers [start, stop) on `hidden_BTD`, writing to `cache` (planned beforehand) when there is one."""
        unmasked = {"is_causal": False} if attention.reads_all else {}
        for i in range(start, stop):
            hidden_BTD = self.layers[i](
                hidden_BTD,
                attention_mask=attention.masks[self.layer_types[i]],
                position_embeddings=attention.position_embeddings,
                position_ids=attention.position_ids_BT,
                cache=cache,
                use_cache=cache is not None,
                **unmasked,
            )
        return hidden_BTD

    def read(
        self,
        input_ids_BT: Tensor,
        position_ids_BT: Tensor,
        pattern: Pattern | None,
        key_positions_BK: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """Hidden states (B, T, D) after all layers under `pattern` (see `patterned`), before the final normalisation."""
        hidden_BTD = self.embed(input_ids_BT)
        attention = self.patterned(hidden_BTD, position_ids_BT, pattern, key_positions_BK)
        return self.run(hidden_BTD, 0, self.num_layers, attention, cache)

    def norm(self, hidden_BTD: Tensor) -> Tensor:
        """The final normalisation."""
        return self.decoder.norm(hidden_BTD)

    def head(self, normed_BTD: Tensor) -> Tensor:
        """Logits (B, T, V) of normalised hidden states."""
        return self._scaled(self.base.lm_head(normed_BTD))

    def _scaled(self, logits_BTV: Tensor) -> Tensor:
        scaling = getattr(self.config, "logits_scaling", None)
        return logits_BTV if scaling is None else logits_BTV / scaling

    def with_head(self, compute: Callable[..., Any], normed_ND: Tensor, *inputs: Any) -> Any:
        """`compute(normed_ND, *inputs, head)`, run as one forward of the head's module, in which `head` may be called any number
        of times. Sharding (FSDP2) gathers and reduces a module's weights around each of its forwards, so the number of forwards
        must not depend on how many tokens a process has."""
        module = self.base.lm_head
        kept = module.__dict__.get("forward")
        bare = module.forward

        def restore() -> None:
            module.__dict__.pop("forward", None)
            if kept is not None:
                module.forward = kept

        def forward(*given: Any) -> Any:
            restore()
            return compute(*given, lambda rows_nD: self._scaled(bare(rows_nD)))

        module.forward = forward
        try:
            return module(normed_ND, *inputs)
        finally:
            restore()

    def parameter_counts(self) -> tuple[int, int]:
        """(parameters of one layer on average, parameters read by the head)."""
        layers = sum(p.numel() for layer in self.layers for p in layer.parameters())
        return layers // max(self.num_layers, 1), sum(p.numel() for p in self.base.lm_head.parameters())


SUPPORTED = "known to work: llama, qwen2, qwen3, mistral, smollm3, olmo2, phi3, granite"


@torch.no_grad()
def slice_error(base: PreTrainedModel, num_tokens: int = 24) -> float:
    """Largest |difference| between the sliced run's logits and the model's own forward, over a fixed random prompt,
    divided by the largest |logit|. About 1e-6 for float32 models whose family the slices reproduce.
    """
    stack = DecoderStack(base)
    device = base.device
    generator = torch.Generator().manual_seed(0)
    ids_BT = torch.randint(0, base.config.vocab_size, (1, num_tokens), generator=generator).to(device)
    was_training = base.training
    base.eval()
    try:
        expected_BTV = base(ids_BT, use_cache=False).logits.float()
        hidden_BTD = stack.embed(ids_BT)
        attention = stack.attention(hidden_BTD, torch.arange(num_tokens, device=device)[None])
        for i in range(stack.num_layers):
            hidden_BTD = stack.run(hidden_BTD, i, i + 1, attention)
        actual_BTV = stack.head(stack.norm(hidden_BTD)).float()
    finally:
        base.train(was_training)
    return float((actual_BTV - expected_BTV).abs().max() / expected_BTV.abs().max().clamp_min(1e-9))
