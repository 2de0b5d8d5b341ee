"""DMTD written down a second time, from the paper's words and nothing else: one token at a time, no cache, no batch.

It imports neither polydecode nor transformers' layers. From the weights of a llama-like model (llama, mistral, qwen2,
qwen3) it computes every layer as a causal pass over the whole sequence, decides by hand for each position what enters the
decoding layers, and returns the logits. Slow and plain on purpose.
"""

import math

import torch
from torch import Tensor


def gate_of(position: int, prompt_length: int, cycle_length: int, prompt_gate: str) -> str:
    """What position `position` (0-based) hands to the decoding layers: "prompt", "head" or "skip".

    Paper, with the prompt run through all layers: the last prompt token yields token 1 as a head would, the next
    cycle_length - 1 tokens are skipped, and so on. In the training code of 2025 ("cyclic") heads are the positions
    divisible by the cycle length, prompt included.
    """
    if prompt_gate == "cyclic":
        return "head" if position % cycle_length == 0 else "skip"
    if position < prompt_length:
        return "prompt"
    generated_since_last_prompt_token = position - (prompt_length - 1)
    return "head" if generated_since_last_prompt_token % cycle_length == 0 else "skip"


def reference_logits(
    base,
    ids: list[int],
    prompt_length: int,
    cycle_length: int,
    encoding: int,
    decoding: int,
    merge: str = "replace",
    prompt_gate: str = "full",
) -> Tensor:
    """Logits (len(ids), V) of the gated forward, by position."""
    weights, config = dict(base.state_dict()), base.config
    total = config.num_hidden_layers
    hidden = [weights["model.embed_tokens.weight"][token] for token in ids]
    for i in range(encoding):
        hidden = _layer(weights, config, i, hidden)
    encoded = hidden
    for i in range(encoding, total - decoding):
        hidden = _layer(weights, config, i, hidden)
    thought = hidden

    entering = []
    for position in range(len(ids)):
        gate = gate_of(position, prompt_length, cycle_length, prompt_gate)
        if gate == "prompt" or (gate == "head" and merge == "replace"):
            entering.append(thought[position])
        elif gate == "head":
            entering.append(encoded[position] + thought[position])
        else:
            entering.append(encoded[position])

    hidden = entering
    for i in range(total - decoding, total):
        hidden = _layer(weights, config, i, hidden)
    normed = [_norm(h, weights["model.norm.weight"], config.rms_norm_eps) for h in hidden]
    head = weights["model.embed_tokens.weight"] if config.tie_word_embeddings else weights["lm_head.weight"]
    return torch.stack([head @ h for h in normed])


def _layer(weights: dict, config, i: int, hidden: list[Tensor]) -> list[Tensor]:
    name = f"model.layers.{i}."
    eps = config.rms_norm_eps

    def linear(part: str, x: Tensor) -> Tensor:
        y = weights[f"{name}{part}.weight"] @ x
        bias = weights.get(f"{name}{part}.bias")
        return y if bias is None else y + bias

    def heads(part: str, x: Tensor, norm: str) -> Tensor:
        y = linear(part, x).view(-1, width)
        weight = weights.get(f"{name}self_attn.{norm}.weight")
        return y if weight is None else torch.stack([_norm(row, weight, eps) for row in y])

    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    window = _window(config, i)
    group = config.num_attention_heads // config.num_key_value_heads
    normed = [_norm(h, weights[name + "input_layernorm.weight"], eps) for h in hidden]
    keys = torch.stack([_rotate(heads("self_attn.k_proj", h, "k_norm"), t, config) for t, h in enumerate(normed)])
    values = torch.stack([heads("self_attn.v_proj", h, "none") for h in normed])
    out = []
    for t, h in enumerate(normed):
        queries = _rotate(heads("self_attn.q_proj", h, "q_norm"), t, config)
        first = 0 if window is None else max(0, t - window + 1)
        mixed = []
        for number, query in enumerate(queries):
            scores = keys[first : t + 1, number // group] @ query / math.sqrt(width)
            mixed.append(torch.softmax(scores, 0) @ values[first : t + 1, number // group])
        after = hidden[t] + linear("self_attn.o_proj", torch.cat(mixed))
        x = _norm(after, weights[name + "post_attention_layernorm.weight"], eps)
        gate = linear("mlp.gate_proj", x)
        out.append(after + linear("mlp.down_proj", gate * torch.sigmoid(gate) * linear("mlp.up_proj", x)))
    return out


def _window(config, i: int) -> int | None:
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None)
    return window if window and (types is None or types[i] == "sliding_attention") else None


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * x / torch.sqrt((x * x).mean() + eps)


def _rotate(x: Tensor, position: int, config) -> Tensor:
    """Rotary embedding of heads (H, K); the angles are float32, as transformers computes them."""
    half = x.shape[-1] // 2
    theta = config.rope_parameters["rope_theta"]
    inverse = 1.0 / (theta ** (torch.arange(0, 2 * half, 2, dtype=torch.int64).to(torch.float32) / (2 * half)))
    angle = torch.tensor(float(position)) * inverse
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    left, right = x[:, :half], x[:, half:]
    return torch.cat([left * cos - right * sin, right * cos + left * sin], 1)
