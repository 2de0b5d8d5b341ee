"""Training by blocks: the layout, the masks, the noise, the loss, and that the pass is the one decoding makes."""

import math

import pytest
import torch

from polydecode.methods.batch import Batch
from polydecode.methods.block_diffusion.corruption import corrupt
from polydecode.methods.block_diffusion.layout import CONTEXT, attention_pattern, context_half, noisy_half, read_batch
from polydecode.ops.masks import mask_of
from polydecode.ops.sampling import RowGenerators
from reference_block_diffusion import hf_logits, text_mask, training_mask
from tiny import batch_of, packed_batch, random_rows, tiny_base, tiny_model

MASK = 60
EXACT = 1e-9
PROMPTS, ANSWERS = random_rows([3, 1, 5], seed=31, high=MASK), random_rows([7, 4, 10], seed=32, high=MASK)


@pytest.fixture(scope="module")
def base():
    return tiny_base(layers=3)


def text_batch(rows):
    batch = batch_of([[] for _ in rows], rows)
    return Batch(batch.input_ids, batch.attention_mask, torch.zeros_like(batch.loss_mask), batch.attention_mask.bool())


def halves(batch, size, attention="clean_context", ends=()):
    sizes = torch.full((len(batch.input_ids),), size)
    clean = read_batch(batch, sizes)
    return noisy_half(clean, sizes, set(ends)), context_half(clean, attention)


def dense(places, attention="clean_context", prompt_attention="causal"):
    rows, width = places.token.shape
    pattern = attention_pattern(places, attention, prompt_attention)
    return mask_of(pattern, (rows, width, width), "sdpa", torch.float32, torch.device("cpu"))[:, 0]


# --- the mask --------------------------------------------------------------------------------------------------------


def test_the_drawing_in_the_docstring_is_the_mask():
    """Bug: a drawing that nobody checks."""
    from polydecode.methods.block_diffusion import layout

    lines = [line.split() for line in layout.__doc__.splitlines() if set(line) <= set(" 01") and line.strip()]
    noisy, context = halves(text_batch([[5, 6, 7, 8]]), 2)
    assert dense(noisy.joined(context))[0].int().tolist() == [[int(x) for x in line] for line in lines]


@pytest.mark.parametrize(("length", "size"), [(12, 4), (16, 16), (6, 1), (11, 4), (7, 16), (129, 32)])
def test_the_mask_is_the_papers(length, size):
    """Bug: a term of M_BD | M_OBC | M_BC wrong, or a length that must divide by the block."""
    noisy, context = halves(text_batch([[1 + i % 50 for i in range(length)]]), size)
    ours = dense(noisy.joined(context))[0]
    assert torch.equal(ours, training_mask(length, size))
    if length % size == 0:
        keys = ours.sum(1)
        for half in (keys[:length], keys[length:]):
            assert half.tolist() == [size * (i // size + 1) for i in range(length)]
        assert int(ours.sum()) == length * size * (length // size + 1)


def test_prompt_documents_and_padding_are_kept_apart():
    """Bug (known fault 18): packed documents read one another; blocks that do not restart with a document."""
    packed = packed_batch(PROMPTS, ANSWERS)
    noisy, context = halves(packed, 4)
    mask = dense(noisy.joined(context))[0]
    documents = torch.cat([noisy.document, context.document], 1)[0]
    assert not mask[documents[:, None] != documents[None, :]].any()
    for number, (prompt, answer) in enumerate(zip(PROMPTS, ANSWERS, strict=True)):
        alone, alone_context = halves(batch_of([prompt], [answer]), 4)
        here = documents == number
        assert torch.equal(mask[here][:, here], dense(alone.joined(alone_context))[0])
    prompt_rows = context.is_prompt[0] & (context.document[0] == 2)
    assert int(mask[noisy.token.shape[1] :][prompt_rows].sum()) == 5 * 6 // 2, "a prompt is causal"


@pytest.mark.parametrize("length", [127, 128, 129, 257])
def test_flex_attention_gets_the_same_mask(length):
    """Bug: a second implementation of the rule for the GPU."""
    from torch.nn.attention.flex_attention import create_mask

    noisy, context = halves(text_batch([[1 + i % 50 for i in range(length)]]), 16)
    places = noisy.joined(context)
    shape = (1, 2 * length, 2 * length)
    pattern = attention_pattern(places, "clean_context", "causal")
    block_mask = mask_of(pattern, shape, "flex_attention", torch.float32, torch.device("cpu"))
    flat = create_mask(block_mask.mask_mod, 1, 1, 2 * length, 2 * length, device="cpu")[0, 0]
    assert torch.equal(flat, dense(places)[0])
    whole = block_mask.to_dense()[0, 0].bool()  # by blocks of 128: what is skipped must be empty
    skipped = ~whole.repeat_interleave(128, 0).repeat_interleave(128, 1)[: 2 * length, : 2 * length]
    assert not flat[skipped].any()


def test_gradients_respect_the_mask(base):
    """Bugs: clean tokens of the same or a later block leak the answer; noisy blocks or noise draws see one another."""
    model = tiny_model("block_diffusion", base, noise_draws=2)
    batch = batch_of([PROMPTS[0]], [ANSWERS[2]])
    noisy, context, _, _ = model._noise(batch, RowGenerators([1]))
    places = noisy.joined(context)
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


# --- the pass is the one of decoding -----------------------------------------------------------------------------------


@pytest.mark.parametrize("token_shift", [False, True])
@pytest.mark.parametrize("prompt_attention", ["causal", "bidirectional"])
@pytest.mark.parametrize("size", [1, 3, 4, 16])
def test_training_pass_is_inference_pass(base, token_shift, prompt_attention, size):
    """Bug: training and decoding with different masks or positions: every noisy block equals the block run over the clean
    text before it, with padding and packed documents."""
    model = tiny_model(
        "block_diffusion", base, block_size=size, token_shift=token_shift, prompt_attention=prompt_attention
    )
    for batch in (batch_of(PROMPTS, ANSWERS), packed_batch(PROMPTS, ANSWERS)):
        noisy, context, is_masked, _ = model._noise(batch, RowGenerators(range(3)))
        wanted = is_masked
        with torch.no_grad():
            hidden = model._masked_hidden(noisy, context, is_masked, wanted, torch.device("cpu"))
            ours = model.stack.head(hidden)
        for n, (row, index) in enumerate(wanted.nonzero().tolist()):
            document = int(noisy.document[row, index])
            which = document if batch.document_ids is not None else row
            prompt, answer = PROMPTS[which], ANSWERS[which]
            position = int(noisy.position[row, index])
            start = len(prompt) + (position - len(prompt)) // size * size
            block = (noisy.block[row] == noisy.block[row, index]) & noisy.is_real[row]
            block &= noisy.document[row] == document
            tokens = noisy.token[row].masked_fill(is_masked[row], MASK)[block].tolist()
            text = (prompt + answer)[:start] + tokens
            mask = text_mask(len(prompt), len(text), size, "clean_context", prompt_attention)
            with torch.no_grad():
                if token_shift and position == start:
                    expected = hf_logits(base, text[:start], mask[:start, :start])[-1]
                else:
                    expected = hf_logits(base, text, mask)[position - token_shift]
            assert (ours[n] - expected).abs().max() < EXACT, (row, index)


# --- noise -----------------------------------------------------------------------------------------------------------


def marginals(size, half_life, draws=20000, low=1.0):
    counts, used = torch.zeros(size), 0
    generator = torch.Generator().manual_seed(0)
    blocks = torch.arange(200).repeat_interleave(size)
    for _ in range(draws // 200):
        masked, level = corrupt(blocks, torch.ones_like(blocks, dtype=torch.bool), half_life, 1e-3, 1, generator)
        keep = level.view(200, size)[:, 0] < low
        counts += masked.view(200, size)[keep].float().sum(0)
        used += int(keep.sum())
    return counts / used


@pytest.mark.parametrize(
    ("half_life", "expected"),
    [
        (None, [0.50, 0.50, 0.50, 0.50, 0.50]),
        (0.25, [0.37, 0.42, 0.49, 0.58, 0.66]),
        (0.1, [0.26, 0.34, 0.47, 0.66, 0.85]),
        (0.05, [0.19, 0.28, 0.46, 0.73, 0.94]),
    ],
)
def test_marginal_mask_probabilities(half_life, expected):
    """Bug: the weight of section 3.2 with a wrong sign, base or length. The table is the spec's, +-0.01 and its rounding."""
    found = marginals(64, half_life)[[0, 16, 32, 48, 63]]
    assert (found - torch.tensor(expected)).abs().max() < 0.016
    assert abs(float(marginals(16, half_life)[0]) - float(found[0])) < 0.05


def test_low_noise_masks_late_places():
    """Bug: the time dependence lost (weights of t near 0 used for all t). Table for t < 0.25."""
    found = marginals(64, 0.1, draws=40000, low=0.25)[[0, 16, 32, 48, 63]]
    assert (found - torch.tensor([0.003, 0.013, 0.053, 0.21, 0.54])).abs().max() < 0.02


@pytest.mark.parametrize("size", [1, 2, 5, 16])
def test_counts_are_exact(size):
    """Bug: a number of masks that is random, or rounded down, per block; the last block is shorter."""
    generator, length = torch.Generator().manual_seed(1), 3 * size + max(size - 1, 1)
    blocks = torch.arange(length) // size
    for half_life in (None, 0.1, 0):
        masked, level = corrupt(blocks, torch.ones(length, dtype=torch.bool), half_life, 1e-3, 3, generator)
        for d in range(3):
            for block in blocks.unique():
                here = blocks == block
                t, n = float(level[d, here][0]), int(here.sum())
                count = int(masked[d, here].sum())
                assert count == min(math.floor(t * n + 0.5), n)
                if half_life == 0:
                    assert masked[d, here].tolist() == [False] * (n - count) + [True] * count


def test_a_million_draws_give_finite_weights():
    """Bug (known fault 26): a level of 0, or one drawn in half precision."""
    blocks = torch.arange(1_000_000)
    _, level = corrupt(
        blocks, torch.ones_like(blocks, dtype=torch.bool), 0.1, 1e-3, 1, torch.Generator().manual_seed(2)
    )
    assert level.dtype == torch.float32
    assert float(level.min()) >= 1e-3
    assert torch.isfinite(1 / level).all()
    assert abs(float(level.mean()) - 0.5) < 0.002


def test_noise_draws_are_spread(base):
    """Bug: several draws of a block at the same level, or a level that is not uniform any more."""
    blocks = torch.arange(4000)
    _, level = corrupt(
        blocks, torch.ones_like(blocks, dtype=torch.bool), None, 1e-3, 4, torch.Generator().manual_seed(3)
    )
    assert torch.histc(level[0], 4, 0, 1).min() > 800
    ordered = level.sort(0).values
    assert ((ordered[1:] - ordered[:-1]) - 0.25).abs().max() < 0.01


def test_what_is_no_target_is_never_masked(base):
    """Bug: prompts, padding or unlossed tokens masked."""
    model, batch = tiny_model("block_diffusion", base, min_noise_level=0.99), batch_of(PROMPTS, ANSWERS)
    batch.loss_mask[:, 8] = False
    noisy, _, is_masked, _ = model._noise(batch, RowGenerators([1, 2, 3]))
    assert not is_masked[~noisy.is_real].any()
    assert not is_masked[noisy.column == 8].any()
    assert is_masked[noisy.is_real & (noisy.column != 8)].all()


def test_filling_goes_to_the_end_of_the_block(base):
    """Bugs (known fault 17): more than a block of end tokens, or an end taught where the text was cut."""
    ended, cut = [5, 6, 7, 8, 9, 2], [5, 6, 7, 8, 9, 10]
    noisy, context = halves(batch_of([[3, 4], [3, 4]], [ended, cut]), 4, ends=[2])
    assert noisy.is_real.sum(1).tolist() == [8, 6]
    assert noisy.token[0].tolist() == [5, 6, 7, 8, 9, 2, 2, 2]
    assert noisy.position[0].tolist() == list(range(2, 10))
    assert noisy.is_filling[0].tolist() == [False] * 6 + [True] * 2
    assert context.token.shape[1] == 8, "the clean half is the row as it is"


# --- the loss --------------------------------------------------------------------------------------------------------


def test_the_loss_is_the_weighted_mean_by_hand(base):
    """Bug (known fault 23): the weight of another block, or an average over all tokens instead of the masked ones."""
    model, batch = tiny_model("block_diffusion", base, block_size=3), batch_of(PROMPTS, ANSWERS)
    noisy, context, is_masked, level = model._noise(batch, RowGenerators([1, 2, 3]))
    hidden = model._masked_hidden(noisy, context, is_masked, is_masked, torch.device("cpu"))
    loss = -model.stack.head(hidden).log_softmax(-1).gather(1, noisy.token[is_masked][:, None])[:, 0]
    expected = (loss / level[is_masked]).sum() / is_masked.sum()
    output = model.loss(batch, RowGenerators([1, 2, 3]))
    assert abs(float((output.loss - expected).detach())) < 1e-9
    assert output.num_targets == int(is_masked.sum()) == model.num_targets(batch, RowGenerators([1, 2, 3]))
    sums = output.sums
    assert abs(sums["masked_loss"] / sums["masked_loss_count"] - float(loss.detach().mean())) < 1e-6
    assert abs(sums["uniform_loss"] / sums["uniform_loss_count"] - math.log(61)) < 1e-9
    assert sum(sums[f"accuracy_place_{i}_count"] for i in range(3)) == output.num_targets


def test_the_gradient_does_not_depend_on_the_split(base):
    """Bugs (known faults 20, 35): a mean of means, or noise by place in the batch: 8 rows equal 4 x 2."""
    model = tiny_model("block_diffusion", base, training_block_sizes=[2, 4, 7])
    prompts, answers = random_rows([3] * 8, seed=41, high=MASK), random_rows(range(4, 12), seed=42, high=MASK)
    weight = base.model.layers[1].mlp.up_proj.weight
    whole = model.loss(batch_of(prompts, answers), RowGenerators(range(8)))
    (expected,) = torch.autograd.grad(whole.loss, weight)
    total = sum(
        model.num_targets(batch_of(prompts[i : i + 2], answers[i : i + 2]), RowGenerators(range(i, i + 2)))
        for i in range(0, 8, 2)
    )
    assert total == whole.num_targets
    found = torch.zeros_like(expected)
    for i in range(0, 8, 2):
        part = model.loss(batch_of(prompts[i : i + 2], answers[i : i + 2]), RowGenerators(range(i, i + 2)))
        found += torch.autograd.grad(part.loss * part.num_targets / total, weight)[0]
    assert (found - expected).abs().max() < 1e-9 * expected.abs().max()


def test_logits_are_computed_for_masked_tokens_only(base):
    """Bug (known fault 31): [B, 2L, V] logits."""
    model, rows = tiny_model("block_diffusion", base), []
    hook = base.lm_head.register_forward_hook(lambda m, a, out: rows.append(out.reshape(-1, out.shape[-1]).shape[0]))
    try:
        output = model.loss(batch_of(PROMPTS, ANSWERS), RowGenerators([1, 2, 3]))
    finally:
        hook.remove()
    assert sum(rows) == output.num_targets


def test_half_precision_trains_without_nan():
    """Bug (known fault 26): 1/t in bfloat16."""
    base = tiny_base(dtype=torch.bfloat16)
    model = tiny_model("block_diffusion", base, min_noise_level=1e-5).train()
    for seed in range(20):
        output = model.loss(batch_of(PROMPTS, ANSWERS), RowGenerators([seed, 2, 3]))
        output.loss.backward()
        assert torch.isfinite(output.loss)
    assert all(torch.isfinite(p.grad).all() for p in base.parameters() if p.grad is not None)


def test_score_is_left_to_right_in_each_block(base):
    """Bug: a likelihood that is none: the chain rule over a block's places, against the dense forward."""
    model = tiny_model("block_diffusion", base, block_size=3)
    prompt, answer = PROMPTS[0], ANSWERS[0]
    total = 0.0
    for i, token in enumerate(answer):
        start = i // 3 * 3
        end = min(start + 3, len(answer))
        text = prompt + answer[:i] + [MASK] * (end - i)
        mask = text_mask(len(prompt), len(text), 3, "clean_context", "causal")
        with torch.no_grad():
            total += float(hf_logits(base, text, mask)[len(prompt) + i].log_softmax(-1)[token])
    score = model.score(batch_of([prompt], [answer]))
    assert not score.exact
    assert abs(float(score.log_likelihood[0]) - total) < 1e-9


@pytest.mark.parametrize("attention", ["clean_context", "noisy_context", "bidirectional"])
@pytest.mark.parametrize("token_shift", [False, True])
def test_every_rung_of_the_ladder_has_a_loss(base, attention, token_shift):
    """Bug: an ablation that crashes, or that trains nothing."""
    model = tiny_model("block_diffusion", base, attention=attention, token_shift=token_shift)
    for batch in (batch_of(PROMPTS, ANSWERS), text_batch(ANSWERS), packed_batch(PROMPTS, ANSWERS)):
        output = model.loss(batch, RowGenerators([1, 2, 3]))
        assert output.num_targets > 0
        (grad,) = torch.autograd.grad(output.loss, base.model.layers[0].mlp.up_proj.weight)
        assert grad.abs().max() > 0
