"""Training by blocks: the noise, the loss, the score, and that the pass and the keys are those of decoding."""

import math
from functools import cache

import pytest
import torch
from transformers import DynamicCache

from polydecode.methods.batch import Batch
from polydecode.methods.block_diffusion.corruption import corrupt
from polydecode.ops.sampling import RowGenerators
from reference_block_diffusion import block_logits, forced_log_likelihood, hf_logits, text_mask
from tiny import batch_of, greedy, packed_batch, padded, random_rows, tiny_base, tiny_model

MASK = 60
EXACT = 1e-9
PROMPTS, ANSWERS = random_rows([3, 1, 5], seed=31, high=MASK), random_rows([7, 4, 10], seed=32, high=MASK)


@pytest.fixture(scope="module")
def base():
    return tiny_base(layers=3)


def text_batch(rows):
    batch = batch_of([[] for _ in rows], rows)
    return Batch(batch.input_ids, batch.attention_mask, torch.zeros_like(batch.loss_mask), batch.attention_mask.bool())


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
            text = PROMPTS[which] + ANSWERS[which]
            position, place = int(noisy.position[row, index]), int(noisy.place[row, index])
            inside = (noisy.block[row] == noisy.block[row, index]) & noisy.is_real[row]
            shown = zip(noisy.token[row][inside].tolist(), is_masked[row][inside].tolist(), strict=True)
            block = [None if hidden_one else token for token, hidden_one in shown]
            with torch.no_grad():
                expected = block_logits(
                    base, text[: position - place], block, len(PROMPTS[which]), MASK, size,
                    token_shift=token_shift, prompt_attention=prompt_attention,
                )[place]  # fmt: skip
            assert (ours[n] - expected).abs().max() < EXACT, (row, index)


@pytest.mark.parametrize("attention", ["noisy_context", "bidirectional"])
def test_the_other_patterns_read_the_noisy_text(base, attention):
    """Bug: a rung of the ladder that is trained on something else: here all of the noisy text goes through one forward."""
    model = tiny_model("block_diffusion", base, attention=attention, min_noise_level=0.4)
    for batch in (batch_of(PROMPTS, ANSWERS), packed_batch(PROMPTS, ANSWERS)):
        noisy, context, is_masked, _ = model._noise(batch, RowGenerators(range(3)))
        with torch.no_grad():
            ours = model.stack.head(model._masked_hidden(noisy, context, is_masked, is_masked, torch.device("cpu")))
        shown, n = noisy.token.masked_fill(is_masked, MASK), 0
        for row in range(len(batch.input_ids)):
            for document in noisy.document[row][noisy.is_real[row]].unique().tolist():
                which = document if batch.document_ids is not None else row
                here = noisy.is_real[row] & (noisy.document[row] == document)
                text = PROMPTS[which] + shown[row][here].tolist()
                start = len(PROMPTS[which])
                with torch.no_grad():
                    logits = hf_logits(base, text, text_mask(start, len(text), 4, attention, "causal"))[start:]
                expected = logits[is_masked[row][here]]
                assert (ours[n : n + len(expected)] - expected).abs().max() < EXACT
                n += len(expected)
        assert n == len(ours)


@pytest.mark.parametrize("fuse_write", [True, False])
def test_the_cache_holds_the_clean_text(base, fuse_write):
    """Bug: keys computed while masks were around left in the cache. Each finished block's are those of the clean text."""
    model, rows = tiny_model("block_diffusion", base, fuse_write=fuse_write), [[] for _ in PROMPTS]
    with torch.no_grad():
        state = model.prefill(*padded(PROMPTS), threshold=0.1)
        while min(row.written - len(p) for row, p in zip(state.rows, PROMPTS, strict=True)) < 8:
            step = model.step(state, greedy)
            for row, new, count in zip(rows, step.tokens.tolist(), step.num_committed.tolist(), strict=True):
                row += new[:count]
        for b, prompt in enumerate(PROMPTS):
            text, clean = (prompt + rows[b])[: state.rows[b].written], DynamicCache()
            hf_logits(base, text, text_mask(len(prompt), len(text), 4, "clean_context", "causal"), clean)
            for i, layer in enumerate(clean.layers):
                for ours, theirs in ((state.cache.keys[i], layer.keys), (state.cache.values[i], layer.values)):
                    assert (ours[b, :, : len(text)] - theirs[0]).abs().max() < EXACT


# --- noise -----------------------------------------------------------------------------------------------------------


@cache
def marginals(size, half_life, draws=20000, low=1.1):
    """How often each place is masked among blocks whose level is below `low`; 20000 blocks: +-0.0035."""
    blocks = torch.arange(draws // 4).repeat_interleave(size)
    everything, generator = torch.ones_like(blocks, dtype=torch.bool), torch.Generator().manual_seed(0)
    masked, level = corrupt(blocks, everything, half_life, 1e-3, 4, generator)
    keep = level.view(draws, size)[:, 0] < low
    return masked.view(draws, size)[keep].float().mean(0)


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
    """Bug: the weight of section 3.2 with a wrong sign, base or length. The table is the spec's; the law is one of i / length."""
    found = marginals(64, half_life)
    assert (found[[0, 16, 32, 48, 63]] - torch.tensor(expected)).abs().max() < 0.01
    assert (marginals(16, half_life) - found.view(16, 4).mean(1)).abs().max() < 0.025


def test_low_noise_masks_late_places():
    """Bug: the time dependence lost (weights of t near 0 used for all t). Table for t < 0.25."""
    found = marginals(64, 0.1, draws=80000, low=0.25)[[0, 16, 32, 48, 63]]
    assert (found - torch.tensor([0.003, 0.013, 0.053, 0.21, 0.54])).abs().max() < 0.01


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


def test_noise_belongs_to_the_example(base):
    """Bug (known fault 20): masks that depend on the other rows, their order or the padding."""
    model = tiny_model("block_diffusion", base, training_block_sizes=[2, 4, 7], noise_draws=2)

    def noise(rows, seeds):
        batch = batch_of([PROMPTS[b] for b in rows], [ANSWERS[b] for b in rows])
        noisy, _, is_masked, level = model._noise(batch, RowGenerators([seeds[b] for b in rows]))
        return {
            b: [t[i][noisy.is_real[i]].tolist() for t in (is_masked, level, noisy.place)] for i, b in enumerate(rows)
        }

    together = noise([0, 1, 2], [7, 8, 9])
    assert noise([2, 0, 1], [7, 8, 9]) == together
    for b in range(3):
        assert noise([b], [7, 8, 9])[b] == together[b]
    other = noise([0, 1, 2], [17, 18, 19])
    assert all(other[b][1] != together[b][1] for b in range(3)), "another epoch, another seed"


def test_block_sizes_are_drawn_per_example(base):
    """Bug: one size for the batch, or a size of the list that is never drawn."""
    sizes = [2, 3, 8]
    model, batch = (
        tiny_model("block_diffusion", base, training_block_sizes=sizes),
        batch_of([[3]] * 30, [[5] * 16] * 30),
    )
    noisy, _, _, level = model._noise(batch, RowGenerators(range(30)))
    drawn = [int(places.max()) + 1 for places in noisy.place]
    assert set(drawn) == set(sizes)
    for b, size in enumerate(drawn):
        assert noisy.place[b].tolist() == [i % size for i in range(16)]
        assert len(set(level[b].tolist())) == -(-16 // size), "one level per block"


def test_what_is_no_target_is_never_masked(base):
    """Bug: prompts, padding or unlossed tokens masked."""
    model, batch = tiny_model("block_diffusion", base, min_noise_level=0.99), batch_of(PROMPTS, ANSWERS)
    batch.loss_mask[:, 8] = False
    noisy, _, is_masked, _ = model._noise(batch, RowGenerators([1, 2, 3]))
    assert not is_masked[~noisy.is_real].any()
    assert not is_masked[noisy.column == 8].any()
    assert is_masked[noisy.is_real & (noisy.column != 8)].all()


def test_filling_ends_with_the_context(base):
    """Bug: end tokens trained at positions the model does not have, where decoding never goes."""
    model = tiny_model("block_diffusion", base, block_size=64, fill_last_block=True)
    batch = batch_of([[3] * 490], [[5] * 11 + [2]])
    noisy, _, _, _ = model._noise(batch, RowGenerators([1]))
    assert int(noisy.position.max()) == 511
    assert int(noisy.is_filling.sum()) == 10


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
    assert abs(sums["cross_entropy"] / sums["cross_entropy_count"] - float(loss.detach().mean())) < 1e-6
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


def test_logits_are_computed_for_masked_tokens_only(base, monkeypatch):
    """Bug (known fault 31): [B, 2L, V] logits."""
    model, rows = tiny_model("block_diffusion", base), []
    bare = base.lm_head.forward

    def counted(x):
        rows.append(x.shape[:-1].numel())
        return bare(x)

    monkeypatch.setattr(base.lm_head, "forward", counted)
    output = model.loss(batch_of(PROMPTS, ANSWERS), RowGenerators([1, 2, 3]))
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


@pytest.mark.parametrize("attention", ["clean_context", "noisy_context", "bidirectional"])
@pytest.mark.parametrize("token_shift", [False, True])
def test_score_is_left_to_right_in_each_block(base, attention, token_shift):
    """Bugs: a likelihood that is none: masks left in a noisy context, or later blocks read by bidirectional attention. It is
    what decoding token by token, forced to say the answer, gives."""
    settings = {"attention": attention, "token_shift": token_shift}
    model = tiny_model("block_diffusion", base, block_size=3, **settings)
    expected = [forced_log_likelihood(base, p, a, MASK, 3, **settings) for p, a in zip(PROMPTS, ANSWERS, strict=True)]
    score = model.score(batch_of(PROMPTS, ANSWERS))
    assert not score.exact
    assert score.num_targets.tolist() == list(map(len, ANSWERS))
    assert (score.log_likelihood - torch.tensor(expected, dtype=torch.float64)).abs().max() < 1e-8
    packed = model.score(packed_batch(PROMPTS, ANSWERS))
    assert abs(float(packed.log_likelihood[0]) - sum(expected)) < 1e-8


@pytest.mark.parametrize("attention", ["clean_context", "noisy_context", "bidirectional"])
@pytest.mark.parametrize("token_shift", [False, True])
def test_every_rung_of_the_ladder_has_a_loss(base, attention, token_shift):
    """Bug: an ablation that crashes, or that trains nothing."""
    model = tiny_model("block_diffusion", base, attention=attention, token_shift=token_shift)
    for batch in (batch_of(PROMPTS, ANSWERS), text_batch(ANSWERS), packed_batch(PROMPTS, ANSWERS)):
        output = model.loss(batch, RowGenerators([1, 2, 3]))
        assert output.num_targets == model.num_targets(batch, RowGenerators([1, 2, 3])) > 0
        (grad,) = torch.autograd.grad(output.loss, base.model.layers[0].mlp.up_proj.weight)
        assert grad.abs().max() > 0
