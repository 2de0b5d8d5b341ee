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


FEW = [{"threshold": None}, {"threshold": 0.3}, {"threshold": 0.2, "selector": "margin"},
       {"threshold": 0.25, "selector": "entropy"}, {"steps": 3}]  # fmt: skip
MANY = [*FEW, {"threshold": 0.0}, {"threshold": 1.5, "selector": "margin"}, {"steps": 2, "selector": "margin"}]
MANY += [{"threshold": t, "selector": s} for t, s in ((0.9, "confidence"), (0.9, "entropy"), (None, "margin"))]


@pytest.mark.parametrize(
    ("block_size", "tokens", "kinds"),
    [(1, 4, FEW), (4, 9, MANY), (7, 15, FEW), (16, 17, FEW), (32, 33, FEW)],
)
def test_cached_is_recomputed(base, block_size, tokens, kinds):
    """Bugs (known faults 42, 43): stale keys of masks in the cache, the selector ignored with the cache on, a padded row
    that answers otherwise than alone, a write that changes what is written."""
    models = [model_of(base, fuse_write=fuse, block_size=block_size) for fuse in (True, False)]
    for options in kinds:
        expected = [reference(base, p, tokens, MASK, block_size, **options)[0] for p in PROMPTS]
        for model in models:
            assert run(model, PROMPTS, tokens, **options)[0] == expected, options
            assert run(model, PROMPTS[:1], tokens, **options)[0] == expected[:1], options


def test_the_comparison_can_fail(base):
    """A tiny model on which masks, blocks and order made no difference would prove nothing."""
    right = reference(base, PROMPTS[2], 12, MASK, 4, threshold=None)[0]
    for size, wrong in (
        (5, {}), (4, {"attention": "bidirectional"}), (4, {"prompt_attention": "bidirectional"}),
        (4, {"token_shift": True}), (4, {"steps": 1}), (4, {"window": 6}), (4, {"selector": "entropy"}),
    ):  # fmt: skip
        assert reference(base, PROMPTS[2], 12, MASK, size, **wrong)[0] != right, (size, wrong)


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


@pytest.mark.parametrize(
    "settings",
    [{}, {"token_shift": True}, {"attention": "noisy_context"}, {"attention": "bidirectional", "token_shift": True},
     {"prompt_attention": "bidirectional", "token_shift": True}],
)  # fmt: skip
@pytest.mark.parametrize("fuse_write", [True, False])
def test_the_logits_are_the_recomputed_ones(base, settings, fuse_write):
    """Bug: tokens that happen to agree over logits that do not. Three rows at their own paces, padded."""
    seen = [[] for _ in PROMPTS]

    def choose(logits_NV, rows=None):
        for b in range(len(PROMPTS)):
            seen[b].append(logits_NV[[n for n, row in enumerate(rows) if row == b]].clone())
        return greedy(logits_NV)

    run(model_of(base, fuse_write=fuse_write, **settings), PROMPTS, 12, choose, threshold=0.3)
    for b, prompt in enumerate(PROMPTS):
        shown = []
        reference(base, prompt, 12, MASK, 4, threshold=0.3, shown=shown, **settings)
        assert len(seen[b]) >= len(shown) > 3
        for ours, theirs in zip(seen[b], shown, strict=False):
            keep = torch.arange(ours.shape[1]) != MASK
            assert (ours[:, keep] - theirs[:, keep]).abs().max() < EXACT


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
        steps = reference(base, PROMPTS[0], 12, MASK, 4, threshold=0.3)[1]
        calls.clear()
        out = model.generate(
            torch.tensor([PROMPTS[0]]), max_new_tokens=12, threshold=0.3, do_sample=False, eos_token_id=None,
            return_dict_in_generate=True,
        )  # fmt: skip
        assert out.forwards == len(calls) == 1 + steps + (0 if fuse_write else 2)
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
        {"temperature": 0.0}, {"temperature": 1e-8}, {"temperature": 1.0, "top_p": 0.0}, {"temperature": 1.0, "top_k": 1},
        {"temperature": 2.0, "top_p": 1.0, "top_k": 1000}, {"temperature": 0.7, "top_k": 0},
    ):  # fmt: skip
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
    model = model_of(base)
    hook = base.lm_head.register_forward_hook(
        lambda m, a, out: torch.zeros_like(out).index_fill(-1, torch.tensor([7]), 1)
    )
    try:
        with torch.no_grad():
            for selector in ("confidence", "margin", "entropy"):
                state = model.prefill(*padded(PROMPTS), threshold=None, selector=selector)
                for _ in range(9):
                    step = model.step(state, greedy)
                    assert step.num_committed.tolist() == [1, 1, 1], "from the left, so each is handed out at once"
    finally:
        hook.remove()


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


@torch.no_grad()
def test_rows_leave_and_enter_within_blocks(base):
    """Bug: a row that joins or stays in the middle of a block takes another's block, border or unwritten tokens."""
    options = [{"threshold": None, "block_size": 4}, {"threshold": 0.0, "block_size": 3}, {"steps": 2, "block_size": 2}]
    for settings in ({}, {"fuse_write": False}, {"token_shift": True}, {"attention": "bidirectional"}):
        model, state, out = model_of(base, **settings), None, [[], [], []]
        for enters, present, steps in ((0, [0], 6), (1, [0, 1], 1), (2, [0, 1, 2], 3), (None, [2, 0], 5)):
            if enters is None:
                state = model.keep_rows(state, torch.tensor(present))
            else:
                entering = model.prefill(torch.tensor([PROMPTS[enters]]), **options[enters])
                state = entering if state is None else model.join(state, entering)
            for _ in range(steps):
                step = model.step(state, greedy)
                for b, new, count in zip(present, step.tokens.tolist(), step.num_committed.tolist(), strict=True):
                    out[b] += new[:count]
        for b, prompt in enumerate(PROMPTS):
            assert len(out[b]) >= 7
            assert run(model, [prompt], len(out[b]), **options[b])[0][0] == out[b], (settings, b)


def test_an_end_token_waits_for_what_is_before_it(base):
    """Bug: an end token committed early in the middle of a block ends the row while masks stand before it."""
    model = model_of(base, block_size=8)
    free = run(model, PROMPTS[:1], 16, threshold=None)[0][0]
    for end in dict.fromkeys(free):
        out = model.generate(
            torch.tensor([PROMPTS[0]]), max_new_tokens=16, threshold=None, eos_token_id=end, do_sample=False
        )
        assert out[0, len(PROMPTS[0]) :].tolist() == free[: free.index(end) + 1]


@pytest.mark.parametrize(("new_tokens", "prompt"), [(1, PROMPTS[0]), (5, PROMPTS[0]), (17, PROMPTS[0]), (7, [3] * 505)])
def test_any_number_of_new_tokens(base, new_tokens, prompt):
    """Bugs (known faults 39, 69): the output rounded up to blocks, masks stranded when the block is the longer, a last block
    that reaches past the 512 positions the model knows."""
    out = model_of(base, block_size=32).generate(
        torch.tensor([prompt]), max_new_tokens=new_tokens, eos_token_id=None, do_sample=False
    )
    assert out.shape[1] == len(prompt) + new_tokens
    assert (out != MASK).all()


def test_a_block_longer_than_the_context_is_refused(base):
    """Bugs: a mask of 100,000 x 100,000 in training, hundreds of forwards for nine tokens in decoding."""
    with pytest.raises(UserError, match="context of 512"):
        model_of(base, block_size=513)
    with pytest.raises(UserError, match="context of 512"):
        model_of(base, training_block_sizes=[4, 100000])
    with pytest.raises(UserError, match="context of 512"):
        model_of(base).prefill(torch.tensor([[1]]), block_size=99999)


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
    """Bug: blocks that read beyond the window of a mistral, on either side of the prompt's border."""
    base = tiny_base("mistral", layers=3, sliding_window=6)
    for options in ({"threshold": None}, {"threshold": 0.3}):
        expected = [reference(base, p, 13, MASK, 4, window=6, **options)[0] for p in PROMPTS]
        assert run(model_of(base), PROMPTS, 13, **options)[0] == expected
        assert run(model_of(base, fuse_write=False), PROMPTS[:1], 13, **options)[0] == expected[:1]


def test_generation_config_is_greedy_by_default(base):
    """Bug (known fault 38): a default temperature of 1."""
    model = model_of(base)
    model.generation_config = GenerationConfig()
    twice = [model.generate(torch.tensor([PROMPTS[0]]), max_new_tokens=8) for _ in range(2)]
    assert torch.equal(*twice)
