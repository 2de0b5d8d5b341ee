"""`polydecode embed`: vectors that depend on the text alone, in files that are whole or not there."""

import io
import json
import os
import resource
import subprocess
import sys

import numpy
import pytest
import torch

from polydecode import load
from polydecode.cli import main
from polydecode.convert import convert_to_folder
from polydecode.embed import embed_texts
from polydecode.errors import UserError
from polydecode.methods import method_names
from tiny import SETTINGS, tiny_base
from tiny_tokenizer import tiny_tokenizer

TEXTS = ["a b c", "c b a b c a b", "b", "a a a a b"]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("embed")
    tokenizer = tiny_tokenizer()
    tiny_base(dtype=torch.float32, vocab_size=max(61, len(tokenizer))).save_pretrained(folder / "source")
    tokenizer.save_pretrained(folder / "source")
    made = {}
    for name in method_names():
        settings = {k: v for k, v in SETTINGS.get(name, {}).items() if k != "mask_token_id"}
        made[name] = str(convert_to_folder(folder / "source", folder / name, name, settings))
    return made


def give_stdin(monkeypatch, content: bytes) -> None:
    """Bytes on stdin, under a locale that would read them as Latin-1."""
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content), encoding="latin-1"))


@pytest.mark.parametrize("name", method_names())
def test_a_vector_depends_on_its_text_alone(checkpoints, name):
    """Bug: padding in the mean, or the order of the batches instead of that of the texts."""
    model, tokenizer = load(checkpoints[name], dtype=torch.float32), tiny_tokenizer()
    together = embed_texts(model, tokenizer, TEXTS, batch_size=3)
    assert together.embeddings.shape == (4, 32)
    for i, text in enumerate(TEXTS):
        alone = embed_texts(model, tokenizer, [text]).embeddings[0]
        assert (alone - together.embeddings[i]).abs().max() < 1e-5
    normal = embed_texts(model, tokenizer, TEXTS, normalize=True).embeddings
    assert (normal.norm(dim=1) - 1).abs().max() < 1e-5
    cut = embed_texts(model, tokenizer, TEXTS, max_length=3)
    assert cut.num_truncated == sum(len(tokenizer(t)["input_ids"]) > 3 for t in TEXTS)
    assert cut.num_tokens == [min(len(tokenizer(t)["input_ids"]), 3) for t in TEXTS]
    exact = embed_texts(model, tokenizer, TEXTS[:1], max_length=together.num_tokens[0])
    assert exact.num_truncated == 0
    for bad in (
        {"texts": []},
        {"texts": ["a", " "]},
        {"texts": ["a", "b \ud800"]},
        {"texts": ["a"], "max_length": -1},
        {"texts": ["a"], "max_length": 513},
        {"texts": ["a"], "batch_size": 0},
    ):
        with pytest.raises(UserError):
            embed_texts(model, tokenizer, **bad)


def test_block_diffusion_reads_both_sides(checkpoints):
    """Bug: causal attention left in the converted model's embedding: its first position must see the last token."""
    from polydecode.methods.batch import Batch

    for name, sees in (("autoregressive", False), ("block_diffusion", True)):
        model, ids = load(checkpoints[name], dtype=torch.float32), torch.tensor([[5, 6, 7], [5, 6, 8]])
        ones = torch.ones_like(ids)
        with torch.no_grad():
            first = model.hidden(Batch(ids, ones, ones.bool(), ones.bool()))[:, 0]
        assert bool((first[0] - first[1]).abs().max() > 1e-3) == sees


@pytest.mark.parametrize(("name", "sees_all"), [("autoregressive", False), ("block_diffusion", True)])
def test_vectors_are_those_of_transformers(checkpoints, name, sees_all):
    """Against the source model itself: the last hidden states of transformers, with a mask of zeros where all is seen."""
    from transformers import AutoModelForCausalLM

    tokenizer = tiny_tokenizer()
    source = AutoModelForCausalLM.from_pretrained(f"{checkpoints[name]}/../source", dtype=torch.float32).eval()
    ours = embed_texts(load(checkpoints[name], dtype=torch.float32), tokenizer, TEXTS).embeddings
    for text, vector in zip(TEXTS, ours, strict=True):
        ids = torch.tensor([tokenizer(text)["input_ids"]])
        mask = torch.zeros(1, 1, ids.shape[1], ids.shape[1]) if sees_all else None
        with torch.no_grad():
            hidden = source.model(ids, attention_mask=mask).last_hidden_state[0]
        assert (hidden.mean(0) - vector).abs().max() < 1e-5


@pytest.mark.parametrize("name", method_names())
def test_bfloat16_gives_float32_vectors_near_those_of_float32(checkpoints, name, tmp_path, capsys):
    """Bug: a sum in bfloat16 (eight bits of it), or a bfloat16 matrix that numpy cannot write."""
    file = tmp_path / "t.txt"
    file.write_text("\n".join(TEXTS))
    vectors = {}
    for dtype in ("float32", "bfloat16"):
        target = tmp_path / f"{dtype}.npy"
        words = ["--input", str(file), "--output", str(target), "--dtype", dtype, "--device", "cpu"]
        assert main(["embed", checkpoints[name], *words]) == 0
        assert f"wrote {target}: 4 vectors of 32" in capsys.readouterr().out
        vectors[dtype] = numpy.load(target)
        assert vectors[dtype].dtype == numpy.float32
    assert 0 < numpy.abs(vectors["float32"] - vectors["bfloat16"]).max() < 0.2  # the vectors' own size is about 1


def test_vectors_that_are_not_finite_are_refused(checkpoints):
    """Bug: NaN in the file, which is no JSON, when float16 overflows."""
    model = load(checkpoints["autoregressive"], dtype=torch.float32)
    model.get_input_embeddings().weight.data[tiny_tokenizer()("b")["input_ids"]] = torch.nan
    with pytest.raises(UserError, match="text 2 is not finite"):
        embed_texts(model, tiny_tokenizer(), ["a", "b", "c"])


def test_the_command_writes_npy_and_jsonl(checkpoints, tmp_path, capsys):
    """Bug: two formats with other numbers, ids lost, truncation in silence."""
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps({"id": i, "text": t}) + "\n" for i, t in enumerate(TEXTS)))
    arguments = ["embed", checkpoints["block_diffusion"], "--input", str(source), "--dtype", "float32"]
    assert main([*arguments, "--output", str(tmp_path / "o.npy"), "--max-length", "3", "--json"]) == 0
    told = capsys.readouterr()
    assert json.loads(told.out.splitlines()[-1])["texts"] == 4
    assert "texts were cut at 3 tokens" in told.err
    assert main([*arguments, "--output", str(tmp_path / "o.jsonl"), "--max-length", "3"]) == 0
    records = [json.loads(line) for line in (tmp_path / "o.jsonl").read_text().splitlines()]
    assert [r["id"] for r in records] == [0, 1, 2, 3]
    matrix = numpy.load(tmp_path / "o.npy")
    assert matrix.dtype == numpy.float32
    assert numpy.allclose(matrix, [r["embedding"] for r in records], atol=1e-6)
    capsys.readouterr()
    assert main([*arguments]) == 0
    told = capsys.readouterr()
    assert [json.loads(line)["id"] for line in told.out.splitlines()] == [0, 1, 2, 3]
    assert "4 vectors of 32" in told.err
    assert main([*arguments, "--json"]) == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (summary["texts"], summary["width"], summary["truncated"]) == (4, 32, 0)
    assert numpy.allclose(summary["embeddings"], embed_texts(*opened(checkpoints), TEXTS).embeddings, atol=1e-6)


def opened(checkpoints):
    """The block-diffusion model and its tokenizer."""
    return load(checkpoints["block_diffusion"], dtype=torch.float32), tiny_tokenizer()


@pytest.mark.parametrize("content", [b"a b\nc\n", b"a b\r\nc", b"\xef\xbb\xbfa b\nc\n", "a\u2028b\nc\u00e9\n".encode()])
def test_a_line_of_text_is_a_text(checkpoints, tmp_path, monkeypatch, capsys, content):
    """Bugs pinned: a line cut at U+2028, so that every later vector was another text's; stdin read in the locale's encoding."""
    lines = content.decode("utf-8-sig").replace("\r", "").removesuffix("\n").split("\n")
    expected = embed_texts(*opened(checkpoints), lines).embeddings
    (tmp_path / "t.txt").write_bytes(content)
    for words in (["--input", str(tmp_path / "t.txt")], []):
        give_stdin(monkeypatch, content)
        assert main(["embed", checkpoints["block_diffusion"], "--dtype", "float32", "--device", "cpu", *words]) == 0
        rows = [json.loads(line)["embedding"] for line in capsys.readouterr().out.splitlines()]
        assert numpy.allclose(rows, expected, atol=1e-6)


@pytest.mark.parametrize(
    ("content", "told"),
    [(b"", "no texts in stdin"), (b"a\n\nb\n", "stdin:2: the line is empty"), (b"a\n\xff\n", "stdin: it is not UTF-8")],
)
def test_bad_stdin_is_one_line(checkpoints, monkeypatch, capsys, content, told):
    give_stdin(monkeypatch, content)
    assert main(["embed", checkpoints["autoregressive"]]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert told in err


def test_a_field_without_effect_is_told(checkpoints, monkeypatch, capsys):
    give_stdin(monkeypatch, b"a\n")
    assert main(["embed", checkpoints["autoregressive"], "--field", "body"]) == 0
    assert "--field has no effect" in capsys.readouterr().err


def test_progress_is_told(checkpoints, monkeypatch, capsys):
    give_stdin(monkeypatch, b"a\nb\nc\n")
    monkeypatch.setattr("polydecode.cli.embed.PROGRESS_S", 0.0)
    assert main(["embed", checkpoints["autoregressive"], "--batch-size", "2"]) == 0
    assert capsys.readouterr().err.splitlines()[:2] == ["2 of 3 texts", "3 of 3 texts"]


def test_the_field_is_read(checkpoints, tmp_path, capsys):
    (tmp_path / "i.jsonl").write_text('{"text": "b", "body": "a b c"}\n')
    words = ["--input", str(tmp_path / "i.jsonl"), "--field", "body", "--normalize", "--dtype", "float32"]
    assert main(["embed", checkpoints["block_diffusion"], *words]) == 0
    row = json.loads(capsys.readouterr().out)["embedding"]
    assert numpy.allclose(row, embed_texts(*opened(checkpoints), ["a b c"], normalize=True).embeddings[0], atol=1e-6)


@pytest.mark.parametrize("ending", ["npy", "jsonl"])
def test_a_full_disk_keeps_the_old_file(checkpoints, tmp_path, ending):
    """Bugs pinned: a traceback, since numpy.save does not say why a write failed; a half-written file."""
    (tmp_path / "t.txt").write_text("a\n" * 200)
    target = tmp_path / f"o.{ending}"
    target.write_text("old")
    words = ["embed", checkpoints["autoregressive"], "--input", str(tmp_path / "t.txt"), "--output", str(target)]
    code = f"import sys; from polydecode.cli import main; sys.exit(main({words!r}))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000)),
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "File too large" in done.stderr.splitlines()[-1]
    assert target.read_text() == "old"
    assert sorted(f.name for f in tmp_path.iterdir()) == [f"o.{ending}", "t.txt"]


def test_a_stop_while_writing_keeps_the_old_file(checkpoints, tmp_path, monkeypatch, capsys):
    (tmp_path / "t.txt").write_text("a\n")
    target = tmp_path / "o.npy"
    target.write_text("old")
    monkeypatch.setattr(os, "replace", lambda a, b: (_ for _ in ()).throw(KeyboardInterrupt))
    words = ["--input", str(tmp_path / "t.txt"), "--output", str(target)]
    assert main(["embed", checkpoints["autoregressive"], *words]) == 130
    assert target.read_text() == "old"
    assert sorted(f.name for f in tmp_path.iterdir()) == ["o.npy", "t.txt"]


@pytest.mark.parametrize(
    ("content", "output", "told"),
    [
        ('{"text": "a"}\n{"text": ""}\n', "o.npy", "in.jsonl:2"),
        ('{"text": "a"}\n{broken\n', "o.npy", "in.jsonl:2"),
        ('{"other": "a"}\n', "o.npy", "text must be"),
        ('{"text": "a"}\n', "o.csv", "must end in"),
        ('{"text": "a"}\n', "nowhere/o.npy", "no folder"),
        ('{"text": "a \\ud800"}\n', "o.npy", "in.jsonl:1: half of a surrogate pair"),
        ('{"text": "a"}\n', "in.jsonl", "is the input"),
        ('{"text": "a"}\n', "o" * 300 + ".npy", "File name too long"),
    ],
)
def test_bad_input_gives_one_line_and_no_file(checkpoints, tmp_path, capsys, content, output, told):
    """Bug: a traceback, or half a file left behind."""
    source = tmp_path / "in.jsonl"
    source.write_text(content)
    target = tmp_path / output
    assert main(["embed", checkpoints["autoregressive"], "--input", str(source), "--output", str(target)]) == 2
    error = capsys.readouterr().err.strip().splitlines()
    assert len(error) == 1
    assert told in error[0]
    assert [f.name for f in tmp_path.iterdir()] == ["in.jsonl"]
    assert source.read_text() == content


@pytest.mark.parametrize(
    ("source", "output", "told"),
    [
        ("none.txt", "o.npy", "none.txt: No such file"),
        ("none.jsonl", "o.npy", "no data file"),
        ("t.csv", "o.npy", "must end in .jsonl or .txt"),
        ("t.txt", "folder.npy", "is a folder"),
    ],
)
def test_files_are_checked_before_the_model_is_opened(checkpoints, tmp_path, monkeypatch, capsys, source, output, told):
    """Bugs pinned: a csv read as lines of text, and an output found to be wrong after all texts were embedded."""
    for name in ("t.csv", "t.txt"):
        (tmp_path / name).write_text("a\n")
    (tmp_path / "folder.npy").mkdir()
    monkeypatch.setattr("polydecode.cli.embed.open_model", lambda *_: pytest.fail("the model was opened"))
    words = ["--input", str(tmp_path / source), "--output", str(tmp_path / output)]
    assert main(["embed", checkpoints["autoregressive"], *words]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert told in err
    assert not (tmp_path / "o.npy").exists()
