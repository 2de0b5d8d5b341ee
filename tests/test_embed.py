"""`polydecode embed`: vectors that depend on the text alone, in files that are whole or not there."""

import json

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
    for bad in (
        {"texts": []},
        {"texts": ["a", " "]},
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
    assert len(capsys.readouterr().out.splitlines()) == 4


@pytest.mark.parametrize(
    ("content", "output", "told"),
    [
        ('{"text": "a"}\n{"text": ""}\n', "o.npy", "in.jsonl:2"),
        ('{"text": "a"}\n{broken\n', "o.npy", "in.jsonl:2"),
        ('{"other": "a"}\n', "o.npy", "text must be"),
        ('{"text": "a"}\n', "o.csv", "must end in"),
        ('{"text": "a"}\n', "nowhere/o.npy", "no folder"),
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
