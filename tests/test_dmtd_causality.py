"""Who can influence whom, found by gradients and by changing tokens rather than by reading the code."""

import itertools

import pytest
import torch

from tiny import random_rows, tiny_base, tiny_model

PROMPT, TOTAL, CYCLE = 4, 14, 3
THINKING_ENDS = 3
"""The tiny model has 5 layers, of which the last 2 decode."""
KINDS = list(itertools.product((0, 2), ("replace", "add"), ("full", "cyclic")))


@pytest.fixture(scope="module")
def base():
    return tiny_base()


@pytest.fixture(scope="module")
def ids():
    return torch.tensor(random_rows([TOTAL], seed=7))


def is_head(position: int, gate: str) -> bool:
    """Whether the thinking of a position is handed on, counted by hand: prompt 0-3, heads 6, 9, 12; cyclic 0, 3, 6, ..."""
    return position % 3 == 0 if gate == "cyclic" else position < PROMPT or position in (6, 9, 12)


def traced(model, ids, silent_attention=False, cut_thinking=True):
    """(logits (T, V), embeddings (1, T, D), thinking output (1, T, D)), the last two as places to take gradients at.

    With `cut_thinking` the gradient ends at the thinking output, so that only its direct uses are seen.
    """
    layers, kept = model.base.model.layers, {}

    def keep(name):
        def hook(_module, _args, output):
            cut = name == "embed" or cut_thinking
            kept[name] = output.detach().requires_grad_() if cut else output
            return kept[name]

        return hook

    hooks = [
        layers[THINKING_ENDS - 1].register_forward_hook(keep("think")),
        model.base.model.embed_tokens.register_forward_hook(keep("embed")),
    ]
    if silent_attention:
        hooks += [
            layer.self_attn.register_forward_hook(lambda _m, _a, output: (output[0] * 0, *output[1:]))
            for layer in layers[THINKING_ENDS:]
        ]
    logits_TV = model.logits(ids, prompt_lengths=[PROMPT], cycle_length=CYCLE)[0]
    for hook in hooks:
        hook.remove()
    return logits_TV, kept["embed"], kept["think"]


def influence(logits_TV, source_1TD):
    """(T, T) bool: does the logit at row i depend on the source at column j."""
    rows = []
    weights = torch.randn(logits_TV.shape, generator=torch.Generator().manual_seed(0), dtype=logits_TV.dtype)
    for i in range(TOTAL):
        grad = torch.autograd.grad((logits_TV[i] * weights[i]).sum(), source_1TD, retain_graph=True, allow_unused=True)[
            0
        ]
        rows.append(torch.zeros(TOTAL) if grad is None else grad[0].abs().sum(-1))
    return torch.stack(rows) > 1e-9


def test_a_future_token_never_changes_an_earlier_logit(base, ids):
    """Bug: a mask that lets thinking or decoding layers look ahead; training would look perfect and decoding would fail."""
    for encoding, merge, gate in KINDS:
        model = tiny_model("dmtd", base, num_encoding_layers=encoding, merge=merge, prompt_gate=gate)
        with torch.no_grad():
            before = model.logits(ids, prompt_lengths=[PROMPT], cycle_length=CYCLE)[0]
            for j in (1, 3, 4, 6, 7, 13):
                changed = ids.clone()
                changed[0, j] = (changed[0, j] + 1) % 61
                difference = (model.logits(changed, prompt_lengths=[PROMPT], cycle_length=CYCLE)[0] - before).abs()
                assert difference[:j].max() == 0
                assert difference[j].max() > 1e-6
                assert difference[j + 1 :].numel() == 0 or difference[j + 1 :].max() > 1e-6


def test_only_heads_hand_on_their_thinking(base, ids):
    """Bug: a non-head entering the decoding layers with its own thinking output, which decoding has not computed yet."""
    for encoding, merge, gate in KINDS:
        model = tiny_model("dmtd", base, num_encoding_layers=encoding, merge=merge, prompt_gate=gate)
        logits_TV, _, think = traced(model, ids)
        depends = influence(logits_TV, think)
        for i, j in itertools.product(range(TOTAL), range(TOTAL)):
            assert depends[i, j] == (j <= i and is_head(j, gate)), (i, j, merge, gate)


def test_heads_reach_non_heads_only_through_attention(base, ids):
    """Bug: a head's vector handed to the next tokens directly (as if D = 0 could work); silent decoding attention shows it."""
    for encoding, merge, gate in KINDS:
        model = tiny_model("dmtd", base, num_encoding_layers=encoding, merge=merge, prompt_gate=gate)
        logits_TV, _, think = traced(model, ids, silent_attention=True)
        depends = influence(logits_TV, think)
        for i, j in itertools.product(range(TOTAL), range(TOTAL)):
            assert depends[i, j] == (i == j and is_head(j, gate)), (i, j, merge, gate)


def test_a_token_reads_itself_and_all_before(base, ids):
    """Bug: a token whose own embedding is lost at a head, or a skipped token that later tokens cannot see."""
    for encoding, merge, gate in KINDS:
        model = tiny_model("dmtd", base, num_encoding_layers=encoding, merge=merge, prompt_gate=gate)
        logits_TV, embedded, _ = traced(model, ids, cut_thinking=False)
        assert torch.equal(influence(logits_TV, embedded), torch.ones(TOTAL, TOTAL).tril().bool())
