"""Phases of training rows, and the loss: packed = separate, chunked = whole, training pass = inference pass."""

import itertools
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from polydecode.errors import UserError
from polydecode.methods.batch import Batch
from polydecode.methods.dmtd.phase import PROMPT, phases
from polydecode.ops.losses import token_cross_entropy
from polydecode.ops.sampling import RowGenerators
from tiny import VOCAB, batch_of, forced_logits, packed_batch, padded, random_rows, tiny_base, tiny_model

EXACT = 1e-10
"""Float64 in another order of summing."""
GOLDEN = Path(__file__).parent / "golden" / "dmtd_phases.txt"
KINDS = list(itertools.product((0, 2), ("replace", "add"), ("full", "cyclic")))


@pytest.fixture(scope="module")
def base():
    return tiny_base()


# --- phases ----------------------------------------------------------------------------------------------------------


def drawings():
    for block in GOLDEN.read_text().split("== ")[1:]:
        name, *lines = [line for line in block.splitlines() if line and not line.startswith("#")]
        yield name, {key: values for key, *values in (line.split() for line in lines)}


def row_batch(kinds: list[str], documents: list[int] | None = None) -> Batch:
    """A batch of one row of 'p', 'a' and '.' tokens."""
    one_T = torch.tensor([[1 if kind != "." else 0 for kind in kinds]])
    is_prompt = torch.tensor([[kind == "p" for kind in kinds]])
    documents_1T = None if documents is None else torch.tensor([documents])
    return Batch(torch.zeros_like(one_T), one_T, is_prompt, one_T.bool() & ~is_prompt, documents_1T)


@pytest.mark.parametrize(("name", "case"), list(drawings()), ids=lambda x: x if isinstance(x, str) else "")
def test_phases_are_as_drawn(name, case):
    """Bugs (known faults 18, 73): phase counted from the row, across documents, or off by one at the answer's start."""
    documents = [int(d) for d in case["document"]] if "document" in case else None
    batch = row_batch(case["token"], documents)
    cycles = torch.tensor([int(case["cycle"][0])] * batch.num_documents())
    phase_T = phases(batch, cycles, case["gate"][0], None)[0].tolist()
    drawn = [
        "." if wanted == "." else "P" if p == PROMPT else str(p)
        for p, wanted in zip(phase_T, case["phase"], strict=True)
    ]
    assert " ".join(drawn) == " ".join(case["phase"])


segments = st.lists(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 5)), min_size=1, max_size=3).filter(
        lambda turns: sum(map(sum, turns)) > 0
    ),
    min_size=1,
    max_size=4,
)


@given(documents=segments, cycle=st.integers(1, 6), gate=st.sampled_from(["full", "cyclic"]))
def test_phases_equal_a_walk_over_the_tokens(documents, cycle, gate):
    """Bug: any boundary of the vectorised phases (turn, document, empty prompt) that a plain loop gets right."""
    kinds, numbers, expected = [], [], []
    for number, turns in enumerate(documents):
        position, since = 0, None  # since: distance from the last head candidate, None before any
        for prompt, answer in turns:
            for kind in "p" * prompt + "a" * answer:
                if gate == "cyclic":
                    expected.append(position % cycle)
                elif kind == "p":
                    expected.append(PROMPT)
                    since = 0
                else:
                    since = 0 if since is None else since + 1
                    expected.append(since % cycle)
                kinds.append(kind)
                numbers.append(number)
                position += 1
    batch = row_batch(kinds, numbers)
    found = phases(batch, torch.tensor([cycle] * batch.num_documents()), gate, None)[0].tolist()
    assert found == expected


def text_batch(lengths, width=None):
    input_ids, mask = padded(random_rows(lengths, seed=1), "right")
    if width is not None:
        input_ids = torch.nn.functional.pad(input_ids, (0, width - input_ids.shape[1]))
        mask = torch.nn.functional.pad(mask, (0, width - mask.shape[1]))
    return Batch(input_ids, mask, torch.zeros_like(mask).bool(), mask.bool())


def test_random_offsets_belong_to_the_row():
    """Bug (known fault 20): an offset that depends on the batch a row sits in, on its padding or on its neighbours."""
    lengths, seeds, cycles = [9, 4, 12, 7], [5, 6, 7, 8], torch.tensor([3, 4, 5, 3])
    together = phases(text_batch(lengths), cycles, "full", RowGenerators(seeds))
    for b, length in enumerate(lengths):
        row = text_batch(lengths)
        alone = Batch(
            *(t[b : b + 1, :length] for t in (row.input_ids, row.attention_mask, row.is_prompt, row.loss_mask))
        )
        phase_T = phases(alone, cycles[b : b + 1], "full", RowGenerators(seeds[b : b + 1]))[0]
        assert phase_T.tolist() == together[b, :length].tolist()
        assert ((phase_T[1:] - phase_T[:-1]) % cycles[b] == 1 % cycles[b]).all()


def test_random_offsets_are_uniform_and_per_document():
    """Bug: text always starting at a head (positions 0 mod c would be the only phase trained), or one offset per row."""
    documents = torch.tensor([[0] * 6 + [1] * 6])
    ones = torch.ones_like(documents)
    batch = Batch(documents * 0, ones, ones.bool() & False, ones.bool(), documents)
    counts = torch.zeros(3, 3)
    for seed in range(300):
        phase_T = phases(batch, torch.tensor([3, 3]), "full", RowGenerators([seed, 1000 + seed]))[0]
        counts[phase_T[0], phase_T[6]] += 1
    assert counts.min() > 15, "300 / 9 = 33 on average"


def test_a_prompt_fixes_the_phase_whatever_the_seed():
    """Bug: the random offset of plain text applied to prompt/answer documents, so training and decoding disagree."""
    for documents in (None, [0] * 8):
        batch = row_batch(list("pppaaaaa"), documents)
        for seed in range(5):
            phase_T = phases(batch, torch.tensor([3]), "full", RowGenerators([seed]))[0]
            assert phase_T.tolist() == [PROMPT, PROMPT, PROMPT, 1, 2, 0, 1, 2]


# --- the loss --------------------------------------------------------------------------------------------------------

PROMPTS, ANSWERS = random_rows([3, 1, 5], seed=11), random_rows([7, 4, 9], seed=12)


def seeds(batch):
    return RowGenerators(list(range(len(batch.input_ids))))


def test_packed_documents_are_separate_documents(base):
    """Bugs (known fault 18): attention, position or phase leaking from A into B; B's first token predicted from A's last."""
    for attention, (encoding, merge, gate) in itertools.product(("sdpa", "eager"), KINDS):
        model = tiny_model(
            "dmtd", tiny_base(attention=attention), num_encoding_layers=encoding, merge=merge, prompt_gate=gate
        )
        packed, apart = packed_batch(PROMPTS, ANSWERS), batch_of(PROMPTS, ANSWERS)
        for everything in (False, True):
            if everything:
                packed.loss_mask, apart.loss_mask = torch.ones_like(packed.loss_mask), apart.attention_mask.bool()
            with torch.no_grad():
                one, three = model.loss(packed, seeds(packed)), model.loss(apart, seeds(apart))
            assert one.num_targets == three.num_targets == (20 + 9 - 3 if everything else 20)
            tolerance = EXACT if attention == "sdpa" else 1e-5  # eager softmax is float32
            assert abs(float(one.loss - three.loss)) < tolerance, (attention, encoding, merge, gate)
            assert one.sums.keys() == three.sums.keys()
            for name, value in one.sums.items():
                assert abs(value - three.sums[name]) < 20 * tolerance, name


def test_the_loss_is_the_token_weighted_mean_of_rows(base):
    """Bug: a mean of row means, or padding counted as targets."""
    model = tiny_model("dmtd", base, num_encoding_layers=2)
    batch = batch_of(PROMPTS, ANSWERS)
    with torch.no_grad():
        together = model.loss(batch, seeds(batch))
        alone = [model.loss(b, seeds(b)) for b in (batch_of([p], [a]) for p, a in zip(PROMPTS, ANSWERS, strict=True))]
    weighted = sum(float(o.loss) * o.num_targets for o in alone) / sum(o.num_targets for o in alone)
    assert abs(float(together.loss) - weighted) < EXACT
    assert together.num_targets == sum(o.num_targets for o in alone) == 20


def test_sums_by_phase_add_up(base):
    """Bug: a target counted under no phase or under two, e.g. the first answer token, whose predictor is a prompt token."""
    for gate in ("full", "cyclic"):
        model = tiny_model("dmtd", base, prompt_gate=gate, cycle_length=4)
        batch = batch_of(PROMPTS, ANSWERS)
        out = model.loss(batch, seeds(batch))
        names = range(4)
        assert sum(out.sums[f"loss_phase_{p}_count"] for p in names) == out.num_targets == out.sums["accuracy_count"]
        assert abs(sum(out.sums[f"loss_phase_{p}"] for p in names) - float(out.loss.detach()) * out.num_targets) < 1e-8
        assert sum(out.sums[f"accuracy_phase_{p}"] for p in names) == out.sums["accuracy"]
    model = tiny_model("dmtd", base, cycle_length=3)
    batch = batch_of([[1, 2]], [[3, 4, 5, 6, 7]])
    counts = [model.loss(batch, seeds(batch)).sums[f"loss_phase_{p}_count"] for p in range(3)]
    assert counts == [2, 2, 1], "predictors: last prompt token, 1, 2, 0, 1"


def test_the_loss_is_the_logits_cross_entropy(base):
    """Bug (known fault 12): a target shifted by one, the end token left out, or training on another forward than `logits`."""
    for encoding, merge, gate in KINDS:
        model = tiny_model("dmtd", base, num_encoding_layers=encoding, merge=merge, prompt_gate=gate)
        batch = batch_of(PROMPTS, ANSWERS)
        naive, lengths = [], [len(p) for p in PROMPTS]
        logits_BTV = model.logits(batch.input_ids, batch.attention_mask, prompt_lengths=lengths)
        for b, (n, answer) in enumerate(zip(lengths, ANSWERS, strict=True)):
            log_p = logits_BTV[b, n - 1 : n - 1 + len(answer)].log_softmax(-1)
            naive.append(-log_p[range(len(answer)), answer])
        expected = torch.cat(naive).mean()
        parameters = [p for p in model.parameters() if p.requires_grad]
        wanted = torch.autograd.grad(expected, parameters)
        out = model.loss(batch, seeds(batch))
        assert abs(float((out.loss - expected).detach())) < EXACT
        for got, want in zip(torch.autograd.grad(out.loss, parameters), wanted, strict=True):
            assert (got - want).abs().max() < 1e-9


def test_training_sees_what_decoding_sees(base):
    """Bug: training pass and inference pass differ (the stock cached generate of the paper's release is silently cycle 1)."""
    for encoding, merge, gate in KINDS:
        model = tiny_model("dmtd", base, num_encoding_layers=encoding, merge=merge, prompt_gate=gate)
        batch = batch_of(PROMPTS, [a[:4] for a in ANSWERS])
        answers = torch.tensor([a[:4] for a in ANSWERS])
        shown = forced_logits(model, *padded(PROMPTS), answers).log_softmax(-1)
        expected = -shown.gather(-1, answers[..., None]).mean()
        assert abs(float((model.loss(batch, seeds(batch)).loss - expected).detach())) < EXACT


def test_score_is_the_sum_of_log_probabilities(base):
    """Bug: a mean instead of a sum, a row's targets counted to another row, a random phase in an exact score."""
    for name, settings in (
        ("autoregressive", {}),
        *(("dmtd", {"merge": m, "prompt_gate": g}) for _, m, g in KINDS[:4]),
    ):
        model, batch = tiny_model(name, base, **settings), batch_of(PROMPTS, ANSWERS)
        options = {"prompt_lengths": [len(p) for p in PROMPTS]} if name == "dmtd" else {}
        with torch.no_grad():
            score = model.score(batch)
            logits_BTV = model.logits(batch.input_ids, batch.attention_mask, **options)
        assert score.exact
        assert score.num_targets.tolist() == [7, 4, 9]
        for b, (prompt, answer) in enumerate(zip(PROMPTS, ANSWERS, strict=True)):
            log_p = logits_BTV[b, len(prompt) - 1 : len(prompt) - 1 + len(answer)].log_softmax(-1)
            assert abs(float(log_p[range(len(answer)), answer].sum() - score.log_likelihood[b])) < 1e-9


def test_text_without_a_prompt_scores_from_a_head(base):
    """Bug: the score of plain text drawing a random phase, or depending on the batch."""
    model, batch = tiny_model("dmtd", base, merge="add"), text_batch([9, 4, 12])
    with torch.no_grad():
        score, again = model.score(batch), model.score(batch)
        logits_BTV = model.logits(batch.input_ids, batch.attention_mask, prompt_lengths=[0, 0, 0])
    assert torch.equal(score.log_likelihood, again.log_likelihood)
    log_p = logits_BTV[:, :-1].log_softmax(-1).gather(-1, batch.input_ids[:, 1:, None])[..., 0]
    expected = (log_p * batch.attention_mask[:, 1:]).sum(1)
    assert (score.log_likelihood - expected).abs().max() < 1e-9


def test_drawn_cycle_lengths_belong_to_the_row(base):
    """Bug: `training_cycle_lengths` drawn once per batch, or by the batch's order; the loss then depends on the split."""
    model = tiny_model("dmtd", base, training_cycle_lengths=[1, 2, 4, 5])
    batch = batch_of(PROMPTS, ANSWERS)
    with torch.no_grad():
        together = model.loss(batch, RowGenerators([3, 1, 4]))
        parts = [
            model.loss(batch_of([p], [a]), RowGenerators([s]))
            for p, a, s in zip(PROMPTS, ANSWERS, [3, 1, 4], strict=True)
        ]
        losses = {round(float(model.loss(batch, RowGenerators([s, s + 100, s + 200])).loss), 9) for s in range(30)}
    assert abs(float(together.loss) * 20 - sum(float(o.loss) * o.num_targets for o in parts)) < 1e-9
    assert len(losses) > 4, "different rows must get different lengths"


def test_a_batch_without_targets_gives_zero(base):
    """Bug: 0 / 0 = NaN poisons the step when a batch holds prompts only; the zero must still carry a gradient."""
    for name in ("autoregressive", "dmtd"):
        model, batch = tiny_model(name, base), batch_of(PROMPTS, [[], [], []])
        out = model.loss(batch, seeds(batch))
        assert out.num_targets == 0
        assert float(out.loss.detach()) == 0
        out.loss.backward()
        model.zero_grad()


def test_labels_are_refused(base):
    """Bug (known fault 32): forward(labels=) silently computing some other loss."""
    for name in ("autoregressive", "dmtd"):
        ids = torch.tensor([[1, 2, 3]])
        with pytest.raises(UserError, match="labels"):
            tiny_model(name, base)(ids, labels=ids)
        with pytest.raises(UserError, match="right"):
            tiny_model(name, base)(ids, attention_mask=torch.tensor([[0, 1, 1]]))


def test_settings_are_checked(base):
    """Bug: transformers' config classes take any name and any type in silence."""
    wrong = [
        ({"merge": "ad"}, "did you mean 'add'"),
        ({"prompt_gate": "none"}, "prompt_gate"),
        ({"cycle_length": 0}, "cycle_length"),
        ({"cycle_length": "3"}, "cycle_length"),
        ({"cycle_length": True}, "cycle_length"),
        ({"num_decoding_layers": 4, "num_encoding_layers": 2}, "at most 5"),
        ({"num_decoding_layers": -1}, "0 or more"),
        ({"training_cycle_lengths": []}, "training_cycle_lengths"),
        ({"training_cycle_lengths": [2, 0]}, "cycle_length"),
    ]
    for settings, message in wrong:
        with pytest.raises(UserError, match=message):
            tiny_model("dmtd", base, **settings)


# --- token cross-entropy ---------------------------------------------------------------------------------------------


def test_chunks_change_nothing_but_memory():
    """Bugs (known fault 31): (tokens, V) logits at once; a chunk's gradient lost; the last short chunk dropped."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(37, 16, generator=generator, dtype=torch.float64)
    weight = torch.randn(VOCAB, 16, generator=generator, dtype=torch.float64)
    target = torch.randint(0, VOCAB, (37,), generator=generator)
    hidden.requires_grad_(), weight.requires_grad_()
    naive = torch.nn.functional.cross_entropy(hidden @ weight.T, target, reduction="none")
    scale = torch.linspace(0.5, 2, 37, dtype=torch.float64)
    wanted = torch.autograd.grad((naive * scale).sum(), (hidden, weight))
    for chunk in (1, 7, 36, 37, 512):
        rows = []

        def head(x, rows=rows):
            rows.append(len(x))
            return x @ weight.T

        loss_N, hit_N = token_cross_entropy(hidden, target, head, chunk)
        got = torch.autograd.grad((loss_N * scale).sum(), (hidden, weight))
        assert max(rows) <= chunk
        assert sum(rows) == 2 * 37, "once in the forward, once recomputed in the backward"
        assert (loss_N - naive).abs().max() < 1e-12
        assert torch.equal(hit_N, (hidden @ weight.T).argmax(-1) == target)
        for a, b in zip(got, wanted, strict=True):
            assert (a - b).abs().max() < 1e-12


def test_the_models_head_sees_one_chunk_at_a_time(base, monkeypatch):
    """Bug: a method that calls the head itself before the loss; `logits` of a whole batch is the largest tensor there is."""
    import polydecode.ops.losses as losses

    monkeypatch.setattr(losses.token_cross_entropy, "__defaults__", (4,))
    for name in ("autoregressive", "dmtd"):
        model, rows = tiny_model(name, base), []
        calls = []
        hook = base.lm_head.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        bare = base.lm_head.forward

        def counted(x, bare=bare, rows=rows):
            rows.append(x.shape[:-1].numel())
            return bare(x)

        base.lm_head.forward = counted
        batch = batch_of(PROMPTS, ANSWERS)
        model.loss(batch, seeds(batch)).loss.backward()
        hook.remove()
        assert base.lm_head.forward is counted, "the loss leaves the head as it was"
        del base.lm_head.forward
        assert len(calls) == 1, "sharding sees one forward of the head, however many chunks there are"
        assert max(rows) <= 4
        assert sum(rows) == 40
        model.zero_grad()


def test_half_precision_logits_are_widened():
    """Bug: cross-entropy of bfloat16 logits, whose sum over the vocabulary rounds at 3 digits."""
    hidden, target = torch.randn(5, 8), torch.tensor([0, 1, 2, 3, 4])
    weight = torch.randn(VOCAB, 8)
    loss_N, _ = token_cross_entropy(hidden, target, lambda x: (x @ weight.T).bfloat16())
    assert loss_N.dtype == torch.float32
