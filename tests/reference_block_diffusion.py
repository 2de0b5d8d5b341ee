"""Block diffusion once more, plain and slow, from the paper's words: what the real one must equal.

Masks by double loops, decoding without a cache: every forward reads the whole text anew through the source model's own
forward with an explicit mask. Nothing of the method's code is used.
"""

import math
from functools import cache

import torch
from transformers import DynamicCache


@cache
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


def row_mask(
    documents: list[tuple[int, int]], block_size: int, noisy_width: int, clean_width: int, prompt_attention: str
) -> torch.Tensor:
    """The same for a row of packed documents, each (prompt tokens, answer tokens), whose halves are padded to the widths.

    A prompt has no noisy copy, is read by all of its document behind it, and reads itself; padding reads itself alone.
    """
    noisy, clean = [], []  # (document, position, number of the block; -1 for the prompt), None for padding
    for document, (prompt, answer) in enumerate(documents):
        tokens = [(document, i, -1 if i < prompt else (i - prompt) // block_size) for i in range(prompt + answer)]
        clean += tokens
        noisy += tokens[prompt:]
    noisy += [None] * (noisy_width - len(noisy))
    clean += [None] * (clean_width - len(clean))
    places = [("noisy", t) for t in noisy] + [("clean", t) for t in clean]
    mask = torch.eye(len(places), dtype=torch.bool)
    for q, (half_q, token_q) in enumerate(places):
        for k, (half_k, token_k) in enumerate(places):
            if token_q is None or token_k is None or token_q[0] != token_k[0]:
                continue
            (_, position_q, block_q), (_, position_k, block_k) = token_q, token_k
            if half_k == "noisy":
                mask[q, k] = half_q == "noisy" and block_q == block_k
            elif half_q == "noisy":
                mask[q, k] = block_k < block_q
            elif block_q == block_k == -1:
                mask[q, k] = prompt_attention == "bidirectional" or position_k <= position_q
            else:
                mask[q, k] = block_k <= block_q
    return mask


@cache
def text_mask(
    prompt: int, length: int, block_size: int, attention: str, prompt_attention: str, window: int | None = None
) -> torch.Tensor:
    """Bool (T, T): a prompt, finished blocks and an open one, as they stand in decoding; `window`: nothing farther away."""
    mask = torch.zeros(length, length, dtype=torch.bool)
    for q in range(length):
        for k in range(length):
            if attention == "bidirectional":
                mask[q, k] = True
            elif q < prompt:
                mask[q, k] = k < prompt and (prompt_attention == "bidirectional" or k <= q)
            else:
                mask[q, k] = k < prompt or (k - prompt) // block_size <= (q - prompt) // block_size
            if window is not None and abs(q - k) >= window:
                mask[q, k] = False
    return mask


def hf_logits(base, ids: list[int], mask: torch.Tensor, cache: DynamicCache | None = None) -> torch.Tensor:
    """Logits (T, V) of transformers' own forward under an additive 4-D mask, which also fills `cache`."""
    additive = torch.zeros(1, 1, *mask.shape, dtype=base.dtype).masked_fill(~mask, torch.finfo(base.dtype).min)
    positions = torch.arange(len(ids))[None]
    kwargs = {"use_cache": False} if cache is None else {"use_cache": True, "past_key_values": cache}
    return base(torch.tensor([ids]), attention_mask=additive, position_ids=positions, **kwargs).logits[0]


def score_of(logits: torch.Tensor, token: int, selector: str) -> float:
    """How sure one position is."""
    p = logits.softmax(-1)
    if selector == "confidence":
        return float(p[token])
    if selector == "margin":
        others = torch.cat([p[:token], p[token + 1 :]])
        return float(p[token] - others.max())
    return 1 + float(sum(x * math.log(x) for x in p.tolist() if x > 0)) / math.log(len(p))


def block_logits(base, text: list[int], block: list[int | None], prompt: int, mask_id: int, size: int, **options):
    """Logits (len(block), V) for each place of an open block behind `text`; None in `block` is masked."""
    shift, attention = options.get("token_shift", False), options.get("attention", "clean_context")
    ids = text + [mask_id if t is None else t for t in block]
    kind = (attention, options.get("prompt_attention", "causal"), options.get("window"))
    mask = text_mask(prompt, len(ids), size, *kind)
    logits = hf_logits(base, ids, mask)
    if shift:
        if attention != "bidirectional":  # the token before the block is read clean, without the open block
            clean = hf_logits(base, text, mask[: len(text), : len(text)])
            logits[len(text) - 1] = clean[-1]
        logits = torch.cat([logits[:1], logits[:-1]])
    return logits[len(text) :]


@torch.no_grad()
def decode(base, prompt: list[int], new_tokens: int, mask_id: int, block_size: int, **options):
    """(tokens, forwards): greedy decoding of one row. `options`: threshold, steps, selector, token_shift, attention,
    prompt_attention, window, and `shown`, a list that receives the logits of the masked positions of every forward."""
    threshold, steps = options.get("threshold"), options.get("steps")
    selector = options.get("selector", "confidence")
    text, forwards = list(prompt), 0
    while len(text) < len(prompt) + new_tokens:
        block: list[int | None] = [None] * block_size
        used = 0
        while None in block:
            here = block_logits(base, text, block, len(prompt), mask_id, block_size, **options)
            here[:, mask_id] = -torch.inf
            forwards += 1
            masked = [i for i, t in enumerate(block) if t is None]
            if "shown" in options:
                options["shown"].append(here[masked])
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


@torch.no_grad()
def forced_log_likelihood(
    base, prompt: list[int], answer: list[int], mask_id: int, block_size: int, **options
) -> float:
    """Log-probability of decoding `answer` one token per forward, left to right in each block; the mask id may be a token
    like any other here, and the last block ends where the answer does."""
    total, text = 0.0, list(prompt)
    for start in range(0, len(answer), block_size):
        tokens = answer[start : start + block_size]
        for i, token in enumerate(tokens):
            block = [*tokens[:i], *[None] * (len(tokens) - i)]
            logits = block_logits(base, text, block, len(prompt), mask_id, block_size, **options)
            total += float(logits[i].log_softmax(-1)[token])
        text += tokens
    return total
