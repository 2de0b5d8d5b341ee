"""`polydecode distill`: answers that depend on their prompt alone, resumable to the byte, and never a false end."""

import gc
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from polydecode.auto import load, load_tokenizer
from polydecode.cli import main
from polydecode.config import DataConfig
from polydecode.convert import convert, save_checkpoint
from polydecode.data import encode, prompt_ids
from polydecode.distill.output import Output
from polydecode.distill.settings import DistillConfig
from tiny import SETTINGS, tiny_base
from tiny_tokenizer import tiny_tokenizer

WORDS = ["apple", "river", "stone", "Paris", "hello", "user", "0123"]


@pytest.fixture(scope="module", params=["autoregressive", "dmtd", "block_diffusion"])
def source(request, tmp_path_factory):
    return _source(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return _source("autoregressive", tmp_path_factory.mktemp("plain"))


def _source(method, path):
    """A tiny model that ends its answers now and then: its end token's row of the head is a large one."""
    tokenizer = tiny_tokenizer()
    base = tiny_base(vocab_size=len(tokenizer), dtype=torch.float32)
    with torch.no_grad():
        base.lm_head.weight[2] *= 1.5
    settings = {k: v for k, v in SETTINGS.get(method, {}).items() if k != "mask_token_id"}
    save_checkpoint(convert(base, method=method, tokenizer=tokenizer, **settings), tokenizer, path / "source")
    return str(path / "source")


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    rows = [{"prompt": " ".join(WORDS[(i * k) % 7] for k in range(1, 2 + i % 5)) + " ->"} for i in range(20)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run(source, prompts, output, *flags):
    common = ["--max-new-tokens", "12", "--dtype", "float32", "--device", "cpu", "--batch-size", "4", "--window", "8"]
    return main(["distill", source, "--prompts", str(prompts), "--output", str(output), *common, *map(str, flags)])


def records(path):
    """Line by line as Python splits them, which is at more characters than a newline."""
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


@pytest.mark.parametrize("flags", [[], ["--temperature", 0.8, "--top-k", 40, "--samples-per-prompt", 2, "--seed", 3]])
def test_an_answer_is_that_of_its_prompt_alone(source, prompts, tmp_path, flags):
    """Pins: draws by place in the batch, rows that leak into each other when one leaves and another enters, answers given to
    the wrong prompt, records out of order."""
    assert run(source, prompts, tmp_path / "a.jsonl", "--keep-unfinished", *flags) == 0
    assert (
        run(source, prompts, tmp_path / "b.jsonl", "--keep-unfinished", *flags, "--batch-size", 3, "--window", 15) == 0
    )
    a, b = records(tmp_path / "a.jsonl"), records(tmp_path / "b.jsonl")
    assert a == b
    assert [(r["index"], r["sample"]) for r in a] == sorted((r["index"], r["sample"]) for r in a)
    assert {r["finish_reason"] for r in a} == {"stop", "length"}
    given = [json.loads(line)["prompt"] for line in prompts.read_text().splitlines()]
    assert all(r["prompt"] == given[r["index"]] for r in a)


def test_a_greedy_answer_is_that_of_generate(source, prompts, tmp_path):
    """Pins: a second decoding loop that differs from the first: end tokens, the last token lost, padding read."""
    run(source, prompts, tmp_path / "a.jsonl", "--keep-unfinished")
    model, tokenizer = load(source, dtype="float32"), load_tokenizer(source)
    for record in records(tmp_path / "a.jsonl")[:6]:
        ids = torch.tensor([prompt_ids(record["prompt"], tokenizer)])
        new = model.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :]
        text = tokenizer.decode(new, skip_special_tokens=True)
        assert record["response"] == (text if record["finish_reason"] == "stop" else text.rstrip("\ufffd"))
        assert (2 in new.tolist()) == (record["finish_reason"] == "stop")


def test_what_has_not_ended_is_left_out_or_teaches_no_end(plain, prompts, tmp_path):
    """Pins: an answer cut at max_new_tokens that is trained with an end token behind it."""
    run(plain, prompts, tmp_path / "all.jsonl", "--keep-unfinished")
    run(plain, prompts, tmp_path / "ended.jsonl")
    everything, ended = records(tmp_path / "all.jsonl"), records(tmp_path / "ended.jsonl")
    cut = [r for r in everything if r["finish_reason"] == "length"]
    assert cut
    assert ended == [r for r in everything if r["finish_reason"] == "stop"]
    counts = json.loads((tmp_path / "ended.jsonl.meta.json").read_text())["counts"]
    assert counts["written"] == len(ended)
    assert counts["unfinished"] >= len(cut)
    assert counts["answers"] == 20
    assert counts["written"] + counts["empty"] + counts["unfinished"] >= 20
    tokenizer = load_tokenizer(plain)
    assert encode(cut[0], tokenizer, DataConfig()).input_ids[-1] != tokenizer.eos_token_id
    assert encode(ended[0], tokenizer, DataConfig()).input_ids[-1] == tokenizer.eos_token_id
    turns = [{"role": "user", "content": "say"}, {"role": "assistant", "content": " apple"}]
    whole = encode({"messages": turns, "finish_reason": "stop"}, tokenizer, DataConfig())
    part = encode({"messages": turns, "finish_reason": "length"}, tokenizer, DataConfig())
    assert whole.input_ids[:-1] == part.input_ids


def test_conversations(plain, tmp_path):
    """Pins: the old answer left in the prompt, the system prompt lost or doubled, a chat record that trains without its
    template."""
    path = tmp_path / "prompts.jsonl"
    user, old = {"role": "user", "content": "say apple"}, {"role": "assistant", "content": "old"}
    own = {"role": "system", "content": "own"}
    path.write_text("\n".join(json.dumps({"messages": m}) for m in ([user, old], [own, user], [user, old, user])))
    assert run(plain, path, tmp_path / "o.jsonl", "--system", "brief", "--keep-unfinished") == 0
    got = [r["messages"] for r in records(tmp_path / "o.jsonl")]
    brief = {"role": "system", "content": "brief"}
    assert [m[:-1] for m in got] == [[brief, user], [own, user], [brief, user, old, user]]
    assert all(m[-1]["role"] == "assistant" and m[-1]["content"] != "old" for m in got)
    (tmp_path / "p.txt").write_text("say apple\n\nsay river\n")
    assert run(plain, tmp_path / "p.txt", tmp_path / "t.jsonl", "--chat", "--keep-unfinished") == 0
    assert [r["messages"][0]["content"] for r in records(tmp_path / "t.jsonl")] == ["say apple", "say river"]


def test_a_run_that_is_killed_goes_on_to_the_same_file(plain, tmp_path):
    """Pins: a record lost, doubled or half written by SIGKILL; a resumed run that decodes in other batches."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(f"{WORDS[i % 7]} {WORDS[i // 7 % 7]} {i}" for i in range(200)))
    assert run(plain, prompts, tmp_path / "whole.jsonl", "--keep-unfinished") == 0
    words = [
        "distill",
        plain,
        "--prompts",
        str(prompts),
        "--output",
        str(tmp_path / "killed.jsonl"),
        "--keep-unfinished",
    ]
    words += ["--max-new-tokens", "12", "--dtype", "float32", "--device", "cpu", "--batch-size", "4", "--window", "8"]
    process = subprocess.Popen(
        [sys.executable, "-m", "polydecode", *words], env=dict(os.environ), stderr=subprocess.PIPE
    )
    partial = tmp_path / "killed.jsonl.partial"
    deadline = time.monotonic() + 120
    while not (partial.is_file() and partial.stat().st_size > 1000) and time.monotonic() < deadline:
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.002)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert not (tmp_path / "killed.jsonl").exists()
    with partial.open("ab") as file:  # as if killed between writing a window and counting it
        file.write(b'{"prompt": "half a rec')
    assert main(words) == 2, "an unfinished run is not written over"
    assert main([*words, "--resume"]) == 0
    assert (tmp_path / "killed.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    metas = [json.loads((tmp_path / f"{name}.jsonl.meta.json").read_text()) for name in ("killed", "whole")]
    assert metas[0] == metas[1]
    assert sorted(p.name for p in tmp_path.glob("killed*")) == ["killed.jsonl", "killed.jsonl.meta.json"]


@pytest.mark.parametrize(
    ("step", "call"),
    [("append", 0), ("append", 1), ("append", 2), ("count", 0), ("count", 2), ("rename", 0), ("rename", 1)],
)
def test_a_death_between_any_two_writes_is_mended(plain, prompts, tmp_path, monkeypatch, step, call):
    """Pins: an order of writes that loses or doubles a window when the run dies between two of them. `step` is the write that
    does not happen, the `call`-th time."""
    run(plain, prompts, tmp_path / "whole.jsonl", "--temperature", 1.0)
    calls = []
    name = {"append": "fsync", "count": "replace", "rename": "replace"}[step]
    real = getattr(os, name)

    def dies(*arguments):
        final = name == "replace" and not str(arguments[0]).endswith(".new")
        if step == "append" or (step == "rename") == final:
            calls.append(1)
            if len(calls) == call + 1:
                raise SystemError("killed here")
        return real(*arguments)

    monkeypatch.setattr(os, name, dies)
    with pytest.raises(SystemError):
        run(plain, prompts, tmp_path / "a.jsonl", "--temperature", 1.0)
    monkeypatch.setattr(os, name, real)
    gc.collect()  # a dead process holds no lock
    assert run(plain, prompts, tmp_path / "a.jsonl", "--temperature", 1.0, "--resume") == 0
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


def test_nothing_is_written_over_and_settings_stay(plain, prompts, tmp_path, capsys):
    """Pins: answers thrown away by a second start, or two settings mixed in one file."""
    out = tmp_path / "a.jsonl"
    assert run(plain, prompts, out) == 0
    before = out.read_bytes()
    assert run(plain, prompts, out) == 2
    assert "--resume, --overwrite" in capsys.readouterr().err
    assert run(plain, prompts, out, "--resume") == 0
    assert run(plain, prompts, out, "--resume", "--max-new-tokens", 9) == 2
    assert "max_new_tokens was 12, now it is 9" in capsys.readouterr().err
    prompts.write_text(prompts.read_text() + '{"prompt": "one more"}\n')
    assert run(plain, prompts, out, "--resume") == 2
    assert "prompts_sha256" in capsys.readouterr().err
    assert out.read_bytes() == before
    assert run(plain, prompts, out, "--overwrite", "--temperature", 1.0) == 0
    assert out.read_bytes() != before
    (tmp_path / "mine.jsonl").write_text("precious\n")
    assert run(plain, prompts, tmp_path / "mine.jsonl", "--resume") == 2
    assert (tmp_path / "mine.jsonl").read_text() == "precious\n"


def test_two_runs_do_not_write_one_file(plain, prompts, tmp_path):
    """Pins: a scheduler that starts the job twice."""
    config = DistillConfig(plain, str(prompts), str(tmp_path / "a.jsonl"), overwrite=True)
    first, second = Output(config, {}), Output(config, {})
    first.open()
    with pytest.raises(ValueError, match="another run is writing"):
        second.open()


BAD = {
    "not JSON": ('{"prompt": "a"}\n{"prompt"', ":2: not valid JSON"),
    "no object": ("[1]", ":1: a line must be a JSON object"),
    "wrong keys": ('{"text": "a"}', ":1: has text; needs prompt or messages"),
    "empty prompt": ('{"prompt": "a"}\n\n{"prompt": " "}', ":3: prompt must be a non-empty string"),
    "number": ('{"prompt": 3}', ":1: prompt must be a non-empty string"),
    "no turns": ('{"messages": []}', ":1: messages have no last user turn"),
    "only an answer": ('{"messages": [{"role": "assistant", "content": "x"}]}', ":1: messages have no last user turn"),
    "no roles": ('{"messages": ["x"]}', ":1: messages must be a list of objects"),
    "too long": (json.dumps({"prompt": "ab " * 600}), ":1: the prompt has"),
    "nothing": ("", "has no records"),
    "bytes": (b'{"prompt": "a"}\n{"prompt": "\xff"}', ":2: not UTF-8"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_prompts_are_told_by_file_and_line(plain, tmp_path, capsys, case):
    """Pins: a traceback, or hours of answers before the fault of the last line is found."""
    content, expected = BAD[case]
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert run(plain, path, tmp_path / "a.jsonl") == 2
    told = capsys.readouterr().err.strip()
    assert expected in told
    assert "\n" not in told
    assert sorted(p.name for p in tmp_path.iterdir()) == ["prompts.jsonl"]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--temperature", "-1"], "temperature"),
        (["--top-p", "0"], "top_p"),
        (["--batch-size", "0"], "batch_size"),
        (["--samples-per-prompt", "2"], "all the same at temperature 0"),
        (["--system", "x"], "needs a conversation"),
        (["--resume", "--overwrite"], "not both"),
        (["--output", "a.txt"], "must end in .jsonl"),
        (["--prompts", "missing.txt"], "no prompts file"),
        (["--prompts", "a.csv"], "must be .jsonl"),
    ],
)
def test_bad_settings(plain, prompts, tmp_path, capsys, flags, expected):
    """Pins: a setting out of range that is found by a kernel, or has no effect."""
    assert run(plain, prompts, tmp_path / "a.jsonl", *flags) == 2
    told = capsys.readouterr().err.strip()
    assert expected in told
    assert "\n" not in told


def test_nothing_kept_is_an_error(plain, prompts, tmp_path, capsys):
    """Pins: an empty training file that fails an hour later."""
    tokenizer = load_tokenizer(plain)
    never = tiny_base(vocab_size=len(tokenizer), dtype=torch.float32)
    with torch.no_grad():
        never.lm_head.weight[2] = 0
    save_checkpoint(convert(never, method="autoregressive"), tokenizer, tmp_path / "never")
    assert run(str(tmp_path / "never"), prompts, tmp_path / "a.jsonl", "--max-new-tokens", 1) == 2
    assert "no answer was kept" in capsys.readouterr().err
    assert not list(tmp_path.glob("a.jsonl*"))
