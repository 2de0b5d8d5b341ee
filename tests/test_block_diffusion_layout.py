"""The training row [noisy ; clean]: its mask is the paper's, for packed documents, padding, filling and FlexAttention too."""

import warnings

import pytest
import torch

from polydecode.methods.batch import Batch
from polydecode.methods.block_diffusion import layout
from polydecode.methods.block_diffusion.layout import (
    CONTEXT,
    attention_pattern,
    context_half,
    copies,
    noisy_half,
    predictors,
    read_batch,
)
from polydecode.ops.masks import mask_of
from polydecode.ops.sampling import RowGenerators
from reference_block_diffusion import row_mask, training_mask
from tiny import batch_of, packed_batch, random_rows, tiny_base, tiny_model

MASK = 60
CPU = torch.device("cpu")
PROMPTS, ANSWERS = random_rows([3, 1, 5], seed=31, high=MASK), random_rows([7, 4, 10], seed=32, high=MASK)
DOCUMENTS = [(len(p), len(a)) for p, a in zip(PROMPTS, ANSWERS, strict=True)]
TURNS = ([3, 4, 5, 6, 2, 7, 8, 9, 10], [1, 1, 0, 0, 0, 1, 1, 0, 0])  # two turns; the first answer ends with 2
ATTENTIONS = ("clean_context", "noisy_context", "bidirectional")


def text_batch(rows):
    batch = batch_of([[] for _ in rows], rows)
    return Batch(batch.input_ids, batch.attention_mask, torch.zeros_like(batch.loss_mask), batch.attention_mask.bool())


def long_text(length):
    return text_batch([[1 + i % 50 for i in range(length)]])


def turns_batch():
    ids, is_prompt = torch.tensor([TURNS[0]]), torch.tensor([TURNS[1]]).bool()
    return Batch(ids, torch.ones_like(ids), is_prompt, ~is_prompt)


def halves(batch, size, attention="clean_context", ends=()):
    sizes = torch.full((batch.num_documents(),), size)
    clean = read_batch(batch, sizes)
    return noisy_half(clean, sizes, set(ends)), context_half(clean, attention)


def dense(places, attention="clean_context", prompt_attention="causal"):
    rows, width = places.token.shape
    pattern = attention_pattern(places, attention, prompt_attention)
    return mask_of(pattern, (rows, width, width), "sdpa", torch.float32, CPU)[:, 0]


# --- the mask --------------------------------------------------------------------------------------------------------


def test_the_drawing_in_the_docstring_is_the_mask():
    """Bug: a drawing that nobody checks."""
    lines = [line.split() for line in layout.__doc__.splitlines() if set(line) <= set(" 01") and line.strip()]
    noisy, context = halves(text_batch([[5, 6, 7, 8]]), 2)
    assert dense(noisy.joined(context))[0].int().tolist() == [[int(x) for x in line] for line in lines]


@pytest.mark.parametrize(("length", "size"), [(12, 4), (16, 16), (6, 1), (11, 4), (7, 16), (1, 1), (129, 32)])
def test_the_mask_is_the_papers(length, size):
    """Bug: a term of M_BD | M_OBC | M_BC wrong, or a length that must divide by the block."""
    noisy, context = halves(long_text(length), size)
    ours = dense(noisy.joined(context))[0]
    assert torch.equal(ours, training_mask(length, size))
    if length % size == 0:
        keys = ours.sum(1)
        for half in (keys[:length], keys[length:]):
            assert half.tolist() == [size * (i // size + 1) for i in range(length)]
        assert int(ours.sum()) == length * size * (length // size + 1)


def test_block_size_one_is_autoregressive():
    """Bug: with blocks of one token a mask must read the clean tokens before it and itself, never the one it stands for."""
    noisy, context = halves(long_text(9), 1)
    reads = dense(noisy.joined(context))[0][:9]
    assert torch.equal(reads[:, :9], torch.eye(9, dtype=torch.bool))
    assert torch.equal(reads[:, 9:], torch.ones(9, 9, dtype=torch.bool).tril(-1))


@pytest.mark.parametrize("prompt_attention", ["causal", "bidirectional"])
@pytest.mark.parametrize("size", [1, 3, 4, 16])
def test_prompts_packing_and_padding(size, prompt_attention):
    """Bugs (known fault 18): packed documents read one another, blocks that do not restart with an answer, padding read."""
    for batch, rows in (
        (packed_batch(PROMPTS, ANSWERS), [DOCUMENTS]),
        (batch_of(PROMPTS, ANSWERS), [[d] for d in DOCUMENTS]),
        (packed_batch([[], PROMPTS[0], []], ANSWERS), [[(0, 7), (3, 4), (0, 10)]]),
    ):
        noisy, context = halves(batch, size)
        ours = dense(noisy.joined(context), prompt_attention=prompt_attention)
        widths = noisy.token.shape[1], context.token.shape[1]
        for mask, documents in zip(ours, rows, strict=True):
            assert torch.equal(mask, row_mask(documents, size, *widths, prompt_attention))


def test_the_three_patterns_of_figure_2():
    """Bug: an ablation that runs with another pattern than its name says."""
    for attention, pair in (
        ("noisy_context", lambda q, k: k // 4 <= q // 4),
        ("bidirectional", lambda q, k: True),
    ):
        noisy, context = halves(long_text(11), 4, attention)
        ours = dense(noisy.joined(context), attention)[0]
        assert ours.tolist() == [[pair(q, k) for k in range(11)] for q in range(11)], attention


def test_a_later_turn_reads_the_earlier_ones():
    """Bug: an answer that cannot read the turns before it, or blocks numbered on from the turn before."""
    noisy, context = halves(turns_batch(), 4)
    mask, width = dense(noisy.joined(context))[0], noisy.token.shape[1]
    assert noisy.token[0].tolist() == [5, 6, 2, 9, 10]
    assert noisy.place[0].tolist() == [0, 1, 2, 0, 1]
    assert mask[3].nonzero()[:, 0].tolist() == [3, 4] + [width + i for i in range(7)]
    assert mask[0].nonzero()[:, 0].tolist() == [0, 1, 2, width, width + 1]
    assert mask[width + 5].nonzero()[:, 0].tolist() == [width + i for i in range(6)], "the second prompt is causal"


def test_the_predictor_is_the_token_before():
    """Bug (known fault 43): with a token shift the first of a block predicted by a noisy token or by another document."""
    for batch in (packed_batch(PROMPTS, ANSWERS), batch_of(PROMPTS, ANSWERS), text_batch(ANSWERS), turns_batch()):
        for attention in ATTENTIONS:
            one, context = halves(batch, 3, attention, ends=[2])
            noisy = copies(one, 2) if attention == "clean_context" else one
            places, index = noisy.joined(context), predictors(noisy, context)
            for b, n in noisy.is_real.nonzero().tolist():
                at = int(index[b, n])
                if noisy.position[b, n] == 0:
                    assert at == -1
                    continue
                assert places.is_real[b, at]
                assert places.position[b, at] == noisy.position[b, n] - 1
                assert places.document[b, at] == noisy.document[b, n]
                inside = noisy.place[b, n] > 0
                if inside:
                    assert (places.block[b, at], places.copy[b, at]) == (noisy.block[b, n], noisy.copy[b, n])
                elif attention == "clean_context":
                    assert places.copy[b, at] == CONTEXT


# --- filling ---------------------------------------------------------------------------------------------------------


def test_filling_goes_to_the_end_of_the_block():
    """Bugs (known fault 17): more than a block of end tokens, or an end taught where the text was cut."""
    ended, cut = [5, 6, 7, 8, 9, 2], [5, 6, 7, 8, 9, 10]
    noisy, context = halves(batch_of([[3, 4], [3, 4]], [ended, cut]), 4, ends=[2])
    assert noisy.is_real.sum(1).tolist() == [8, 6]
    assert noisy.token[0].tolist() == [5, 6, 7, 8, 9, 2, 2, 2]
    assert noisy.position[0].tolist() == list(range(2, 10))
    assert noisy.is_filling[0].tolist() == [False] * 6 + [True] * 2
    assert context.token.shape[1] == 8, "the clean half is the row as it is"
    whole, _ = halves(batch_of([[3, 4]], [[5, 6, 7, 2]]), 4, ends=[2])
    assert whole.token[0].tolist() == [5, 6, 7, 2], "a block that is full needs none"


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_filling_is_read_by_nothing_behind_its_block(attention):
    """Bug: the next turn reads the filling of the last one, which is not there in decoding."""
    noisy, context = halves(turns_batch(), 4, attention, ends=[2])
    places = noisy.joined(context)
    mask, filling = dense(places, attention)[0], places.is_filling[0].nonzero()[:, 0].tolist()
    assert len(filling) == 1
    block = int(places.block[0, filling[0]])
    readers = places.block[0][mask[:, filling[0]]]
    assert int(readers.max()) == block
    if attention == "clean_context":
        assert int(readers.min()) == block
    assert int((readers == block).sum()) == 4, "and by all of its block"


def test_filling_is_after_a_targeted_end_of_an_answer_only():
    """Bug: filling behind an end token in the middle of an answer, in a prompt, or one that carries no loss."""
    inside, _ = halves(batch_of([[2, 3]], [[2, 5, 2, 6, 7]]), 4, ends=[2])
    assert not inside.is_filling.any()
    unlossed = batch_of([[3]], [[5, 2]])
    unlossed.loss_mask[0, -1] = False
    assert not halves(unlossed, 4, ends=[2])[0].is_filling.any()


# --- causality -------------------------------------------------------------------------------------------------------


def test_gradients_respect_the_mask():
    """Bugs: clean tokens of the same or a later block leak the answer; noisy blocks or noise draws see one another."""
    base = tiny_base(layers=3)
    model = tiny_model("block_diffusion", base, noise_draws=2)
    batch = batch_of([PROMPTS[0]], [ANSWERS[2]])
    noisy, context, _, _ = model._noise(batch, RowGenerators([1]))
    places = noisy.joined(context)
    assert set(places.copy[0].tolist()) == {CONTEXT, 0, 1}
    embedded = model.stack.embed(places.token).detach().requires_grad_()
    pattern = attention_pattern(places, "clean_context", "causal")
    hidden = model.stack.run(embedded, 0, 3, model.stack.patterned(embedded, places.position, pattern))
    for q in range(noisy.token.shape[1]):
        (grad,) = torch.autograd.grad(hidden[0, q].sum(), embedded, retain_graph=True)
        read = grad[0].abs().sum(1) > 0
        for k in range(places.token.shape[1]):
            clean_before = places.copy[0, k] == CONTEXT and places.block[0, k] < places.block[0, q]
            same = places.copy[0, k] == places.copy[0, q] and places.block[0, k] == places.block[0, q]
            assert bool(read[k]) == bool(clean_before or same), (q, k)


@torch.no_grad()
def test_changed_tokens_change_nothing_they_must_not():
    """Bug: the same leaks by value: a clean token of this block or a later one, and another noisy block."""
    model = tiny_model("block_diffusion", tiny_base(layers=3))
    noisy, context = halves(packed_batch(PROMPTS, ANSWERS), 4)
    places, width = noisy.joined(context), noisy.token.shape[1]
    before = model._hidden(places.token, places)[0, :width]
    for k in range(places.token.shape[1]):
        changed = places.token.clone()
        changed[0, k] = (changed[0, k] + 1) % MASK
        moved = (model._hidden(changed, places)[0, :width] - before).abs().amax(-1) > 0
        allowed = noisy.document[0] == places.document[0, k]
        if k < width:
            allowed &= noisy.block[0] == places.block[0, k]
        else:
            allowed &= noisy.block[0] > places.block[0, k]
        assert not (moved & ~allowed).any(), k
        assert torch.equal(moved, allowed), "and it does change what may read it"


# --- FlexAttention ---------------------------------------------------------------------------------------------------


def flex_mask(places):
    pattern, width = attention_pattern(places, "clean_context", "causal"), places.token.shape[1]
    return mask_of(pattern, (len(places.token), width, width), "flex_attention", torch.float32, CPU)


@pytest.mark.parametrize("length", [127, 128, 129, 257])
def test_flex_attention_gets_the_same_mask(length):
    """Bug: a second implementation of the rule for the GPU, or a skipped block of 128 that holds an allowed pair."""
    from torch.nn.attention.flex_attention import create_mask

    noisy, context = halves(long_text(length), 16)
    places = noisy.joined(context)
    block_mask = flex_mask(places)
    flat = create_mask(block_mask.mask_mod, 1, 1, 2 * length, 2 * length, device="cpu")[0, 0]
    assert torch.equal(flat, dense(places)[0])
    whole = block_mask.to_dense()[0, 0].bool()
    skipped = ~whole.repeat_interleave(128, 0).repeat_interleave(128, 1)[: 2 * length, : 2 * length]
    assert not flat[skipped].any()


@pytest.mark.parametrize("length", [64, 65])
def test_flex_attention_gives_the_same_numbers(length):
    """Bug: rows of the batch mixed up inside the BlockMask, or a query left without a key; 2 x 64 tokens are one block."""
    from torch.nn.attention.flex_attention import flex_attention

    noisy, context = halves(text_batch([[3] * length, [4] * (length - 20)]), 16)
    places = noisy.joined(context)
    q, k, v = torch.randn(3, 2, 2, places.token.shape[1], 16).unbind(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that it is not compiled
        ours = flex_attention(q, k, v, block_mask=flex_mask(places))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=dense(places)[:, None])
    assert (ours - expected).abs().max() < 1e-5, "float32"
