"""Tiny random models and batches for tests.

The weights are large (initializer_range 0.3, noisy norms and biases), so that a wrong mask, phase or position shows as
a difference of about 1, and the norms keep float64, which transformers' own do not (they round to float32 inside), so
that two ways to the same logits can be compared at 1e-9.
"""

import types
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from polydecode.methods import get_method
from polydecode.methods.base import ParallelDecoder
from polydecode.methods.batch import Batch

VOCAB = 61
LAYERS = 5
FAMILIES = {"llama": LlamaConfig, "mistral": MistralConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
SETTINGS = {
    "dmtd": {"num_decoding_layers": 2, "cycle_length": 3},
    "block_diffusion": {"block_size": 4, "mask_token_id": 60, "fill_last_block": False},
}
"""Settings that fit a method to the tiny base model; methods that need none are not listed."""


def tiny_config(family: str = "llama", layers: int = LAYERS, **overrides):
    """Config of a tiny model of `family`; `overrides` are transformers' own names."""
    shape = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "initializer_range": 0.3,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": None,
        "tie_word_embeddings": False,
    }
    if family == "qwen2":
        del shape["head_dim"]
    if family == "mistral":
        shape["sliding_window"] = None
    return FAMILIES[family](**(shape | overrides))


def tiny_base(
    family: str = "llama",
    layers: int = LAYERS,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    attention: str = "sdpa",
    **overrides,
) -> PreTrainedModel:
    """A tiny random AR model in eval mode."""
    torch.manual_seed(seed)
    config = tiny_config(family, layers, **overrides)
    base = AutoModelForCausalLM.from_config(config, attn_implementation=attention).to(dtype).eval()
    with torch.no_grad():
        for parameter in base.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
    if dtype == torch.float64:
        for module in base.modules():
            if type(module).__name__.endswith("RMSNorm"):
                module.forward = types.MethodType(_exact_norm, module)
    return base


def _exact_norm(self, x: Tensor) -> Tensor:
    return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))


def tiny_model(method: str, base: PreTrainedModel | None = None, **settings) -> ParallelDecoder:
    """A model of `method` around `base` (default: a new tiny llama), in eval mode."""
    base = tiny_base() if base is None else base
    return get_method(method)[1].from_base(base, **(SETTINGS.get(method, {}) | settings)).eval()


def random_rows(lengths: Sequence[int], seed: int = 0, low: int = 0, high: int = VOCAB) -> list[list[int]]:
    """Random token ids, one list per length."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(low, high, (n,), generator=generator).tolist() for n in lengths]


def padded(rows: Sequence[Sequence[int]], side: str = "left", pad: int = 2) -> tuple[Tensor, Tensor]:
    """(input_ids, attention_mask) of `rows`, padded on `side` with token `pad`."""
    width = max(map(len, rows))
    ids, mask = [], []
    for row in rows:
        fill = width - len(row)
        ids.append([pad] * fill + list(row) if side == "left" else list(row) + [pad] * fill)
        mask.append([0] * fill + [1] * len(row) if side == "left" else [1] * len(row) + [0] * fill)
    return torch.tensor(ids), torch.tensor(mask)


def batch_of(prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], pad: int = 2) -> Batch:
    """Right-padded prompt/answer rows with the loss on the answers."""
    rows = [[*p, *a] for p, a in zip(prompts, answers, strict=True)]
    input_ids, attention_mask = padded(rows, "right", pad)
    index = torch.arange(input_ids.shape[1])
    is_prompt = index < torch.tensor([len(p) for p in prompts])[:, None]
    return Batch(input_ids, attention_mask, is_prompt, attention_mask.bool() & ~is_prompt)


def packed_batch(prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> Batch:
    """All prompt/answer documents in one row, with document ids; the loss mask of each as `batch_of` would have it."""
    ids, is_prompt, document = [], [], []
    for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        ids += [*prompt, *answer]
        is_prompt += [True] * len(prompt) + [False] * len(answer)
        document += [number] * (len(prompt) + len(answer))
    is_prompt = torch.tensor([is_prompt])
    return Batch(torch.tensor([ids]), torch.ones(1, len(ids)), is_prompt, ~is_prompt, torch.tensor([document]))


class Forced:
    """A `choose` that says prescribed tokens and keeps the logits it was shown: `logits` is a list of (B, V)."""

    def __init__(self, tokens_BN: Tensor):
        self.tokens_BN, self.logits = tokens_BN, []

    def __call__(self, logits_BV: Tensor) -> Tensor:
        self.logits.append(logits_BV.detach().clone())
        return self.tokens_BN[:, len(self.logits) - 1]


def greedy(logits_NV: Tensor, rows: list[int] | None = None) -> Tensor:
    """The most likely token."""
    return logits_NV.argmax(-1)


@torch.no_grad()
def forced_logits(model: ParallelDecoder, prompt, mask, tokens_BN: Tensor, **options) -> Tensor:
    """Logits (B, N, V) that decoding shows before each of the prescribed tokens."""
    choose = Forced(tokens_BN)
    state = model.prefill(prompt, mask, **options)
    for _ in range(tokens_BN.shape[1]):
        model.step(state, choose)
    return torch.stack(choose.logits, 1)


@torch.no_grad()
def decode(model: ParallelDecoder, prompt, mask=None, steps: int = 8, choose: Callable = greedy, **options) -> Tensor:
    """Tokens (B, N) of `steps` steps of a method that commits one token per step."""
    state = model.prefill(prompt, mask, **options)
    return torch.cat([model.step(state, choose).tokens for _ in range(steps)], 1)


def hf_greedy(base: PreTrainedModel, prompt: Tensor, steps: int) -> Tensor:
    """Prompt and `steps` greedy tokens by transformers' own generate; the mask is given, so no padding is guessed."""
    everything = torch.ones_like(prompt)
    return base.generate(
        prompt, attention_mask=everything, max_new_tokens=steps, do_sample=False, eos_token_id=None, pad_token_id=0
    )
