"""Cached cyclical refilling is the full gated forward, for every prompt length, phase, batch and order of rows."""

import itertools

import pytest
import torch

from polydecode.errors import UserError
from reference_dmtd import reference_logits
from tiny import Forced, decode, forced_logits, greedy, hf_greedy, padded, random_rows, tiny_base, tiny_model

EXACT = 1e-9
"""Float64 sums in another order: 1e-14 was measured, a wrong phase or mask differs by more than 1e-3."""

PROMPT_LENGTHS = list(range(1, 10))
NEW_TOKENS = 9
SPLITS = list(itertools.product((0, 2), ("replace", "add"), ("full", "cyclic")))


@pytest.fixture(scope="module")
def base():
    return tiny_base()


@pytest.fixture(scope="module")
def prompts():
    return random_rows(PROMPT_LENGTHS, seed=1)


@pytest.fixture(scope="module")
def answers():
    return torch.tensor(random_rows([NEW_TOKENS] * len(PROMPT_LENGTHS), seed=2))


def dmtd(base, encoding=0, merge="replace", gate="full", **settings):
    return tiny_model("dmtd", base, num_encoding_layers=encoding, merge=merge, prompt_gate=gate, **settings)


@torch.no_grad()
def full_logits(model, prompts, answers, cycle_length):
    """What the full gated forward says before each answer token: (B, N, V)."""
    rows = [[*p, *a] for p, a in zip(prompts, answers.tolist(), strict=True)]
    ids, mask = padded(rows, "right")
    lengths = torch.tensor([len(p) for p in prompts])
    logits_BTV = model.logits(ids, mask, prompt_lengths=lengths, cycle_length=cycle_length)
    return torch.stack([logits_BTV[b, n - 1 : n - 1 + answers.shape[1]] for b, n in enumerate(lengths)])


@pytest.mark.parametrize("cycle_length", range(1, 6))
def test_refilling_equals_the_full_forward(base, prompts, answers, cycle_length):
    """Bugs: a refill one token short, a phase taken from the padded row, thinking keys of skipped tokens left out.

    All prompt lengths 1-9 sit in one batch, padded left, then right; step n checks n new tokens.
    """
    for encoding, merge, gate in SPLITS:
        model = dmtd(base, encoding, merge, gate)
        expected = full_logits(model, prompts, answers, cycle_length)
        for side in ("left", "right"):
            cached = forced_logits(model, *padded(prompts, side), answers, cycle_length=cycle_length)
            assert (cached - expected).abs().max() < EXACT, (encoding, merge, gate, side)


@pytest.mark.parametrize("encoding", [0, 2])
def test_refilling_equals_the_paper(base, prompts, answers, encoding):
    """Bugs shared by our full and our cached forward (wrong merge, wrong first head, wrong split) pass the test above."""
    for merge, gate, (b, cycle_length) in itertools.product(
        ("replace", "add"), ("full", "cyclic"), ((0, 2), (3, 1), (6, 5), (8, 3))
    ):
        model = dmtd(base, encoding, merge, gate)
        n = len(prompts[b])
        cached = forced_logits(model, torch.tensor([prompts[b]]), None, answers[b : b + 1], cycle_length=cycle_length)
        ids = prompts[b] + answers[b].tolist()
        expected = reference_logits(base, ids, n, cycle_length, encoding, 2, merge, gate)[n - 1 : n - 1 + NEW_TOKENS]
        assert (cached[0] - expected).abs().max() < EXACT, (merge, gate, n, cycle_length)


def test_the_comparison_can_fail(base, prompts, answers):
    """A tiny model on which wrong phases, merges or gates made no difference would prove nothing."""
    n, ids = len(prompts[4]), prompts[4] + answers[4].tolist()
    right = reference_logits(base, ids, n, 3, 2, 2, "add", "full")[n - 1 :]
    wrong = [(n, 4, 2, "add", "full"), (n + 1, 3, 2, "add", "full"), (n, 3, 2, "replace", "full")]
    wrong += [(n, 3, 2, "add", "cyclic"), (n, 3, 1, "add", "full")]
    for prompt_length, cycle_length, encoding, merge, gate in wrong:
        other = reference_logits(base, ids, prompt_length, cycle_length, encoding, 2, merge, gate)[n - 1 :]
        assert (right - other).abs().max() > 1e-3, (prompt_length, cycle_length, encoding, merge, gate)


def test_an_unpadded_row_alone_takes_the_same_road(base, prompts, answers):
    """Bug: the contiguous cache plan and the mask-free single query (`dense`) read one key too many or too few."""
    for encoding, merge, gate in SPLITS:
        model = dmtd(base, encoding, merge, gate)
        for b, cycle_length in ((0, 4), (2, 3), (8, 2)):
            rows = slice(b, b + 1)
            alone = forced_logits(model, torch.tensor(prompts[rows]), None, answers[rows], cycle_length=cycle_length)
            expected = full_logits(model, prompts[rows], answers[rows], cycle_length)
            assert (alone - expected).abs().max() < EXACT, (encoding, merge, gate, b, cycle_length)


def test_every_row_has_its_own_cycle_length(base, prompts, answers):
    """Bug: one cycle length or one head schedule applied to the whole batch."""
    cycles = [1, 2, 3, 4, 5, 4, 3, 2, 1]
    for encoding, merge, gate in SPLITS:
        model = dmtd(base, encoding, merge, gate)
        cached = forced_logits(model, *padded(prompts), answers, cycle_length=cycles)
        for b, cycle_length in enumerate(cycles):
            expected = full_logits(model, prompts[b : b + 1], answers[b : b + 1], cycle_length)[0]
            assert (cached[b] - expected).abs().max() < EXACT, (encoding, merge, gate, b)


@torch.no_grad()
def follow(model, script, prompts, answers, cycles):
    """Run `script` and return {row: its logits}. ("add", rows) lets rows join, ("keep", rows) lets others leave."""
    state, present, seen = None, [], {b: [] for b in range(len(prompts))}

    def choose(logits_BV):
        for b, logits_V in zip(present, logits_BV, strict=True):
            seen[b].append(logits_V.clone())
        return torch.stack([answers[b, len(seen[b]) - 1] for b in present])

    for verb, value in script:
        if verb == "step":
            for _ in range(value):
                model.step(state, choose)
        elif verb == "add":
            new = model.prefill(*padded([prompts[b] for b in value]), cycle_length=[cycles[b] for b in value])
            state, present = new if state is None else model.join(state, new), present + value
        else:
            state = model.keep_rows(state, torch.tensor([present.index(b) for b in value]))
            present = value
    return {b: torch.stack(logits) for b, logits in seen.items() if logits}


def test_rows_leave_and_enter_in_the_middle_of_cycles(base, prompts, answers):
    """Bugs: pending tokens of a leaving row stay behind, a joining row takes the others' phase, order of rows is lost."""
    cycles = [3, 5, 2, 4, 1, 3, 5, 2, 4]
    scripts = [
        [("add", [0, 1, 8]), ("step", 2), ("keep", [8, 0]), ("step", 2), ("add", [3, 4]), ("step", 3), ("keep", [4, 8, 3]),
         ("add", [5]), ("step", 2)],
        [("add", [1]), ("step", 4), ("add", [6]), ("step", 1), ("add", [2, 7]), ("step", 3), ("keep", [7, 1]), ("step", 1)],
        [("add", [2]), ("step", 1), ("keep", [2]), ("add", [0]), ("add", [1]), ("step", 6), ("keep", [1]), ("step", 2)],
    ]  # fmt: skip
    for (encoding, merge, gate), script in itertools.product(SPLITS, scripts):
        model = dmtd(base, encoding, merge, gate)
        for b, logits_NV in follow(model, script, prompts, answers, cycles).items():
            expected = full_logits(model, prompts[b : b + 1], answers[b : b + 1], cycles[b])[0, : len(logits_NV)]
            assert (logits_NV - expected).abs().max() < EXACT, (encoding, merge, gate, b)


def test_join_of_a_long_and_a_short_cache(base):
    """Bug: two caches of different capacity (past 64 slots) joined at unequal lengths."""
    long, short = random_rows([70, 5], seed=3)
    answers = torch.tensor(random_rows([9, 9], seed=4))
    model, prompts = dmtd(base), [short, long]
    for script in ([("add", [0]), ("step", 2), ("add", [1]), ("step", 5)], [("add", [1]), ("add", [0]), ("step", 7)]):
        for b, logits_NV in follow(model, script, prompts, answers, [3, 4]).items():
            expected = full_logits(model, prompts[b : b + 1], answers[b : b + 1], [3, 4][b])[0, : len(logits_NV)]
            assert (logits_NV - expected).abs().max() < EXACT


def test_edge_splits(base, prompts, answers):
    """Bugs at the edges: no thinking layers, no decoding layers, one of each only."""
    splits = [(0, 0), (0, 5), (3, 2), (5, 0), (4, 1), (1, 1)]
    for (encoding, decoding), merge in itertools.product(splits, ("replace", "add")):
        model = dmtd(base, encoding, merge, num_decoding_layers=decoding)
        cached = forced_logits(model, *padded(prompts), answers, cycle_length=3)
        assert (cached - full_logits(model, prompts, answers, 3)).abs().max() < EXACT, (encoding, decoding, merge)
        b, n = 5, len(prompts[5])
        expected = reference_logits(base, prompts[b] + answers[b].tolist(), n, 3, encoding, decoding, merge)
        assert (cached[b] - expected[n - 1 : n - 1 + NEW_TOKENS]).abs().max() < EXACT, (encoding, decoding, merge)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_cycle_length_one_is_the_source_model(family, prompts):
    """Bug: something re-added, re-scaled or re-normed at heads, so that conversion alone changes the model."""
    base = tiny_base(family)
    for encoding in (0, 2):
        model = dmtd(base, encoding, cycle_length=1)
        for prompt in (prompts[0], prompts[6]):
            ids = torch.tensor([prompt])
            expected = hf_greedy(base, ids, 10)
            assert decode(model, ids, steps=10).tolist() == expected[:, len(prompt) :].tolist()
        ids = torch.tensor(random_rows([12, 12], seed=5))
        with torch.no_grad():
            assert (model.logits(ids) - base(ids).logits).abs().max() < 1e-10


def test_the_first_token_is_the_source_models(base, prompts):
    """Bug: with prompt_gate full the prompt must run as the source runs it, whatever merge and cycle length are."""
    for merge, cycle_length in itertools.product(("replace", "add"), (1, 3, 5)):
        state = dmtd(base, merge=merge).prefill(*padded(prompts), cycle_length=cycle_length)
        for b, prompt in enumerate(prompts):
            with torch.no_grad():
                assert (state.logits_BV[b] - base(torch.tensor([prompt])).logits[0, -1]).abs().max() < EXACT


def test_a_padded_row_is_the_row_alone(prompts):
    """Bug (known fault 14): padding inferred from a token id; here pad, eos and several tokens of the prompts are one id."""
    base = tiny_base(dtype=torch.float32, pad_token_id=2)
    rows = [[2, *p[:2], 2, 2, *p[2:], 2] for p in prompts]
    for merge, side in (("replace", "left"), ("add", "right")):
        model = dmtd(base, 2, merge)
        together = decode(model, *padded(rows, side, pad=2), steps=9)
        for b, row in enumerate(rows):
            assert decode(model, torch.tensor([row]), steps=9).tolist() == together[b : b + 1].tolist()


def test_no_nan_reaches_a_row_from_padding(base, prompts, answers):
    """Bug: a padding or filler query with nothing to read gives NaN and spreads through 0 * NaN."""
    for attention in ("sdpa", "eager"):
        model = dmtd(tiny_base(attention=attention), 2)
        logits = forced_logits(model, *padded(prompts), answers, cycle_length=[1, 2, 3, 4, 5, 1, 2, 3, 4])
        assert logits.isfinite().all()


def watch_positions(layers):
    """(per layer, the list of position ids of each call so far; the hooks to remove)."""
    seen = [[] for _ in layers]

    def note(calls):
        return lambda _module, _args, kwargs: calls.append(kwargs["position_ids"].tolist())

    return seen, [
        layer.register_forward_pre_hook(note(calls), with_kwargs=True)
        for layer, calls in zip(layers, seen, strict=True)
    ]


@torch.no_grad()
def test_each_token_passes_each_layer_once(base):
    """Bug: decoding layers run again over the tokens of a refill, or thinking layers over the prompt."""
    for encoding, gate, cycle_length in itertools.product((0, 2), ("full", "cyclic"), (1, 3, 4)):
        model = dmtd(base, encoding, gate=gate)
        prompts = torch.tensor(random_rows([4, 4], seed=6))
        seen, hooks = watch_positions(base.model.layers)
        steps = 4 * cycle_length + 1  # step n reads token n - 1: the last one read is position 4 + steps - 2
        state = model.prefill(prompts, cycle_length=cycle_length)
        for _ in range(steps):
            model.step(state, greedy)
        for hook in hooks:
            hook.remove()
        last = 4 + steps - 2
        for i, calls in enumerate(seen):
            for row in range(2):
                positions = [p for call in calls for p in call[row if len(call) > 1 else 0]]
                thinking = encoding <= i < 3
                last_head = last - (last - (0 if gate == "cyclic" else 3)) % cycle_length
                end = max(last_head, 3) if thinking else last
                assert positions == list(range(end + 1)), (i, encoding, gate, cycle_length)
                if thinking and gate == "full":
                    assert len(calls) == 1 + 4, "one call for the prompt, one per cycle"


def test_keys_and_values_are_written_once(base, prompts, answers):
    """Bug: a refill that recomputes and overwrites what is there; an overwrite with other values breaks exactness later."""
    for encoding, gate in itertools.product((0, 2), ("full", "cyclic")):
        model, first, written = dmtd(base, encoding, gate=gate), {}, {}
        choose = Forced(answers)
        with torch.no_grad():
            state = model.prefill(*padded(prompts), cycle_length=[1, 2, 3, 4, 5, 1, 2, 3, 4])
            for _ in range(NEW_TOKENS):
                model.step(state, choose)
                for layer, (keys, values) in enumerate(zip(state.cache.keys, state.cache.values, strict=True)):
                    both = torch.cat([keys, values], -1)[:, :, : state.cache.bin_slot]
                    for row, slot in both.abs().sum((1, 3)).nonzero().tolist():
                        now = both[row, :, slot]
                        kept = first.setdefault((layer, row, slot), now.clone())
                        assert torch.equal(kept, now), (layer, row, slot)
        for layer, row, slot in first:
            written.setdefault((layer, row), set()).add(slot)
        for (layer, row), slots in written.items():
            expected = state.refilled[row] if encoding <= layer < 3 else state.lengths[row]
            assert slots == set(range(expected)), "a gap-free prefix"


def test_wrong_cycle_lengths_are_refused(base, prompts):
    """Bug: a cycle length of 0, 2.5 or True, or one too few for the batch, reaches the arithmetic."""
    model, (ids, mask) = dmtd(base), padded(prompts)
    for wrong in (0, -1, 2.5, True, "3", [3, 3]):
        with pytest.raises(UserError, match="cycle_length"):
            model.prefill(ids, mask, cycle_length=wrong)
    with pytest.raises(UserError, match="did you mean 'cycle_length'"):
        model.prefill(ids, mask, cycle_lenght=3)
