"""`polydecode doctor`: what it sees in a source, in data and in a plan, and its exit code."""

import json
import math

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from polydecode.cli import main
from tiny import tiny_base
from tiny_tokenizer import TEMPLATE, tiny_tokenizer


@pytest.fixture
def source(tmp_path):
    """A function that writes a tiny source folder."""

    def write(name="source", **tokenizer):
        base = tiny_base(dtype=torch.float32, vocab_size=300, max_position_embeddings=128, initializer_range=0.02)
        base.save_pretrained(tmp_path / name)
        tiny_tokenizer(**tokenizer).save_pretrained(tmp_path / name)
        return str(tmp_path / name)

    return write


@pytest.fixture
def data(tmp_path):
    """A function that writes prompt/response records."""

    def write(responses):
        lines = [json.dumps({"prompt": f"say {i} ->", "response": r}) for i, r in enumerate(responses)]
        (tmp_path / "data.jsonl").write_text("\n".join(lines))
        return str(tmp_path / "data.jsonl")

    return write


def examine(capsys, *words, code=0) -> dict:
    """The JSON answer, findings by name."""
    capsys.readouterr()
    assert main(["doctor", *map(str, words), "--json"]) == code
    answer = json.loads(capsys.readouterr().out)
    return answer | {f["name"]: f for f in answer["findings"]}


PLAN = ("--max-length", 64, "--batch-size", 4)


@pytest.mark.parametrize(
    ("method", "settings"),
    [("dmtd", ("--num-decoding-layers", 2)), ("block_diffusion", ("--block-size", 4)), ("autoregressive", ())],
)
def test_a_healthy_plan_passes(source, data, capsys, method, settings):
    """Bug: an examination that fails what trains, or prints no reference for the first loss (known fault 23)."""
    path = source()
    file = data([f"apple river stone {i} {i}" for i in range(12)])
    found = examine(capsys, path, "--data", file, "--method", method, *settings, *PLAN)
    assert not found["failed"]
    assert {f["level"] for f in found["findings"]} == {"ok"}
    assert found["uniform_loss"] == pytest.approx(math.log(300), abs=0.01)  # a row may be added
    assert found["source_loss"] == pytest.approx(math.log(300), abs=0.7)  # random weights know nothing
    assert found["memory_bytes"] > 0
    assert found["tokens_per_s"] > 0
    assert found["steps"] == 3


def test_short_answers_are_told_by_the_method(source, data, capsys):
    """Bug: answers of 3 tokens in blocks of 16, trained mostly on filling, without a word (known faults 25, 48)."""
    file = data(["a", "b"] * 8)
    found = examine(capsys, source(), "--data", file, "--method", "block_diffusion", "--no-measure", *PLAN)
    assert found["block size"]["level"] == "warn"
    assert "100%" in found["block size"]["says"]
    assert "--block-size" in found["block size"]["mend"]
    settings = ("--method", "dmtd", "--num-decoding-layers", 2, "--cycle-length", 6)
    found = examine(capsys, source("again"), "--data", file, *settings, "--no-measure", *PLAN)
    assert found["cycle length"]["level"] == "warn"


def test_duplicates_and_empty_answers_are_counted(source, tmp_path, capsys):
    """Bug: a file that repeats itself looks like much data."""
    (tmp_path / "d.jsonl").write_text('{"prompt": "a b", "response": "c d e f g"}\n' * 10)
    found = examine(capsys, source(), "--data", tmp_path / "d.jsonl", "--no-measure", *PLAN)
    assert found["duplicates"]["level"] == "warn"
    assert found["duplicates"]["says"].startswith("9 of 10")


def test_lengths_are_held_against_the_context(source, data, capsys):
    """Bug: max_length beyond the context found in the first step; most documents cut without a word."""
    file = data(["apple river " * 30] * 3 + ["x y"])
    path = source()
    found = examine(capsys, path, "--data", file, "--max-length", 200, "--no-measure", code=1)
    assert found["context length"]["level"] == "fail"
    assert found["context length"]["mend"] == "--max-length 128"
    found = examine(capsys, path, "--data", file, "--max-length", 32, "--no-measure")
    assert found["context length"]["level"] == "warn"


def test_faulty_data_fail_with_their_place(source, tmp_path, capsys):
    """Bug: a traceback, or a healthy report beside data that no run can read."""
    (tmp_path / "d.jsonl").write_text('{"prompt": "a", "response": "b"}\n{"prompt": \n')
    found = examine(capsys, source(), "--data", tmp_path / "d.jsonl", "--no-measure", *PLAN, code=1)
    assert "d.jsonl:2" in found["data"]["says"]


def test_the_template_is_looked_at(source, capsys):
    """Bug: --chat without a template found after an hour of tokenising; generation tags not noticed."""
    found = examine(capsys, source("plain", chat_template=None), "--chat", "--no-measure", *PLAN, code=1)
    assert found["chat template"]["level"] == "fail"
    tagged = TEMPLATE.replace("{{ '<|im_start|>' + m", "{% generation %}{{ '<|im_start|>' + m", 1)
    tagged = tagged.replace("{% endfor %}", "{% endgeneration %}{% endfor %}", 1)
    found = examine(capsys, source("tagged", chat_template=tagged), "--no-measure", *PLAN)
    assert "generation tags" in found["chat template"]["says"]
    assert "measured" not in found["chat template"]["says"]


def test_an_unsupported_architecture_fails(tmp_path, capsys):
    """Bug: an architecture accepted silently (known fault 9)."""
    GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=300)).save_pretrained(tmp_path / "gpt2")
    found = examine(capsys, tmp_path / "gpt2", code=1)
    assert found["architecture"]["level"] == "fail"
    assert "llama" in found["architecture"]["says"]


def test_memory_beyond_the_machine_fails(source, capsys, monkeypatch):
    """Bug: a run that is killed after an hour for memory that could have been counted before."""
    monkeypatch.setattr("polydecode.doctor.available_bytes", lambda: 1e8)
    found = examine(capsys, source(), "--no-measure", *PLAN, code=1)
    assert found["memory"]["level"] == "fail"
    assert "--micro-batch-size" in found["memory"]["mend"]


def test_the_text_has_a_line_per_finding_and_its_mend(source, data, capsys):
    """Bug: colours or tables in a pipe; a fault without the way out."""
    path = source()
    capsys.readouterr()
    words = ["doctor", path, "--data", data(["a"] * 8), "--max-length", "200", "--no-measure"]
    assert main(words) == 1
    lines = capsys.readouterr().out.splitlines()
    assert all(line[:4] in ("ok  ", "warn", "fail", "    ") for line in lines)
    assert "\x1b" not in "".join(lines)
    assert any("mend: --max-length 128" in line for line in lines)


@pytest.mark.parametrize(
    ("words", "needle"),
    [
        (["--method", "dmdt"], "did you mean 'dmtd'?"),
        (["--learning-rate", "-1"], "learning_rate"),
        (["--method", "dmtd", "--num-decoding-layers", "9"], "more than the model's 5 layers"),
    ],
)
def test_impossible_settings_are_one_line(source, words, needle, capsys):
    """Bug: exit code 1 (a patient) for what is no examination at all."""
    assert main(["doctor", source(), *words]) == 2
    assert needle in capsys.readouterr().err
