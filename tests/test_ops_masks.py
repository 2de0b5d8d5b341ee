"""Masks are their drawings; eager and SDPA attention agree; sliding windows decode as they read."""

import itertools
import re

import pytest
import torch

from polydecode.errors import UserError
from polydecode.ops import masks
from reference_dmtd import reference_logits
from tiny import forced_logits, padded, random_rows, tiny_base, tiny_model

WINDOWED = {
    "mistral": {"sliding_window": 3},
    "qwen2": {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 2},
}


def drawing(function) -> list[list[int]]:
    """The 0s and 1s in a docstring."""
    return [
        [int(x) for x in line.split()]
        for line in function.__doc__.splitlines()
        if re.fullmatch(r"\s+([01] )+[01]", line)
    ]


def drawn(predicate, size: int = 4) -> list[list[int]]:
    q, k = torch.arange(size)[:, None], torch.arange(size)[None]
    return predicate(q, k).int().tolist()


def test_masks_are_as_drawn():
    """Bug: < for <=, a window one too wide, documents that see one another; and drawings that no longer tell the truth."""
    document = torch.tensor([0, 0, 1, 1])
    assert drawn(masks.causal) == drawing(masks.causal) != []
    assert drawn(masks.sliding_window(2)) == drawing(masks.sliding_window) != []
    packed = masks.same_document(masks.causal, document[:, None], document[None])
    assert drawn(packed) == drawing(masks.same_document) != []


def test_materialised_masks():
    """Bug (known fault 28): a boolean mask handed to eager attention, or -inf in an additive one."""
    allowed = torch.tensor([[[True, False], [True, True]]])
    assert torch.equal(masks.materialise(allowed, "sdpa", torch.float32), allowed[:, None])
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        additive = masks.materialise(allowed, "eager", dtype)
        assert additive.dtype == dtype
        assert additive.isfinite().all()
        assert ((additive == 0) == allowed[:, None]).all()
    with pytest.raises(UserError, match="flash_attention_2"):
        masks.materialise(allowed, "flash_attention_2", torch.float32)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2"])
def test_eager_equals_sdpa(family):
    """Bug: the boolean mask in eager attention (0.09 off, no error), a causal flag lost; full pass, cache and padding."""
    overrides, prompts = WINDOWED.get(family, {}), random_rows([1, 4, 9], seed=1)
    answers = torch.tensor(random_rows([7] * 3, seed=2))
    models = [tiny_base(family, dtype=torch.float32, attention=a, **overrides) for a in ("sdpa", "eager")]
    for method in ("autoregressive", "dmtd"):
        sdpa, eager = (tiny_model(method, base) for base in models)
        ids = torch.tensor(random_rows([11, 11], seed=3))
        with torch.no_grad():
            assert (sdpa.logits(ids) - eager.logits(ids)).abs().max() < 1e-4, (
                "float32; a wrong mask is off by 0.1 or more"
            )
        shown = [forced_logits(model, *padded(prompts), answers) for model in (sdpa, eager)]
        assert (shown[0] - shown[1]).abs().max() < 1e-4


@pytest.mark.parametrize("family", list(WINDOWED))
def test_sliding_windows_cached_equals_full(family):
    """Bug: a window counted over cache slots of a padded row or cut at the refill; window 3, prompts up to 9."""
    base, prompts = tiny_base(family, **WINDOWED[family]), random_rows([1, 2, 3, 4, 9], seed=1)
    answers = torch.tensor(random_rows([9] * 5, seed=2))
    plain = tiny_base(family)
    for encoding, cycle_length in itertools.product((0, 2), (1, 2, 4, 5)):
        model = tiny_model("dmtd", base, num_encoding_layers=encoding)
        cached = forced_logits(model, *padded(prompts), answers, cycle_length=cycle_length)
        for b, prompt in enumerate(prompts):
            ids = torch.tensor([[*prompt, *answers[b].tolist()]])
            with torch.no_grad():
                full_TV = model.logits(ids, prompt_lengths=[len(prompt)], cycle_length=cycle_length)[0]
            assert (cached[b] - full_TV[len(prompt) - 1 : -1]).abs().max() < 1e-9
    ids = prompts[4] + answers[4].tolist()
    expected = reference_logits(base, ids, 9, 5, 2, 2)[8:-1]
    assert (cached[4] - expected).abs().max() < 1e-9
    assert (reference_logits(plain, ids, 9, 5, 2, 2)[8:-1] - expected).abs().max() > 1e-3, "the window matters here"


def flex_and_sdpa(method, length, device, backward):
    """(losses, gradients) of both attentions over padded and packed rows with `length` tokens in the widest."""
    from polydecode.ops.sampling import RowGenerators
    from tiny import batch_of, packed_batch, tiny_model

    prompts = random_rows([3, 1, 5], seed=1, high=60)
    apart = random_rows([length - 3, 40, 10], seed=2, high=60)
    together = random_rows([length - 9 - 50, 40, 10], seed=2, high=60)
    found = []
    for attention in ("sdpa", "flex_attention"):
        base = tiny_base(dtype=torch.float32, layers=2, attention=attention, hidden_size=64, head_dim=16)
        model = tiny_model(method, base).to(device)
        losses = []
        for batch in (batch_of(prompts, apart), packed_batch(prompts, together)):
            moved = type(batch)(**{k: v if v is None else v.to(device) for k, v in vars(batch).items()})
            with torch.set_grad_enabled(backward):
                losses.append(model.loss(moved, RowGenerators([1, 2, 3])).loss)
        if backward:
            sum(losses).backward()
        gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
        found.append((torch.stack(losses).detach(), torch.cat(gradients) if backward else torch.zeros(1)))
    return found


LENGTHS = [127, 128, 129, 257]
"""Around the 128 of FlexAttention's blocks."""


@pytest.mark.parametrize("shape", [(2, 300, 300), (1, 128, 384), (3, 5, 257), (1, 1, 1), (2, 256, 130)])
@pytest.mark.parametrize("pairs", [1, 10**9])
def test_block_mask_is_the_one_torch_makes(shape, pairs, monkeypatch):
    """Bug: tiles lost at an edge or between two strips, or a tile read whole that is read in part; the grid held at once."""
    from torch.nn.attention.flex_attention import create_block_mask

    from polydecode.ops import masks

    monkeypatch.setattr(masks, "GRID_PAIRS", pairs)
    rows, queries, keys = shape
    offset_B = torch.tensor([0, 40, 129])

    def pattern(b, q, k):
        return (k <= q + offset_B[b]) & ((q - k < 150) | (k < 20))

    seen = []

    def watched(b, q, k):
        if q.dim() == 2:
            seen.append(len(q))
        return pattern(b, q, k)

    ours = masks.mask_of(watched, shape, "flex_attention", torch.float32, torch.device("cpu"))
    theirs = create_block_mask(lambda b, h, q, k: pattern(b, q, k), rows, None, queries, keys, device="cpu")
    assert sum(seen) == queries
    assert pairs > 1 or max(seen) <= 128
    assert ours.shape == theirs.shape
    assert torch.equal(ours.to_dense(), theirs.to_dense())
    assert torch.equal(ours.kv_num_blocks, theirs.kv_num_blocks)
    assert torch.equal(ours.full_kv_num_blocks, theirs.full_kv_num_blocks)
    assert torch.equal(ours.q_num_blocks, theirs.q_num_blocks)
    for numbers, mine, other in (
        (ours.kv_num_blocks, ours.kv_indices, theirs.kv_indices),
        (ours.full_kv_num_blocks, ours.full_kv_indices, theirs.full_kv_indices),
    ):
        here = torch.arange(mine.shape[-1]) < numbers[..., None]
        assert torch.equal(mine[here], other[here])


@pytest.fixture
def flex_on_cpu(monkeypatch):
    """FlexAttention as torch's own definition of it (dense, not compiled), with the backward that its CPU kernel lacks; gives the
    function, to be wrapped."""
    from torch.nn.attention import flex_attention as module
    from transformers.integrations import flex_attention as integration

    monkeypatch.setattr(module, "_validate_device", lambda *_: None)

    def use(attention):
        monkeypatch.setattr(
            integration,
            "compile_friendly_flex_attention",
            lambda q, k, v, training=False, **told: attention(q, k, v, **told),
        )

    use(module.flex_attention)
    return use


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("method", ["block_diffusion", "dmtd"])
def test_flex_attention_gives_the_loss_and_gradients_of_sdpa(method, length, flex_on_cpu):
    """Bug: another rule for the GPU's kernel: padded and packed, forward and backward."""
    (sdpa, sdpa_gradients), (flex, flex_gradients) = flex_and_sdpa(method, length, "cpu", backward=True)
    assert (sdpa - flex).abs().max() < 1e-4
    assert sdpa_gradients.abs().max() > 1e-3
    assert (sdpa_gradients - flex_gradients).abs().max() < 1e-4 * sdpa_gradients.abs().max()


@pytest.mark.parametrize("method", ["block_diffusion", "dmtd"])
def test_flex_attention_is_not_compiled_for_each_length(method, flex_on_cpu):
    """Bug (known fault 30): one compilation per length, until the compiler gives up and falls back to dense attention. Counted is
    how often the tracer starts anew, which does not depend on what it compiles for."""
    import random

    from torch._dynamo.utils import counters
    from torch.nn.attention.flex_attention import flex_attention

    from polydecode.ops.sampling import RowGenerators
    from tiny import batch_of, tiny_model

    torch.compiler.reset()
    flex_on_cpu(torch.compile(flex_attention, backend="eager"))
    base = tiny_base(dtype=torch.float32, layers=3, attention="flex_attention", hidden_size=64, head_dim=16)
    model, lengths = tiny_model(method, base), random.Random(0)
    before = counters["stats"]["unique_graphs"]
    with torch.no_grad():
        for _ in range(50):
            rows = [random_rows([n], seed=n, high=60)[0] for n in lengths.choices(range(20, 300), k=2)]
            model.loss(batch_of(random_rows([3, 5], seed=1, high=60), rows), RowGenerators([1, 2]))
    assert 1 <= counters["stats"]["unique_graphs"] - before <= 6


@pytest.mark.gpu
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("method", ["block_diffusion", "dmtd"])
def test_compiled_flex_attention_gives_the_gradients_of_sdpa(method, length):
    """Bug: the same compiled, which this project has not run yet."""
    (sdpa, sdpa_gradients), (flex, flex_gradients) = flex_and_sdpa(method, length, "cuda", backward=True)
    assert (sdpa - flex).abs().max() < 1e-3
    assert (sdpa_gradients - flex_gradients).abs().max() < 1e-2 * sdpa_gradients.abs().max()
