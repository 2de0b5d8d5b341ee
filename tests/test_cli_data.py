"""`polydecode data`: what it counts and shows, and its refusals."""

import json

import pytest
import torch

from polydecode.cli import main
from polydecode.convert import save_checkpoint
from tiny import tiny_base, tiny_model
from tiny_tokenizer import tiny_tokenizer


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "checkpoint"
    base = tiny_base(vocab_size=400, dtype=torch.float32, pad_token_id=2)
    save_checkpoint(tiny_model("autoregressive", base), tiny_tokenizer(), folder)
    return str(folder)


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "data.jsonl"
    records = [{"prompt": "hi", "response": "x" * n} for n in (3, 5, 9, 40)]
    path.write_text("\n".join(map(json.dumps, records)))
    return str(path)


def test_the_counts_are_those_of_the_documents(checkpoint, data, capsys):
    """Pins: counts after the cut, an end token not counted, packing that is not better than padding."""
    assert main(["data", checkpoint, "--data", data, "--max-length", "20", "--batch-size", "4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    prompt = len(tiny_tokenizer()("hi")["input_ids"])
    lengths = [prompt + n + 1 for n in (3, 5, 9, 40)]
    assert found["documents"] == 4
    assert found["tokens"] == sum(lengths)
    assert found["trained_tokens"] == sum(min(n + 1, 20 - prompt) for n in (3, 5, 9, 40))
    assert found["cut"] == 1
    assert found["longest"] == lengths[-1]
    assert found["tokens_kept"] == sum(lengths[:3]) + 20
    assert sum(b["documents"] for b in found["histogram"]) == 4
    assert found["padding"] == pytest.approx(1 - found["tokens_kept"] / 80, abs=1e-9)
    assert found["padding_packed"] < found["padding"]
    assert found["answer_lengths"] == {"count": 4, "median": 10, "shortest": 4}


def test_the_sample_marks_what_is_trained(checkpoint, data, capsys):
    """Pins: a sample that hides the special tokens, or marks the prompt."""
    assert main(["data", checkpoint, "--data", data, "--samples", "1"]) == 0
    out = capsys.readouterr().out
    assert "document 0:\nhi[[xxx<|im_end|>]]" in out
    assert "document 1" not in out
    assert "#" in out


def test_what_is_dropped_is_said(checkpoint, data, capsys):
    """Pins: 'trained 100 %' above a table of documents that are cut in half."""
    assert main(["data", checkpoint, "--data", data, "--max-length", "20", "--samples", "4"]) == 0
    told = capsys.readouterr()
    prompt = len(tiny_tokenizer()("hi")["input_ids"])
    assert f"1 documents at --max-length 20: {prompt + 41 - 20} tokens dropped" in told.out
    assert "(cut at --max-length 20)" in told.out
    assert "of the tokens are beyond --max-length 20" in told.err
    assert main(["data", checkpoint, "--data", data]) == 0
    told = capsys.readouterr()
    assert "dropped" not in told.out
    assert "beyond" not in told.err


def test_the_terminal_sample_is_coloured(checkpoint, data, capsys, monkeypatch):
    """Pins: plain marks where colours are meant to be, or colours that are dropped."""
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert main(["data", checkpoint, "--data", data, "--samples", "1"]) == 0
    out = capsys.readouterr().out
    assert "[[" not in out
    assert "\x1b[32mxxx<|im_end|>" in out


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--data", "nowhere.jsonl"], "nowhere.jsonl"),
        ([], "no training data"),
        (["--samples", "-1"], "samples is -1"),
        (["--max-length", "1"], "max_length is 1"),
        (["--train-on", "some"], "train_on is 'some'"),
        (["--batch-size", "0"], "batch_size is 0"),
    ],
)
def test_bad_input_is_one_line(checkpoint, data, capsys, flags, says):
    """Pins: a traceback, or exit code 1."""
    given = [] if says == "no training data" or "--data" in flags else ["--data", data]
    assert main(["data", checkpoint, *given, *flags]) == 2
    error = capsys.readouterr().err.strip()
    assert says in error
    assert "\n" not in error


def test_a_prompt_longer_than_max_length_is_counted(checkpoint, tmp_path, capsys):
    """Pins: a report that fails where training would, instead of saying how many."""
    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt": "' + "x" * 30 + '", "response": "y"}\n{"prompt": "hi", "response": "y"}\n')
    assert main(["data", checkpoint, "--data", str(path), "--max-length", "10", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["refused"] == 1
