"""The divergence from a source model beside the cross-entropy: its formula, every method, packing, adapters, and weight 0."""

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F

from polydecode.config import TrainConfig
from polydecode.convert import convert, save_checkpoint
from polydecode.errors import UserError
from polydecode.ops.distillation import SourceRows, coarse_kl, coarsened, most_likely, token_losses
from polydecode.ops.losses import token_cross_entropy
from polydecode.ops.sampling import RowGenerators
from polydecode.train.parameters import prepare_parameters
from polydecode.train.source import Source, frozen_base, shares_weights
from tiny import batch_of, packed_batch, random_rows, tiny_base, tiny_model
from tiny_tokenizer import tiny_tokenizer

METHODS = ("autoregressive", "dmtd", "block_diffusion")
V, N, D = 23, 9, 6


def two_models():
    generator = torch.Generator().manual_seed(1)
    student_VD, source_VD = (torch.randn(V, D, generator=generator, dtype=torch.float64) for _ in range(2))
    hidden_ND = torch.randn(N, D, generator=generator, dtype=torch.float64)
    target_N = torch.randint(0, V, (N,), generator=generator)
    return (lambda x: x @ student_VD.T), (lambda x: x @ source_VD.T), hidden_ND, target_N


def full_kl(student_NV, source_NV, temperature=1.0):
    """Written from the definition, without buckets."""
    p, q = (source_NV / temperature).softmax(-1), (student_NV / temperature).softmax(-1)
    return (p * (p.log() - q.log())).sum(-1)


def rows(head, hidden_ND, k, weight=0.5, temperature=1.0):
    ids, log_probs = most_likely(hidden_ND, head, k, temperature)
    return SourceRows(ids, log_probs, torch.ones(len(ids), dtype=torch.bool), weight, temperature)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("k", [V - 1, V, V + 5])
def test_with_all_tokens_it_is_the_full_divergence(k, temperature):
    """Pins: a bucket that is wrong or NaN where nothing is left for it; also its gradient."""
    student, source, hidden_ND, target_N = two_models()
    said = rows(source, hidden_ND, k, weight=1.0, temperature=temperature)
    mine, theirs = (hidden_ND.clone().requires_grad_() for _ in range(2))
    losses = token_losses(mine, target_N, said, student)
    expected_N = full_kl(student(theirs), source(hidden_ND), temperature)
    assert torch.allclose(losses.kl_N, expected_N.detach(), atol=1e-12)
    losses.loss_N.sum().backward()
    (temperature**2 * expected_N).sum().backward()
    assert torch.allclose(mine.grad, theirs.grad, atol=1e-12)


def test_fewer_tokens_bound_it_from_below_and_rise_to_it():
    """Pins: dropping the rest of the mass, where the divergence can turn negative, or renormalising, where it can be above."""
    student, source, hidden_ND, target_N = two_models()
    by_k = [token_losses(hidden_ND, target_N, rows(source, hidden_ND, k), student).kl_N for k in range(1, V + 1)]
    assert (by_k[0] >= 0).all()
    assert all((after >= before - 1e-12).all() for before, after in itertools.pairwise(by_k))
    assert torch.allclose(by_k[-1], full_kl(student(hidden_ND), source(hidden_ND)), atol=1e-12)
    same = token_losses(hidden_ND, target_N, rows(source, hidden_ND, 3), source)
    assert same.kl_N.abs().max() < 1e-12


def test_the_bucket_survives_rounding():
    """Pins: log(1 - sum) of a sure source in float32, which is -inf or noise."""
    logits_nV = torch.zeros(1, V)
    logits_nV[0, 0] = 40.0
    log_probs = coarsened(logits_nV, torch.tensor([[0]]), 1.0)
    expected = coarsened(logits_nV.double(), torch.tensor([[0]]), 1.0)
    assert torch.allclose(log_probs.double(), expected, rtol=1e-5)
    assert coarse_kl(log_probs, coarsened(torch.zeros(1, V), torch.tensor([[0]]), 1.0)).isfinite().all()


def test_the_mixture_and_what_the_source_does_not_know():
    """Pins: the weights swapped, or a target without a source losing half of its cross-entropy."""
    student, source, hidden_ND, target_N = two_models()
    said = rows(source, hidden_ND, 5, weight=0.3, temperature=2.0)
    said.known_N = torch.arange(N) % 3 != 0
    losses = token_losses(hidden_ND, target_N, said, student)
    entropy_N = F.cross_entropy(student(hidden_ND), target_N, reduction="none")
    mixed_N = 0.7 * entropy_N[said.known_N] + 0.3 * 4 * losses.kl_N
    assert torch.allclose(losses.loss_N[said.known_N], mixed_N)
    assert torch.equal(losses.loss_N[~said.known_N], losses.cross_entropy_N[~said.known_N])


def test_chunks_change_nothing_and_bound_the_logits(monkeypatch):
    """Pins: (N, V) logits at once, in source or student."""
    student, source, hidden_ND, target_N = two_models()
    whole = token_losses(hidden_ND, target_N, rows(source, hidden_ND, 5), student)
    monkeypatch.setattr("polydecode.ops.losses.CHUNK_TOKENS", 2)
    seen = []

    def watched(head):
        def call(x):
            seen.append(len(x))
            return head(x)

        return call

    said = rows(watched(source), hidden_ND, 5)
    parts = token_losses(hidden_ND.clone().requires_grad_(), target_N, said, watched(student))
    parts.loss_N.sum().backward()
    assert torch.allclose(whole.loss_N, parts.loss_N.detach(), atol=1e-12)
    assert max(seen) == 2


def test_without_a_source_it_is_the_plain_loss_bit_for_bit():
    """Pins: W = 0 changing a rounding of what was measured before."""
    student, _, hidden_ND, target_N = two_models()
    loss_N, hit_N = token_cross_entropy(hidden_ND.float(), target_N, lambda x: student(x.double()).float())
    losses = token_losses(hidden_ND.float(), target_N, None, lambda x: student(x.double()).float())
    assert torch.equal(losses.loss_N, loss_N)
    assert torch.equal(losses.hit_N, hit_N)
    assert losses.sums() == {}


# --- methods ---------------------------------------------------------------------------------------------------------


def config(**changes):
    return TrainConfig(checkpoint="c", out="o", data=["d"], **({"distill_weight": 1.0, "distill_top_k": 61} | changes))


def source_of(base, **changes):
    return Source(copy.deepcopy(base), None, config(**changes))


PROMPTS, ANSWERS = random_rows([4, 6, 3], seed=1, low=3, high=60), random_rows([7, 5, 8], seed=2, low=3, high=60)


def loss(model, batch, source=None):
    batch.source = None if source is None else source.read(batch)
    return model.loss(batch, RowGenerators(list(range(len(batch.input_ids)))))


def test_the_source_is_the_full_depth_model_given_the_clean_prefix():
    """Pins: probabilities shifted by one place, or read through a neighbour's padding."""
    base = tiny_base()
    said = source_of(base).read(batch_of(PROMPTS, ANSWERS))
    for b, (prompt, answer) in enumerate(zip(PROMPTS, ANSWERS, strict=True)):
        logits_TV = base(torch.tensor([prompt + answer])).logits[0]
        for t in range(len(prompt), len(prompt) + len(answer)):
            expected_V = logits_TV[t - 1].log_softmax(-1)
            assert torch.allclose(expected_V[said.ids_BTk[b, t]], said.log_probs_BTK[b, t, :-1], atol=1e-9)


def test_a_model_that_is_its_source_has_no_divergence():
    """Pins: any difference between how the two read."""
    model = tiny_model("autoregressive")
    out = loss(model, batch_of(PROMPTS, ANSWERS), source_of(model.base))
    assert out.loss.abs() < 1e-9
    assert abs(out.sums["source_kl"]) < 1e-9
    model = tiny_model("dmtd", cycle_length=1)
    assert loss(model, batch_of(PROMPTS, ANSWERS), source_of(model.base)).loss.abs() < 1e-9


@pytest.mark.parametrize("method", METHODS)
def test_the_loss_is_the_mixture_of_its_two_logged_parts(method):
    """Pins: a method that passes the rows of other targets, or drops one of the parts."""
    settings = {"min_noise_level": 1 - 1e-9} if method == "block_diffusion" else {}
    model, base = tiny_model(method, **settings), tiny_base(seed=5)
    batch = batch_of(PROMPTS, ANSWERS)
    plain = loss(model, batch)
    half = loss(model, batch, source_of(base, distill_weight=0.5))
    kl = half.sums["source_kl"] / half.sums["source_kl_count"]
    assert half.num_targets == plain.num_targets == half.sums["source_kl_count"] == half.sums["cross_entropy_count"]
    assert half.loss.item() == pytest.approx(0.5 * plain.loss.item() + 0.5 * kl, rel=1e-6)
    assert half.sums["accuracy"] == plain.sums["accuracy"]
    assert "source_kl" not in plain.sums


@pytest.mark.parametrize("method", METHODS)
def test_the_divergence_of_each_target_is_from_its_own_prefix(method):
    """Pins: rows of the source taken in another order than those of the model, which a mean would hide. The source is one
    that says exactly one token per place, so the divergence is -log q of that token: the cross-entropy of a shifted text."""
    model, base = tiny_model(method), tiny_base(seed=5)
    batch = batch_of(PROMPTS, ANSWERS)
    source = source_of(base)
    said = source.read(batch)
    sure = torch.full_like(said.log_probs_BTK, -torch.inf)
    where = (said.ids_BTk == batch.input_ids[..., None]).nonzero(as_tuple=True)
    sure[where] = 0.0
    said.log_probs_BTK = sure
    plain = loss(model, batch)
    batch.source = said
    taught = model.loss(batch, RowGenerators([0, 1, 2]))
    assert taught.loss.item() == pytest.approx(plain.loss.item(), rel=1e-6)


@pytest.mark.parametrize("method", ["autoregressive", "dmtd"])
def test_packed_documents_are_as_separate_ones(method):
    """Pins: the source reading across documents, or a document's first token taken as a target."""
    model, base = tiny_model(method), tiny_base(seed=5)
    separate = loss(model, batch_of(PROMPTS, ANSWERS), source_of(base))
    packed = loss(model, packed_batch(PROMPTS, ANSWERS), source_of(base))
    assert packed.num_targets == separate.num_targets
    assert packed.loss.item() == pytest.approx(separate.loss.item(), rel=1e-9)


def test_packed_documents_have_the_same_source_distribution():
    """Pins: as above for every method, since the source is read before the method draws."""
    source = source_of(tiny_base(seed=5), distill_top_k=5)
    separate = source.read(batch_of(PROMPTS, ANSWERS))
    packed = source.read(packed_batch(PROMPTS, ANSWERS))
    assert torch.equal(separate.ids_BTk[separate.known_BT], packed.ids_BTk[packed.known_BT])
    assert torch.allclose(separate.log_probs_BTK[separate.known_BT], packed.log_probs_BTK[packed.known_BT], atol=1e-9)


def test_filling_behind_an_end_keeps_its_cross_entropy():
    """Pins: block diffusion taking the end token's distribution for the filling behind it."""
    model = tiny_model("block_diffusion", fill_last_block=True, min_noise_level=1 - 1e-9)
    batch = batch_of([PROMPTS[0]], [[5, 6, 7, 8, 9, 2]])
    out = loss(model, batch, source_of(tiny_base(seed=5)))
    assert out.num_targets == 8
    assert out.sums["source_kl_count"] == 6
    assert out.sums["cross_entropy_count"] == 6, "the log leaves filling out, the loss does not"


# --- which source ----------------------------------------------------------------------------------------------------


def test_adapters_are_switched_off_and_no_copy_is_made():
    """Pins: a second copy of the weights in memory, a source that trains along, adapters left off or frozen afterwards."""
    settings = config(lora_rank=2)
    model = tiny_model("dmtd", tiny_base(dtype=torch.float32))
    before = source_of(model.base).read(batch_of(PROMPTS, ANSWERS))
    assert frozen_base(model, tiny_tokenizer(), settings) is None
    adapter = prepare_parameters(model, settings)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.5)
    source = Source(model.base, adapter, settings)
    after = source.read(batch_of(PROMPTS, ANSWERS))
    assert torch.allclose(before.log_probs_BTK, after.log_probs_BTK, atol=1e-5)
    assert trained == {name for name, p in model.named_parameters() if p.requires_grad}
    moved = loss(tiny_model("dmtd", model.base, cycle_length=1), batch_of(PROMPTS, ANSWERS), source)
    assert moved.sums["source_kl"] > 0.1, "the adapter is on again in the model's own pass"


def test_a_copy_is_made_where_weights_move():
    """Pins: a source that is the model being trained, or adapters beside trained embeddings taken for untouched weights."""
    model = tiny_model("dmtd", tiny_base(dtype=torch.float32))
    frozen = frozen_base(model, tiny_tokenizer(), config())
    assert frozen is not None
    assert not any(p.requires_grad for p in frozen.parameters())
    assert {p.data_ptr() for p in frozen.parameters()}.isdisjoint(p.data_ptr() for p in model.parameters())
    assert shares_weights(model, config(lora_rank=2))
    assert not shares_weights(model, config(lora_rank=2, train_norms=True))
    assert not shares_weights(tiny_model("block_diffusion"), config(lora_rank=2))
    assert frozen_base(model, tiny_tokenizer(), config(distill_weight=0.0, distill_top_k=64)) is None


def test_a_source_with_another_vocabulary_is_refused(tmp_path):
    """Pins: a divergence between unlike tokens."""
    tokenizer = tiny_tokenizer()
    other = tiny_tokenizer(290)
    for name, its in (("same", tokenizer), ("other", other)):
        base = tiny_base(vocab_size=len(its), dtype=torch.float32)
        save_checkpoint(convert(base, method="autoregressive"), its, tmp_path / name)
    model = convert(tiny_base(vocab_size=len(tokenizer), dtype=torch.float32), method="autoregressive")
    assert frozen_base(model, tokenizer, config(distill_source=str(tmp_path / "same"))) is not None
    with pytest.raises(UserError, match="another vocabulary"):
        frozen_base(model, tokenizer, config(distill_source=str(tmp_path / "other")))


@pytest.mark.parametrize(
    "wrong",
    [{"distill_weight": 1.5}, {"distill_top_k": 0}, {"distill_temperature": 0.0}, {"distill_weight": 0.0}],
)
def test_settings_out_of_range_are_refused(wrong):
    """Pins: a weight above 1, which turns the cross-entropy around; settings without effect (top_k without a weight)."""
    with pytest.raises(UserError, match="distill_"):
        config(**wrong).check()
