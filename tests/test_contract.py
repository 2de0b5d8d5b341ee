"""What every registered method must keep, whatever it does inside; a new method gets these tests by being there."""

import json

import pytest
import torch

from polydecode.errors import UserError
from polydecode.methods import get_method, method_names, method_summary
from polydecode.methods.base import ParallelDecoder, ParallelDecoderConfig
from polydecode.methods.batch import Batch, LossOutput, Score, Step
from polydecode.ops.sampling import RowGenerators
from tiny import SETTINGS, batch_of, greedy, hf_greedy, padded, random_rows, tiny_base, tiny_model

NAMES = method_names()
VERBS = ("loss", "prefill", "step", "keep_rows", "join", "score", "forwards_per_token", "logits")
every_method = pytest.mark.parametrize("name", NAMES)


@pytest.fixture(scope="module")
def base():
    return tiny_base()


@pytest.fixture(scope="module")
def base32():
    return tiny_base(dtype=torch.float32, pad_token_id=2)


def run(model, prompts, tokens, **options):
    """Greedy tokens of each row, at least `tokens` of them, with every step checked."""
    with torch.no_grad():
        state, rows = model.prefill(*padded(prompts), **options), [[] for _ in prompts]
        while min(map(len, rows)) < tokens:
            step_into(model, state, rows)
    return rows


def step_into(model, state, rows):
    step = model.step(state, greedy)
    assert isinstance(step, Step)
    assert step.tokens.dim() == 2
    assert step.tokens.shape[0] == len(step.num_committed) == len(rows)
    assert step.tokens.dtype == torch.int64
    assert isinstance(step.forwards, float)
    assert step.forwards >= 0
    for row, tokens, count in zip(rows, step.tokens.tolist(), step.num_committed.tolist(), strict=True):
        assert 0 <= count <= step.tokens.shape[1]
        assert all(0 <= token < 61 for token in tokens[:count])
        row += tokens[:count]
    return step


# --- the registry ----------------------------------------------------------------------------------------------------


def test_the_methods_are_the_folders():
    """Bug: a method folder that is there but not found, or a name in the list that cannot be imported."""
    assert {"autoregressive", "dmtd"} <= set(NAMES)
    with pytest.raises(UserError, match="did you mean 'dmtd'"):
        get_method("dmdt")


@every_method
def test_a_method_is_a_config_and_a_model(name):
    """Bug: a verb forgotten, a setting without a default, a class registered under another method's name."""
    config_class, model_class = get_method(name)
    assert issubclass(config_class, ParallelDecoderConfig)
    assert issubclass(model_class, ParallelDecoder)
    assert config_class.method == name
    assert config_class.model_type == f"polydecode_{name}"
    for verb in VERBS:
        assert getattr(model_class, verb) is not getattr(ParallelDecoder, verb), verb
    for setting in config_class.SETTINGS:
        assert hasattr(config_class, setting), setting
    assert len(method_summary(name)) > 10


@every_method
def test_wrong_settings_and_options_are_refused(name, base):
    """Bug: transformers' config classes swallow unknown names and wrong types."""
    for setting in get_method(name)[0].SETTINGS:
        with pytest.raises(UserError, match=setting):
            tiny_model(name, base, **{setting: object()})
    with pytest.raises(UserError, match="cycle_lenght"):
        tiny_model(name, base, cycle_lenght=3)
    with pytest.raises(UserError, match="no_such_option"):
        tiny_model(name, base).prefill(torch.tensor([[1]]), no_such_option=1)


@every_method
def test_a_checkpoint_is_the_model(name, base, tmp_path):
    """Bugs: settings or special tokens lost in config.json, tied or doubled weights, a local path written into it."""
    model = tiny_model(name, base)
    model.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["base_config"]["model_type"] == "llama"
    assert "_name_or_path" not in written["base_config"] or written["base_config"]["_name_or_path"] == ""
    again = get_method(name)[1].from_pretrained(tmp_path, dtype=torch.float64).eval()
    assert again.config.settings() == model.config.settings()
    ours = model.state_dict()
    assert again.state_dict().keys() == ours.keys()
    assert all(torch.equal(value, ours[key]) for key, value in again.state_dict().items())


# --- decoding --------------------------------------------------------------------------------------------------------


@every_method
def test_greedy_is_deterministic(name, base):
    """Bug: state left over from an earlier call, or noise at temperature 0."""
    model, prompts = tiny_model(name, base), random_rows([3, 7])
    assert run(model, prompts, 9) == run(model, prompts, 9)


@every_method
def test_the_first_step_costs_no_forward(name, base):
    """Bug: the prefill paid for twice, so that the measured cost never meets the predicted one."""
    model = tiny_model(name, base)
    with torch.no_grad():
        step = step_into(model, model.prefill(*padded(random_rows([3, 7]))), [[], []])
    if name in ("autoregressive", "dmtd"):
        assert step.forwards == 0
    else:
        assert step.forwards == 1
    for count_head in (False, True):
        predicted = model.forwards_per_token(count_head=count_head)
        assert predicted is None or (isinstance(predicted, float) and 0 < predicted <= 1)


@every_method
def test_rows_leave_and_enter_between_steps(name, base):
    """Bug: a row's answer depends on who else is in the batch, or when it came."""
    model, prompts = tiny_model(name, base), random_rows([3, 7, 5, 1], seed=3)
    alone = [run(model, [prompt], 12)[0][:12] for prompt in prompts]
    with torch.no_grad():
        rows = [[] for _ in prompts]
        state = model.prefill(*padded(prompts[:3]))
        for _ in range(2):
            step_into(model, state, rows[:3])
        state = model.keep_rows(state, torch.tensor([2, 0]))
        step_into(model, state, [rows[2], rows[0]])
        state = model.join(state, model.prefill(torch.tensor([prompts[3]])))
        while min(len(rows[b]) for b in (2, 0, 3)) < 12:
            step_into(model, state, [rows[2], rows[0], rows[3]])
    for b, row in enumerate(rows):
        assert row[:12] == alone[b][: len(row)], b


@every_method
def test_an_untouched_state_survives_a_neighbours_step(name, base):
    """Bug: two states sharing buffers through the model."""
    model, prompts = tiny_model(name, base), random_rows([4, 6], seed=4)
    alone = [run(model, [prompt], 8)[0][:8] for prompt in prompts]
    with torch.no_grad():
        states, rows = [model.prefill(torch.tensor([p])) for p in prompts], [[], []]
        while min(map(len, rows)) < 8:
            for state, row in zip(states, rows, strict=True):
                step_into(model, state, [row])
    assert [row[:8] for row in rows] == alone


# --- loss and score --------------------------------------------------------------------------------------------------

PROMPTS, ANSWERS = random_rows([3, 1, 5], seed=11), random_rows([7, 4, 9], seed=12)


@every_method
def test_loss_is_a_mean_over_targets_whatever_the_split(name, base):
    """Bug (known fault 20): noise that depends on the batch, or a mean of means over rows of unequal length."""
    model = tiny_model(name, base)
    together = model.loss(batch_of(PROMPTS, ANSWERS), RowGenerators([3, 1, 4]))
    assert isinstance(together, LossOutput)
    assert together.loss.dim() == 0
    assert together.loss.requires_grad
    assert isinstance(together.num_targets, int)
    assert all(isinstance(value, float) for value in together.sums.values())
    parts = [
        model.loss(batch_of([p], [a]), RowGenerators([s])) for p, a, s in zip(PROMPTS, ANSWERS, [3, 1, 4], strict=True)
    ]
    assert together.num_targets == sum(p.num_targets for p in parts)
    expected = sum(p.loss.detach() * p.num_targets for p in parts) / together.num_targets
    assert abs(float(together.loss.detach() - expected)) < 1e-9
    assert torch.autograd.grad(together.loss, base.model.layers[0].mlp.up_proj.weight)[0].abs().max() > 0


@every_method
def test_score_is_per_row_and_deterministic(name, base):
    """Bug: a score that depends on padding, on the other rows or on a seed."""
    model, batch = tiny_model(name, base), batch_of(PROMPTS, ANSWERS)
    with torch.no_grad():
        together = model.score(batch)
        assert isinstance(together, Score)
        assert isinstance(together.exact, bool)
        assert together.num_targets.tolist() == [7, 4, 9]
        assert torch.equal(model.score(batch).log_likelihood, together.log_likelihood)
        for b in range(3):
            alone = model.score(batch_of(PROMPTS[b : b + 1], ANSWERS[b : b + 1]))
            assert abs(float(alone.log_likelihood[0] - together.log_likelihood[b])) < 1e-9
            assert float(alone.log_likelihood[0]) < 0


@every_method
def test_padding_does_not_reach_the_logits(name, base):
    """Bug: right padding read by real tokens, in a batch that is only scored."""
    model, rows = tiny_model(name, base), random_rows([4, 9])
    ids, mask = padded(rows, "right")
    with torch.no_grad():
        logits = model(ids, attention_mask=mask).logits
        assert logits.shape == (2, 9, 61)
        assert (logits[0, :4] - model(torch.tensor(rows[:1])).logits[0]).abs().max() < 1e-9


def test_positions_restart_with_each_document():
    """Bug: positions counted through a packed row, so RoPE and phases of the second document are off."""
    ids = torch.zeros(2, 6, dtype=torch.int64)
    batch = Batch(ids, ids + 1, ids.bool(), ids.bool(), torch.tensor([[0, 0, 1, 1, 1, 2], [3, 3, 3, 3, 3, 3]]))
    assert batch.position_ids().tolist() == [[0, 1, 0, 1, 2, 0], [0, 1, 2, 3, 4, 5]]
    batch = Batch(ids, ids + 1, ids.bool(), ids.bool() | True, torch.tensor([[0, 0, 1, 1, 1, 2], [3, 3, 3, 3, 3, 3]]))
    assert batch.predicted().int().tolist() == [[0, 1, 0, 1, 1, 0], [0, 1, 1, 1, 1, 1]]


# --- model.generate --------------------------------------------------------------------------------------------------


def generate(model, rows, side="left", **kwargs):
    """New tokens (B, N) of model.generate."""
    ids, mask = padded(rows, side)
    kwargs = {"do_sample": False, "eos_token_id": None} | kwargs
    out = model.generate(input_ids=ids, attention_mask=mask, **kwargs)
    assert torch.equal(out[:, : ids.shape[1]], ids)
    return out[:, ids.shape[1] :]


@every_method
def test_generate_gives_as_many_tokens_as_asked(name, base):
    """Bug (known fault 69): max_new_tokens rounded up to a cycle or a block."""
    model, rows = tiny_model(name, base), random_rows([3, 6])
    longest = generate(model, rows, max_new_tokens=9)
    assert longest.shape == (2, 9)
    for n in (1, 2, 5, 7):
        assert torch.equal(generate(model, rows, max_new_tokens=n), longest[:, :n]), n


@every_method
def test_generate_of_no_tokens_is_the_prompt(name, base):
    """Bug: 0 is allowed by our own message, and fails inside transformers' GenerationConfig."""
    assert generate(tiny_model(name, base), random_rows([3, 6]), max_new_tokens=0).shape == (2, 0)


@every_method
def test_the_context_is_counted_in_real_tokens(name, base):
    """Bug: padding counted against the context, so a mask of the same prompts is refused."""
    model, ids = tiny_model(name, base), torch.tensor([[2] * 505 + [7, 8, 9]])
    mask = (torch.arange(508) >= 505).long()[None]
    assert model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=6, do_sample=False).shape[1] > 508
    with pytest.raises(UserError, match="context of 512"):
        model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=6)


@every_method
def test_generate_treats_a_padded_row_as_the_row_alone(name, base32):
    """Bug (known faults 14, 42): pad == eos taken for padding inside the prompt; batch 8 answering differently from 1."""
    model, rows = tiny_model(name, base32), [[2, *p, 2, 2] for p in random_rows([1, 2, 3, 5, 8, 13], seed=5)]
    for side in ("left", "right"):
        together = generate(model, rows, side, max_new_tokens=10)
        for b, row in enumerate(rows):
            assert generate(model, [row], max_new_tokens=10)[0].tolist() == together[b].tolist(), (side, b)


@every_method
def test_generate_stops_a_row_at_its_end_token(name, base):
    """Bug: an end token in the middle of a cycle or block, after which the row goes on or others stop too."""
    model, rows = tiny_model(name, base), random_rows([3, 6, 4], seed=6)
    free = generate(model, rows, max_new_tokens=12).tolist()
    for eos in (free[0][4], free[1][2], free[2][7], free[0][0]):
        stopped = generate(model, rows, max_new_tokens=12, eos_token_id=[eos, 60], pad_token_id=5)
        ends = [next((i + 1 for i, t in enumerate(row) if t in (eos, 60)), 12) for row in free]
        assert stopped.shape[1] == max(ends)
        for row, wanted, end in zip(stopped.tolist(), free, ends, strict=True):
            assert row == wanted[:end] + [5] * (max(ends) - end)


@every_method
def test_generate_samples_by_row(name, base):
    """Bug (known faults 20, 40): a row's draws depend on its neighbours, or all rows draw the same."""
    model, rows = tiny_model(name, base), [[7, 8, 9]] * 3
    options = {"do_sample": True, "temperature": 1.5, "max_new_tokens": 8}
    together = generate(model, rows, seed=[1, 2, 3], **options)
    assert len({tuple(row) for row in together.tolist()}) == 3
    for b in range(3):
        assert torch.equal(generate(model, rows[:1], seed=[b + 1], **options)[0], together[b])
    assert torch.equal(generate(model, rows, seed=5, **options), generate(model, rows, seed=5, **options))


@pytest.mark.parametrize("name", ["autoregressive", "dmtd"])
def test_generate_is_transformers_generate(name, base):
    """Bug: cycle length 1 (the source model) and the baseline must answer as transformers' own generate does."""
    model = tiny_model(name, base, **({"cycle_length": 1, "num_decoding_layers": 2} if name in SETTINGS else {}))
    for prompt in random_rows([1, 8], seed=8):
        expected = hf_greedy(base, torch.tensor([prompt]), 11)[:, len(prompt) :]
        assert torch.equal(generate(model, [prompt], max_new_tokens=11), expected)


def test_generate_takes_the_methods_options(base):
    """Bug: the cycle length of a request ignored, or given to the whole batch."""
    model, rows = tiny_model("dmtd", base), random_rows([4, 6, 5])
    alone = [
        generate(model, [row], max_new_tokens=9, cycle_length=c)[0].tolist()
        for row, c in zip(rows, (1, 3, 5), strict=True)
    ]
    assert generate(model, rows, max_new_tokens=9, cycle_length=[1, 3, 5]).tolist() == alone
    assert (
        generate(model, rows[:1], max_new_tokens=9).tolist()
        == generate(model, rows[:1], max_new_tokens=9, cycle_length=3).tolist()
    )
    assert generate(model, rows[:1], max_new_tokens=9, cycle_length=5)[0].tolist() != alone[0]
