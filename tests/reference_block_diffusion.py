"""Block diffusion once more, plain and slow, from the paper's words: what the real one must equal.

Masks by double loops, decoding without a cache: every forward reads the whole text anew through the source model's own
forward with an explicit mask. Nothing of the method's code is used.
"""

import math

import torch


def training_mask(num_tokens: int, block_size: int) -> torch.Tensor:
    """Bool (2L, 2L) of section 1.2 over [noisy ; clean]: M_BD or M_OBC or M_BC."""
    n = num_tokens
    mask = torch.zeros(2 * n, 2 * n, dtype=torch.bool)
    for q in range(2 * n):
        for k in range(2 * n):
            block_q, block_k = (q % n) // block_size, (k % n) // block_size
            clean_q, clean_k = q >= n, k >= n
            same_half = block_q == block_k and clean_q == clean_k
            noisy_to_earlier_clean = not clean_q and clean_k and block_q > block_k
            clean_to_clean = clean_q and clean_k and block_q >= block_k
            mask[q, k] = same_half or noisy_to_earlier_clean or clean_to_clean
    return mask


def text_mask(prompt: int, length: int, block_size: int, attention: str, prompt_attention: str) -> torch.Tensor:
    """Bool (T, T): a prompt, finished blocks and an open one, as they stand in decoding."""
    mask = torch.zeros(length, length, dtype=torch.bool)
    for q in range(length):
        for k in range(length):
            if attention == "bidirectional":
                mask[q, k] = True
            elif q < prompt:
                mask[q, k] = k < prompt and (prompt_attention == "bidirectional" or k <= q)
            else:
                mask[q, k] = k < prompt or (k - prompt) // block_size <= (q - prompt) // block_size
    return mask


def hf_logits(base, ids: list[int], mask: torch.Tensor) -> torch.Tensor:
    """Logits (T, V) of transformers' own forward under an additive 4-D mask."""
    additive = torch.zeros(1, 1, *mask.shape, dtype=base.dtype).masked_fill(~mask, torch.finfo(base.dtype).min)
    positions = torch.arange(len(ids))[None]
    return base(torch.tensor([ids]), attention_mask=additive, position_ids=positions, use_cache=False).logits[0]


def score_of(logits: torch.Tensor, token: int, selector: str) -> float:
    """How sure one position is."""
    p = logits.softmax(-1)
    if selector == "confidence":
        return float(p[token])
    if selector == "margin":
        others = torch.cat([p[:token], p[token + 1 :]])
        return float(p[token] - others.max())
    return 1 + float(sum(float(x) * math.log(float(x)) for x in p if x > 0)) / math.log(len(p))


@torch.no_grad()
def decode(base, prompt: list[int], new_tokens: int, mask_id: int, block_size: int, **options):
    """(tokens, forwards): greedy decoding of one row. `options`: threshold, steps, selector, token_shift, attention,
    prompt_attention, and `shown`, a list that receives the logits of the masked positions of every forward."""
    threshold, steps = options.get("threshold"), options.get("steps")
    selector, shift = options.get("selector", "confidence"), options.get("token_shift", False)
    attention = options.get("attention", "clean_context")
    text, forwards = list(prompt), 0
    while len(text) < len(prompt) + new_tokens:
        block: list[int | None] = [None] * block_size
        used = 0
        while None in block:
            ids = text + [mask_id if t is None else t for t in block]
            mask = text_mask(len(prompt), len(ids), block_size, attention, options.get("prompt_attention", "causal"))
            logits = hf_logits(base, ids, mask)
            if shift:
                if attention != "bidirectional":  # the token before the block is read clean, without the open block
                    clean = hf_logits(base, text, mask[: len(text), : len(text)])
                    logits[len(text) - 1] = clean[-1]
                logits = torch.cat([logits[:1], logits[:-1]])
            logits[:, mask_id] = -torch.inf
            forwards += 1
            masked = [i for i, t in enumerate(block) if t is None]
            here = {i: logits[len(text) + i] for i in masked}
            if "shown" in options:
                options["shown"].append(torch.stack([here[i] for i in masked]))
            token = {i: int(here[i].argmax()) for i in masked}
            sure = {i: score_of(here[i], token[i], selector) for i in masked}
            order = sorted(masked, key=lambda i: -sure[i])
            if steps is not None:
                count = math.ceil(len(masked) / max(steps - used, 1))
            elif threshold is None or threshold > 1:
                count = 1
            else:
                count = max(1, sum(s >= threshold for s in sure.values()))
            for i in order[:count]:
                block[i] = token[i]
            used += 1
        text += [t for t in block if t is not None]
    return text[len(prompt) : len(prompt) + new_tokens], forwards
