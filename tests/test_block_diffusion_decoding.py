"""Decoding by blocks equals recomputing everything, whatever the threshold, the selector, the batch or the write."""

import warnings

import pytest
import torch
from transformers import GenerationConfig
from transformers.generation.streamers import BaseStreamer

from polydecode.errors import UserError
from reference_block_diffusion import decode as reference
from tiny import greedy, padded, random_rows, tiny_base, tiny_model

MASK = 60
EXACT = 1e-9  # float64: what is left is the order of summation
PROMPTS = random_rows([5, 2, 9], seed=21, high=MASK)


@pytest.fixture(scope="module")
def base():
    return tiny_base(layers=3)


def model_of(base, **settings):
    return tiny_model("block_diffusion", base, **settings)


@torch.no_grad()
def run(model, prompts, tokens, choose=greedy, seeds=None, **options):
    """(tokens of each row, forwards): until every row has `tokens`."""
    state, rows, forwards = model.prefill(*padded(prompts), seeds, **options), [[] for _ in prompts], 0.0
    while min(map(len, rows)) < tokens:
        step = model.step(state, choose)
        forwards += step.forwards
        for row, new, count in zip(rows, step.tokens.tolist(), step.num_committed.tolist(), strict=True):
            row += new[:count]
    return [row[:tokens] for row in rows], forwards


@pytest.mark.parametrize("block_size", [1, 4, 7, 16, 32])
@pytest.mark.parametrize("fuse_write", [True, False])
def test_cached_is_recomputed(base, block_size, fuse_write):
    """Bugs (known faults 42, 43): stale keys of masks in the cache, the selector ignored with the cache on, a padded row
    that answers otherwise than alone."""
    model = model_of(base, fuse_write=fuse_write, block_size=block_size)
    tokens = 2 * block_size + 1 if block_size < 16 else block_size + 1
    for options in (
        {"threshold": None},
        {"threshold": 0.3},
        {"threshold": 0.0},
        {"threshold": 0.2, "selector": "margin"},
        {"threshold": 0.25, "selector": "entropy"},
        {"steps": 3},
        {"steps": 2, "selector": "margin"},
    ):
        expected = [reference(base, p, tokens, MASK, block_size, **options)[0] for p in PROMPTS]
        together, _ = run(model, PROMPTS, tokens, **options)
        assert together == expected, options
        assert run(model, PROMPTS[:1], tokens, **options)[0] == expected[:1], options


@pytest.mark.parametrize(
    "settings",
    [
        {"token_shift": True},
        {"attention": "noisy_context"},
        {"attention": "noisy_context", "token_shift": True},
        {"attention": "bidirectional"},
        {"attention": "bidirectional", "token_shift": True},
        {"prompt_attention": "bidirectional"},
    ],
)
def test_every_kind_of_attention_decodes_as_written(base, settings):
    """Bug (known fault 43): the first token of a block predicted from the wrong place with a token shift."""
    model = model_of(base, **settings)
    for options in ({"threshold": None}, {"threshold": 0.3}, {"steps": 2}):
        expected = [reference(base, p, 11, MASK, 4, **settings, **options)[0] for p in PROMPTS]
        assert run(model, PROMPTS, 11, **options)[0] == expected, options


@pytest.mark.parametrize("fuse_write", [True, False])
def test_the_logits_are_the_recomputed_ones(base, fuse_write):
    """Bug: tokens that happen to agree over logits that do not."""
    seen, shown = [], []
    model = model_of(base, fuse_write=fuse_write)

    def choose(logits_NV, rows=None):
        seen.append(logits_NV.clone())
        return greedy(logits_NV)

    run(model, PROMPTS[:1], 12, choose, threshold=0.3)
    reference(base, PROMPTS[0], 12, MASK, 4, threshold=0.3, shown=shown)
    assert len(seen) == len(shown) > 3
    for ours, theirs in zip(seen, shown, strict=True):
        keep = torch.arange(ours.shape[1]) != MASK
        assert (ours[:, keep] - theirs[:, keep]).abs().max() < EXACT


def test_the_cache_holds_the_clean_text(base):
    """Bug: keys computed while masks were around left in the cache."""
    model = model_of(base)
    with torch.no_grad():
        state, row = model.prefill(torch.tensor([PROMPTS[0]]), threshold=0.1), []
        while len(row) < 8 or state.rows[0].finished:
            step = model.step(state, greedy)
            row += step.tokens[0][: step.num_committed[0]].tolist()
        text = (PROMPTS[0] + row)[: state.rows[0].written]
        again = model.prefill(torch.tensor([PROMPTS[0]]))
        again.rows[0].finished = text[len(PROMPTS[0]) :][:4]
        model.step(again, greedy)
        again.rows[0].finished = text[len(PROMPTS[0]) + 4 :][:4]
        model.step(again, greedy)
    width = len(PROMPTS[0]) + 8
    for ours, clean in zip(state.cache.keys, again.cache.keys, strict=True):
        assert (ours[:, :, :width] - clean[:, :, :width]).abs().max() < EXACT


@pytest.mark.parametrize("fuse_write", [True, False])
def test_forwards_reported_are_forwards_run(base, fuse_write):
    """Bug: a write pass or a prefill that nobody counts; per block it is the denoising steps, plus 1 when not fused."""
    model, calls = model_of(base, fuse_write=fuse_write), []
    hook = base.model.layers[0].register_forward_hook(lambda *_: calls.append(1))
    try:
        for threshold, per_block in ((0.0, 1), (1.5, 4)):
            calls.clear()
            _, forwards = run(model, PROMPTS[:1], 12, threshold=threshold)
            assert forwards == len(calls) - 1  # without the prefill
            assert forwards == 3 * per_block + (0 if fuse_write else 2)  # the last block is not written yet
        calls.clear()
        out = model.generate(
            torch.tensor([PROMPTS[0]]),
            max_new_tokens=12,
            threshold=0.1,
            eos_token_id=None,
            return_dict_in_generate=True,
        )
        assert out.forwards == len(calls)
    finally:
        hook.remove()


def test_threshold_none_given_is_one_token_per_forward(base):
    """Bugs (known fault 45): an explicit None taken for "not given"; a threshold above 1 that never commits."""
    model = model_of(base, threshold=0.0)
    prompt = torch.tensor([PROMPTS[0]])
    for options, forwards in (({}, 3), ({"threshold": None}, 9), ({"threshold": 1.01}, 9), ({"steps": 2}, 5)):
        out = model.generate(
            prompt, max_new_tokens=8, eos_token_id=None, do_sample=False, return_dict_in_generate=True, **options
        )
        assert out.forwards == forwards, options


def test_a_model_that_wants_the_mask_id_still_ends(base):
    """Bug (known fault 39): the mask emitted, or no progress for ever."""
    model = model_of(base)
    head = model.stack.base.lm_head
    hook = head.register_forward_hook(lambda m, a, out: out.index_fill(-1, torch.tensor([MASK]), 1e4))
    try:
        for threshold in (None, 0.0, 0.9):
            rows, _ = run(model, PROMPTS, 13, threshold=threshold)
            assert all(MASK not in row for row in rows)
    finally:
        hook.remove()


@pytest.mark.parametrize("selector", ["confidence", "margin", "entropy", "random"])
def test_sampling_of_any_temperature_runs_and_belongs_to_the_row(base, selector):
    """Bugs (known faults 38, 40, 51): a crash at temperature 0 or top_p 0; only the first row sampled; draws that depend on
    the neighbours."""
    model = model_of(base)
    ids, mask = padded(PROMPTS)
    for settings in (
        {"temperature": 0.0},
        {"temperature": 1e-8},
        {"temperature": 1.0, "top_p": 0.0},
        {"temperature": 2.0, "top_p": 1.0, "top_k": 1000},
        {"temperature": 1.0, "top_k": 1},
        {"temperature": 0.7, "top_k": 0},
    ):
        options = {"do_sample": True, "max_new_tokens": 9, "eos_token_id": None, "selector": selector} | settings
        out = model.generate(ids, attention_mask=mask, seed=[4, 5, 6], **options)[:, ids.shape[1] :]
        assert (out != MASK).all()
        for b, prompt in enumerate(PROMPTS):
            alone = model.generate(torch.tensor([prompt]), seed=[4 + b], **options)[0, len(prompt) :]
            assert torch.equal(alone, out[b]), (settings, b)


def test_random_is_the_same_fused_and_not(base):
    """Bug: an order drawn from a shared generator, so that a write forward moves every later draw."""
    rows = [
        run(model_of(base, fuse_write=f), PROMPTS, 10, seeds=[1, 2, 3], selector="random", threshold=0.7)[0]
        for f in (True, False)
    ]
    assert rows[0] == rows[1]
    other = run(model_of(base), PROMPTS, 10, seeds=[7, 8, 9], selector="random", threshold=0.7)[0]
    assert other != rows[0]


def test_confidence_is_of_the_untempered_distribution(base):
    """Bug (known fault 37): at a low temperature every token looks sure, and the order becomes left to right."""
    model, seen = model_of(base), {}
    for temperature in (0.01, 3.0):
        torch.manual_seed(0)
        out = model.generate(
            torch.tensor([PROMPTS[0]]), do_sample=True, temperature=temperature, top_k=1, max_new_tokens=8, seed=1,
            threshold=0.1, eos_token_id=None, return_dict_in_generate=True,
        )  # fmt: skip
        seen[temperature] = (out.sequences.tolist(), out.forwards)
    assert seen[0.01] == seen[3.0]


def test_ties_go_to_the_left(base):
    """Bug: an unstable sort that makes greedy decoding differ between runs."""
    from polydecode.methods.block_diffusion.commit import chosen

    assert chosen([0.5, 0.5, 0.5], None, None) == [0]
    assert chosen([0.2, 0.9, 0.9], 0.9, None) == [1, 2]
    assert chosen([0.2, 0.1, 0.3], 0.9, None) == [2]
    assert sorted(chosen([0.2, 0.1, 0.3, 0.1], None, 2)) == [0, 2]
    assert len(chosen([0.1] * 5, None, 0)) == 5


def test_rows_may_have_their_own_options(base):
    """Bug: one row's threshold, block size or selector given to all."""
    model = model_of(base)
    options = {
        "threshold": [None, 0.1, 0.0],
        "block_size": [2, 4, 3],
        "selector": ["confidence", "margin", "entropy"],
        "steps": [None, None, 2],
    }
    together = run(model, PROMPTS, 9, **options)[0]
    for b, prompt in enumerate(PROMPTS):
        alone = run(model, [prompt], 9, **{k: v[b] for k, v in options.items()})[0]
        assert alone == [together[b]]


def test_an_end_token_waits_for_what_is_before_it(base):
    """Bug: an end token committed early in the middle of a block ends the row while masks stand before it."""
    model = model_of(base, block_size=8)
    free = run(model, PROMPTS[:1], 16, threshold=None)[0][0]
    for end in dict.fromkeys(free):
        out = model.generate(
            torch.tensor([PROMPTS[0]]), max_new_tokens=16, threshold=None, eos_token_id=end, do_sample=False
        )
        assert out[0, len(PROMPTS[0]) :].tolist() == free[: free.index(end) + 1]


@pytest.mark.parametrize("new_tokens", [1, 5, 17])
def test_any_number_of_new_tokens(base, new_tokens):
    """Bug (known faults 39, 69): the output rounded up to blocks, or masks stranded when the block is the longer."""
    out = model_of(base, block_size=32).generate(
        torch.tensor([PROMPTS[0]]), max_new_tokens=new_tokens, eos_token_id=None, do_sample=False
    )
    assert out.shape[1] == len(PROMPTS[0]) + new_tokens
    assert (out != MASK).all()


def test_the_context_may_be_filled_to_its_end(base):
    """Bug: the last block reaches past the positions the model knows."""
    prompt = torch.tensor([[3] * 505])
    assert model_of(base, block_size=16).generate(prompt, max_new_tokens=7, eos_token_id=None).shape[1] == 512


def test_a_block_above_the_trained_one_warns(base):
    """Bug: a larger block than trained taken in silence."""
    with pytest.warns(UserWarning, match="above the trained 4"):
        model_of(base).prefill(torch.tensor([[1]]), block_size=8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model_of(base, training_block_sizes=[4, 8]).prefill(torch.tensor([[1]]), block_size=8)


@pytest.mark.parametrize(
    "options",
    [{"threshold": -0.1}, {"threshold": float("nan")}, {"block_size": 0}, {"steps": 0}, {"selector": "confidense"},
     {"threshold": [0.5, 0.5]}],
)  # fmt: skip
def test_wrong_options_are_refused(base, options):
    """Bug (known fault 51): a value out of range reaches the loop."""
    with pytest.raises(UserError, match=next(iter(options))):
        model_of(base).generate(torch.tensor([PROMPTS[0]]), max_new_tokens=4, **options)


class Drafts(BaseStreamer):
    """Keeps what a diffusion streamer is given."""

    def __init__(self):
        self.confirmed, self.drafts = [], []

    def put(self, value):
        self.confirmed += value.flatten().tolist()

    def put_draft(self, value, **_):
        self.drafts.append((len(self.confirmed), value.tolist()))

    def end(self):
        self.drafts.append(None)


def test_drafts_are_what_is_known_of_the_block(base):
    """Bug: drafts that skip or repeat tokens; tokens confirmed out of order."""
    model, streamer = model_of(base, block_size=8), Drafts()
    out = model.generate(
        torch.tensor([PROMPTS[0]]), max_new_tokens=16, threshold=None, eos_token_id=None, do_sample=False,
        streamer=streamer,
    )  # fmt: skip
    assert streamer.confirmed == out[0].tolist()
    assert streamer.drafts.pop() is None
    assert len(streamer.drafts) > 4
    for start, draft in streamer.drafts:
        final = out[0].tolist()[start:]
        assert all(d in (MASK, f) for d, f in zip(draft, final, strict=False))


def test_a_sliding_window_is_kept():
    """Bug: blocks that read beyond the window of a mistral."""
    windowed, plain = (tiny_base("mistral", layers=3, sliding_window=w) for w in (6, None))
    plain.load_state_dict(windowed.state_dict())
    for base in (windowed, plain):
        model = model_of(base)
        assert run(model, PROMPTS, 13, threshold=0.1)[0][0] == run(model, PROMPTS[:1], 13, threshold=0.1)[0][0]
    assert run(model_of(windowed), PROMPTS, 13)[0] != run(model_of(plain), PROMPTS, 13)[0]


def test_generation_config_is_greedy_by_default(base):
    """Bug (known fault 38): a default temperature of 1."""
    model = model_of(base)
    model.generation_config = GenerationConfig()
    twice = [model.generate(torch.tensor([PROMPTS[0]]), max_new_tokens=8) for _ in range(2)]
    assert torch.equal(*twice)
