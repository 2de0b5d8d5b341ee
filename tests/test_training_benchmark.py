"""`polydecode benchmark --training`: both sides do the same work on the same rows, and the ratio is what it says."""

import json

import pytest
import torch

from polydecode.benchmark import training
from polydecode.benchmark.training import PLAIN, measure_training, random_examples
from polydecode.cli import main
from polydecode.convert import convert, save_checkpoint
from polydecode.errors import UserError
from tiny import tiny_base, tiny_model
from tiny_tokenizer import tiny_tokenizer


def measured(method: str, **changes):
    told = {"batch_size": 2, "prompt_tokens": 3, "answer_tokens": 8, "steps": 2, "repeats": 2} | changes
    return measure_training(tiny_model(method, tiny_base(dtype=torch.float32)), tiny_tokenizer(), **told)


@pytest.mark.parametrize("method", ["dmtd", "block_diffusion"])
def test_both_sides_take_turns_over_the_same_tokens(method):
    """Bug: a ratio of runs with different tokens, or of one side's best to the other's worst."""
    plain, own = measured(method)
    assert (plain.name, own.name) == (PLAIN, method)
    assert len(plain.seconds) == len(own.seconds) == 2
    assert plain.ratio == 1
    for speed in (plain, own):
        assert sorted(2 * 11 * 2 / s for s in speed.seconds) == pytest.approx(
            [speed.tokens_per_s_min, speed.tokens_per_s_max]
        )
    assert own.ratio_min <= own.ratio <= own.ratio_max
    quotients = [p / o for p, o in zip(plain.seconds, own.seconds, strict=True)]
    assert own.ratio == pytest.approx(sum(quotients) / 2)


def test_the_baseline_trains_everything_and_the_method_its_own():
    """Bug: a baseline that inherits the method's frozen embeddings, and so is too fast or too slow."""
    model = tiny_model("dmtd", tiny_base(dtype=torch.float32))
    plain, own = measure_training(model, tiny_tokenizer(), 2, 0, 8, 1, 2)
    total = sum(p.numel() for p in model.parameters())
    outside = sum(layer.weight.numel() for layer in (model.get_input_embeddings(), model.get_output_embeddings()))
    assert (plain.trained_parameters, own.trained_parameters) == (total, total - outside)


def test_the_baseline_is_the_models_own_next_token_loss():
    """Bug: labels on the prompt, or shifted twice."""
    model = tiny_model("autoregressive", tiny_base(dtype=torch.float32))
    batch = training._with_labels(random_examples(model, 2, 3, 5, seed=0))
    assert batch["labels"][:, :3].eq(-100).all()
    assert torch.equal(batch["labels"][:, 3:], batch["input_ids"][:, 3:])


@pytest.mark.parametrize(
    ("changes", "says"),
    [({"steps": 0}, "train"), ({"batch_size": 0}, "batch_size"), ({"answer_tokens": 900}, "context")],
)
def test_impossible_measures_are_refused(changes, says):
    """Bug: a division by zero, or an error from inside the model."""
    with pytest.raises(UserError, match=says):
        measured("dmtd", **changes)


def test_packed_rows_are_timed_on_the_same_examples(tmp_path, capsys):
    """Bug: padding counted as tokens, so that packing seems to gain nothing; packed rows of other documents."""
    base = tiny_base(dtype=torch.float32, vocab_size=300)
    save_checkpoint(convert(base, method="block_diffusion", block_size=4), tiny_tokenizer(), tmp_path / "c")
    (tmp_path / "d.jsonl").write_text("".join(json.dumps({"text": "word " * (1 + i % 9)}) + "\n" for i in range(12)))
    words = [
        "--training",
        "--data",
        str(tmp_path / "d.jsonl"),
        "--max-length",
        "40",
        "--batch-size",
        "4",
        "--repeats",
        "1",
    ]
    assert main(["benchmark", str(tmp_path / "c"), *words, "--training-steps", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    names = [r["name"] for r in found["results"]]
    assert names[:2] == [PLAIN, "block_diffusion"]
    assert names[2].startswith("block_diffusion, ")
    assert " packed row" in names[2]
    lengths = [len(tiny_tokenizer()("word " * (1 + i % 9))["input_ids"]) + 1 for i in range(12)]
    tokens = [r["tokens_per_s"] * r["seconds"][0] for r in found["results"]]
    assert all(0 < count < sum(min(n, 40) for n in lengths) for count in tokens)
    assert tokens[0] == pytest.approx(round(tokens[0]))
    assert main(["benchmark", str(tmp_path / "c"), *words, "--training-steps", "3"]) == 2
    assert "need 16" in capsys.readouterr().err
    assert main(["benchmark", str(tmp_path / "c"), "--data", "x.jsonl"]) == 2


def test_from_the_command_line(tmp_path, capsys):
    """Bug: a flag that is there and does nothing."""
    base = tiny_base(dtype=torch.float32, vocab_size=300)
    save_checkpoint(convert(base, method="dmtd", num_decoding_layers=2), tiny_tokenizer(), tmp_path / "c")
    words = ["--training", "--batch-size", 2, "--prompt-tokens", 0, "--new-tokens", 8, "--repeats", 1]
    assert main(["benchmark", str(tmp_path / "c"), *map(str, words), "--training-steps", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [r["name"] for r in found["results"]] == [PLAIN, "dmtd"]
    assert (found["dtype"], found["answer_tokens"], found["machine"]["device"]) == ("float32", 8, "cpu")
