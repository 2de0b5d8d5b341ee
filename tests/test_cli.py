"""The command line: commands on a tiny checkpoint, bad input in one line, YAML files, and --help in no time."""

import importlib.util
import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from transformers import GPT2Config, GPT2LMHeadModel

from polydecode.auto import load_tokenizer
from polydecode.cli import COMMANDS, main, output
from polydecode.cli.generate import encode
from polydecode.cli.parser import peek
from tiny import tiny_base
from tiny_tokenizer import tiny_tokenizer

LINES = ["the cat sat on the mat", "one two three four five six seven", "a b c d e f g h i j k l m n o p"]
LIMIT_S = 0.5
"""What issue 1 allows `polydecode --help`."""


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """A Hugging Face folder with a tiny random llama of 5 layers and its tokenizer."""
    folder = tmp_path_factory.mktemp("cli") / "source"
    tokenizer = tiny_tokenizer()
    base = tiny_base(dtype=torch.float32, vocab_size=len(tokenizer), max_position_embeddings=128)
    base.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def checkpoint(source) -> Path:
    """The source converted to dmtd with 2 decoding layers."""
    folder = source.parent / "checkpoint"
    assert main(["convert", str(source), str(folder), "--method", "dmtd", "--num-decoding-layers", "2"]) == 0
    return folder


@pytest.fixture
def cli(capsys):
    """Run a command in this process: (exit code, stdout, stderr)."""

    def run(*words):
        capsys.readouterr()
        code = main([str(w) for w in words])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def fails(result, *needles: str) -> str:
    """The one line of a refusal, after checking that it is one line, exit code 2, and nothing on stdout."""
    code, out, err = result
    assert (code, out) == (2, ""), result
    assert err.startswith("polydecode: error: "), err
    assert err.count("\n") == 1, err
    for needle in needles:
        assert needle in err, err
    return err


def test_help_answers_within_the_limit():
    """Bug pinned: an import of torch or transformers at the top of the command line (4 s)."""
    seconds = []
    for _ in range(3):
        started = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-m", "polydecode", "--help"], capture_output=True, text=True, check=True
        )
        seconds.append(time.perf_counter() - started)
    assert all(name in done.stdout for name in COMMANDS)
    assert min(seconds) < LIMIT_S


def test_help_imports_nothing_heavy():
    code = "import sys; from polydecode.cli import main; main(['--help']); print(sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    modules = done.stdout.splitlines()[-1]
    assert not any(f"'{name}'" in modules for name in ("torch", "transformers", "jsonargparse", "yaml"))


def test_exit_codes_of_a_process(tmp_path):
    """A bad command line ends with code 2, one line, no traceback."""
    command = [sys.executable, "-m", "polydecode", "convert", str(tmp_path), str(tmp_path / "o"), "--method", "dmdt"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    fails((done.returncode, done.stdout, done.stderr), "did you mean 'dmtd'?")


ENDING = """
import atexit
import polydecode.__main__ as entry

class Late:
    def __del__(self):
        print("taken apart")

late = Late()

def main():
    atexit.register(print, "said at exit")
    print("done")
    return 3 // {divisor}

entry.main = main
entry.program()
"""


@pytest.mark.parametrize("processes", ["1", "2"])
def test_one_of_several_processes_ends_at_once(processes):
    """Pins: a thread of torch's that dies of the interpreter's end and takes a finished run with it (SIGABRT); an exit code,
    output or exit handler lost by ending at once."""
    for divisor, code in ((1, 3), (0, 1)):
        done = subprocess.run(
            [sys.executable, "-c", ENDING.format(divisor=divisor)],
            env=os.environ | {"WORLD_SIZE": processes}, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == code
        assert done.stdout.startswith("done\nsaid at exit\n")
        assert ("taken apart" in done.stdout) == (processes == "1")
        assert ("ZeroDivisionError" in done.stderr) == (divisor == 0)


def test_a_closed_pipe_is_quiet():
    """`polydecode --help | true`: no traceback on stderr."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "polydecode", "--help"]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


def test_interrupt_is_exit_code_130(monkeypatch, cli):
    monkeypatch.setattr("polydecode.cli._dispatch", lambda words: (_ for _ in ()).throw(KeyboardInterrupt))
    code, out, err = cli("methods")
    assert (code, out, err.strip()) == (130, "", "polydecode: interrupted")


def test_a_bug_keeps_its_traceback(monkeypatch):
    monkeypatch.setattr("polydecode.cli._dispatch", lambda words: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main(["methods"])


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name, cli):
    code, out, err = cli(name, "--help")
    assert (code, err) == (0, "")
    assert out.startswith(f"usage: polydecode {name}")
    assert "--json" in out
    assert "--config" in out
    assert "_" not in "".join(w for w in out.split() if w.startswith("--"))


def test_version_and_no_words(cli):
    assert cli("--version")[0] == 0
    code, out, err = cli()
    assert (code, out) == (2, "")
    assert "commands:" in err


def test_methods_lists_the_registry(cli):
    code, out, _ = cli("methods", "--json")
    found = {m["name"]: m for m in json.loads(out.splitlines()[-1])["methods"]}
    assert code == 0
    assert found["dmtd"]["settings"]["cycle_length"] == 3
    assert found["dmtd"]["generation_options"] == ["cycle_length"]
    assert "autoregressive" in cli("methods")[1]


@pytest.mark.parametrize(
    ("words", "needles"),
    [
        (["convrt"], ["unknown command 'convrt'", "did you mean 'convert'?"]),
        (["methods", "--jsn"], ["unknown flag '--jsn'", "did you mean '--json'?"]),
        (["methods", "more"], ["unexpected argument 'more'"]),
        (["train", "only-one"], ["missing OUT"]),
        (["train", "a", "b"], ["--data"]),
        (["train", "a", "b", "--batch-size", "x"], ["--batch-size is 'x'", "an integer"]),
        (["export", "a"], ["missing --base"]),
        (["convert", "a", "b"], ["missing --method"]),
        (["generate", "a", "--prompt", "x", "--dtype", "float31"], ["--dtype is 'float31'", "bfloat16"]),
        (["generate", "a", "--prompt", "x", "--prompt", "y"], ["one prompt"]),
        (["generate", "a", "--prompt", " "], ["the prompt is empty"]),
        (["generate", "a", "--prompt-file", "/no/such/file"], ["/no/such/file", "No such file"]),
        (["generate", "a", "--prompt", "x", "--autoregressive", "--cycle-length", "2"], ["--cycle-length"]),
        (["generate", "a", "--prompt", "x", "--max-new-tokens", "0"], ["max_new_tokens is 0"]),
        (["benchmark", "a", "--repeats", "0"], ["repeats is 0"]),
        (["benchmark", "a", "--lengths", "4,0"], ["0 new tokens"]),
        (["benchmark", "a", "--cycle-length", "2,x"], ["--cycle-length"]),
        (["inspect", "/no/such/folder"], ["/no/such/folder"]),
        (["inspect", "smollm2-135"], ["did you mean 'smollm2-135m'?"]),
        (["methods", "--config", "/no/such.yaml"], ["/no/such.yaml"]),
        (["methods", "--config"], ["--config"]),
    ],
)
def test_bad_words_are_refused_in_one_line(words, needles, cli):
    fails(cli(*words), *needles)


@pytest.mark.parametrize(
    ("settings", "needles"),
    [
        (["--method", "dmdt"], ["unknown method 'dmdt'", "did you mean 'dmtd'?"]),
        (["--method", "dmtd", "--cycle-length", "0"], ["cycle_length is 0"]),
        (["--method", "dmtd", "--cycle-length", "two"], ["--cycle-length is 'two'", "an integer"]),
        (["--method", "dmtd", "--cycle-lenght", "2"], ["did you mean '--cycle-length'?"]),
        (["--method", "dmtd", "--num-encoding-layers", "4", "--num-decoding-layers", "2"], ["5 layers"]),
        (["--method", "dmtd", "--num-decoding-layers", "2", "--merge", "ad"], ["did you mean 'add'?"]),
        (["--method", "autoregressive", "--cycle-length", "2"], ["unknown flag '--cycle-length'", "autoregressive"]),
    ],
)
def test_bad_conversions_write_nothing(settings, needles, source, tmp_path, cli):
    fails(cli("convert", source, tmp_path / "out", *settings), *needles)
    assert not list(tmp_path.iterdir())


def test_convert_refuses_what_it_cannot_do(source, tmp_path, cli):
    """An unsupported architecture, a full output folder, and a broken checkpoint folder."""
    GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=20)).save_pretrained(tmp_path / "gpt2")
    fails(cli("convert", tmp_path / "gpt2", tmp_path / "out", "--method", "dmtd"), "gpt2", "not supported")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("keep")
    fails(cli("convert", source, tmp_path / "full", "--method", "dmtd"), "not empty")
    assert (tmp_path / "full" / "notes.txt").read_text() == "keep"
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text((source / "config.json").read_text())
    (tmp_path / "broken" / "model.safetensors").write_bytes(b"not weights")
    fails(
        cli("convert", tmp_path / "broken", tmp_path / "out", "--method", "dmtd", "--num-decoding-layers", "2"),
        "broken",
    )
    fails(cli("generate", tmp_path / "broken", "--prompt", "x"), "broken")


def test_convert_tells_what_it_wrote(source, tmp_path, cli):
    words = ["convert", source, tmp_path / "c", "--method", "dmtd", "--num-decoding-layers", 2, "--json"]
    code, out, err = cli(*words, "--training-cycle-lengths", "1,2")
    result = json.loads(out.splitlines()[-1])
    assert (code, err) == (0, "")
    assert result["checkpoint"] == str(tmp_path / "c")
    assert result["settings"]["training_cycle_lengths"] == [1, 2]
    assert json.loads((tmp_path / "c" / "config.json").read_text())["training_cycle_lengths"] == [1, 2]


def test_export_gives_the_source_back(checkpoint, tmp_path, cli):
    code, _, _ = cli("export", checkpoint, "--base", tmp_path / "plain")
    assert code == 0
    assert json.loads((tmp_path / "plain" / "config.json").read_text())["model_type"] == "llama"


def test_generate_streams_the_text_it_reports(checkpoint, cli):
    """The streamed text equals the text of --json; the stats go to stderr."""
    words = ["generate", checkpoint, "--prompt", "the cat", "--max-new-tokens", 9, "--device", "cpu"]
    code, out, err = cli(*words)
    assert code == 0
    assert "new tokens" in err
    result = json.loads(cli(*words, "--json")[1].splitlines()[-1])
    assert out.rstrip("\n") == result["text"].rstrip("\n")
    assert result["method"] == "dmtd"
    assert 0 < result["new_tokens"] <= 9


def test_autoregressive_is_the_source_model(source, checkpoint, cli):
    """--autoregressive on a converted checkpoint gives the source's text, one token per forward."""
    words = ["--prompt", "one two", "--max-new-tokens", 12, "--json", "--dtype", "float32", "--device", "cpu"]
    plain = json.loads(cli("generate", source, *words)[1])
    same = json.loads(cli("generate", checkpoint, "--autoregressive", *words)[1])
    one = json.loads(cli("generate", checkpoint, "--cycle-length", 1, *words)[1])
    assert same["method"] == "autoregressive"
    assert same["tokens_per_forward"] == 1.0
    assert plain["text"] == same["text"] == one["text"]


def test_sampling_follows_the_seed(checkpoint, cli):
    words = ["generate", checkpoint, "--prompt", "a b", "--max-new-tokens", 16, "--temperature", 1.5, "--json"]
    texts = [json.loads(cli(*words, "--seed", seed)[1])["text"] for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_prompt_comes_from_file_or_stdin(checkpoint, tmp_path, monkeypatch, cli):
    (tmp_path / "p.txt").write_text("the mat")
    words = ["--max-new-tokens", 5, "--json"]
    given = json.loads(cli("generate", checkpoint, "--prompt", "the mat", *words)[1])["text"]
    assert json.loads(cli("generate", checkpoint, "--prompt-file", tmp_path / "p.txt", *words)[1])["text"] == given
    monkeypatch.setattr("sys.stdin", io.StringIO("the mat"))
    assert json.loads(cli("generate", checkpoint, *words)[1])["text"] == given


@pytest.mark.parametrize("prompt", ["null", "[1, 2]", "a: b", "1e3", "--flag"])
def test_a_prompt_is_taken_as_it_is(prompt, checkpoint, monkeypatch, cli):
    """Bug pinned: jsonargparse reads values as YAML, so that the prompt "null" was no prompt."""
    seen = []

    def noted(tokenizer, text, chat):
        seen.append(text)
        return tokenizer(text, return_tensors="pt").input_ids

    monkeypatch.setattr("polydecode.cli.generate.encode", noted)
    code, _, _ = cli("generate", checkpoint, f"--prompt={prompt}", "--max-new-tokens", 1)
    assert (code, seen) == (0, [prompt])


def test_chat_uses_the_template(checkpoint, cli):
    tokenizer = load_tokenizer(checkpoint)
    assert (
        tokenizer.decode(encode(tokenizer, "hi", chat=True)[0])
        == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert cli("generate", checkpoint, "--prompt", "hi", "--chat", "--max-new-tokens", 2)[0] == 0


def test_generate_refuses_what_does_not_fit(checkpoint, source, tmp_path, cli):
    """A prompt beyond the context, a tokenizer without a chat template, an option the method lacks."""
    fails(cli("generate", checkpoint, "--prompt", "a b c", "--max-new-tokens", 1000), "context of 128")
    fails(cli("generate", checkpoint, "--prompt", "x", "--cycle-length", 0, "--max-new-tokens", 9), "cycle_length is 0")
    fails(cli("generate", source, "--prompt", "x", "--cycle-length", 2), "cycle_length", "autoregressive")
    plain = tmp_path / "plain"
    assert cli("export", checkpoint, "--base", plain)[0] == 0
    for file in plain.glob("chat_template*"):
        file.unlink()
    fails(cli("generate", plain, "--prompt", "x", "--chat"), "no chat template")


def test_inspect_predicts_by_the_formula(checkpoint, cli):
    """PLT = [L + (c - 1)(E + D)] / (c L) for the checkpoint's own split, 5 layers with 2 decoding."""
    code, out, _ = cli("inspect", checkpoint, "--json")
    result = json.loads(out.splitlines()[-1])
    assert code == 0
    assert (result["method"], result["num_layers"], result["architecture"]) == ("dmtd", 5, "llama")
    assert result["chat_template"]
    assert result["pad_is_eos"]
    assert not result["head_is_tied"]
    own = [r for r in result["costs"]["dmtd"] if r["settings"] == {"num_encoding_layers": 0, "num_decoding_layers": 2}]
    for row in own:
        cycle = row["options"]["cycle_length"]
        assert row["forwards_per_token"] == pytest.approx((5 + (cycle - 1) * 2) / (cycle * 5))
        assert 1 <= row["speedup_with_head"] <= row["speedup"]
    assert [r["options"]["cycle_length"] for r in own] == list(range(1, 9))


def test_inspect_reads_no_weights(source, tmp_path, cli):
    """config.json is enough, and the parameters it implies are those of the real model."""
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    result = json.loads(cli("inspect", tmp_path, "--json")[1])
    base = tiny_base(dtype=torch.float32, vocab_size=result["vocab_size"])
    assert result["parameters"] == sum(p.numel() for p in base.parameters())
    assert result["method"] is None
    assert not result["tokenizer"]
    assert "no tokenizer" in cli("inspect", tmp_path)[1]


def test_yaml_sets_and_flags_win(checkpoint, tmp_path, cli):
    """Bug pinned: a file named after a flag used to override it."""
    file = tmp_path / "g.yaml"
    file.write_text(
        yaml.safe_dump({"checkpoint": str(checkpoint), "prompt": ["the cat"], "max_new_tokens": 3, "json": True})
    )
    assert json.loads(cli("generate", "--config", file)[1])["new_tokens"] == 3
    assert json.loads(cli("generate", "--max-new-tokens", 2, "--config", file)[1])["new_tokens"] == 2


@pytest.mark.parametrize(
    ("content", "needle"),
    [
        ("max_new_token: 3", "did you mean 'max_new_tokens'?"),
        ("max_new_tokens: many", "--max-new-tokens is 'many'"),
        ("chat: 3", "must be true or false"),
        ("- 1", "name: value"),
        ("a: [", "no valid YAML"),
    ],
)
def test_bad_yaml_is_one_line(content, needle, tmp_path, cli):
    (tmp_path / "g.yaml").write_text(content)
    fails(cli("generate", "x", "--prompt", "y", "--config", tmp_path / "g.yaml"), needle)


def test_the_method_may_come_from_the_file(source, tmp_path, cli):
    (tmp_path / "c.yaml").write_text("method: dmtd\nnum_decoding_layers: 1\ncycle_length: 4\n")
    assert peek(["--config", str(tmp_path / "c.yaml")], "method") == "dmtd"
    code, out, _ = cli(
        "convert", source, tmp_path / "c", "--config", tmp_path / "c.yaml", "--cycle-length", 2, "--json"
    )
    assert code == 0
    assert json.loads(out)["settings"]["num_decoding_layers"] == 1
    assert json.loads(out)["settings"]["cycle_length"] == 2


def test_train_runs_from_the_command_line(checkpoint, tmp_path, cli):
    """Two steps, repeated --data, metrics as JSON, a loadable checkpoint; a broken line is refused with its number."""
    files = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for file in files:
        file.write_text("".join(json.dumps({"prompt": p, "response": p}) + "\n" for p in LINES))
    words = ["train", checkpoint, tmp_path / "out", "--data", files[0], "--data", files[1], "--max-steps", 2]
    code, out, _ = cli(*words, "--batch-size", 2, "--eval-fraction", 0, "--json")
    assert code == 0
    assert json.loads(out.splitlines()[-1])["steps"] == 2
    assert cli("generate", tmp_path / "out", "--prompt", "a", "--max-new-tokens", 2)[0] == 0
    files[1].write_text('{"prompt": "a", "response": "b"}\n{"prompt": ')
    code, out, err = cli("train", checkpoint, tmp_path / "out2", "--data", files[1])
    assert code == 2
    assert "b.jsonl:2:" in err.splitlines()[-1]


def test_docs_are_up_to_date():
    """docs/cli.md is what the commands say: run `python scripts/make_cli_docs.py` when this fails."""
    script = Path(__file__).parent.parent / "scripts" / "make_cli_docs.py"
    spec = importlib.util.spec_from_file_location("make_cli_docs", script)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.main(["--check"]) == 0
    assert str(Path.home()) not in module.PAGE.read_text()


def test_tables_align():
    assert output.table(["a", "n"], [["x", 1], ["long", 22]]).splitlines() == ["a      n", "x      1", "long  22"]


def test_a_setting_that_is_on_by_default_stays_on(tmp_path, source, capsys):
    """Bug: a boolean flag that means False when it is not given, whatever the setting's default is."""
    for extra, expected in (([], True), (["--fuse-write", "false"], False)):
        out = tmp_path / f"o{expected}"
        assert main(["convert", str(source), str(out), "--method", "block_diffusion", *extra]) == 0
        written = json.loads((out / "config.json").read_text())
        assert written["fuse_write"] is expected
        assert written["fill_last_block"] is True
    assert main(["convert", str(source), str(tmp_path / "x"), "--method", "block_diffusion", "--fuse-write", "so"]) == 2
    assert "true or false" in capsys.readouterr().err


def test_a_block_above_the_trained_one_is_told(tmp_path, source, capsys):
    """Bug: a note that the command line swallows with the libraries' warnings."""
    assert main(["convert", str(source), str(tmp_path / "b"), "--method", "block_diffusion", "--block-size", "4"]) == 0
    words = ["generate", str(tmp_path / "b"), "--prompt", "hello", "--max-new-tokens", "4"]
    capsys.readouterr()
    assert main([*words, "--block-size", "8", "--threshold", "0"]) == 0
    assert "note: block_size 8 is above the trained 4" in capsys.readouterr().err
    assert main([*words, "--stop", ""]) == 2
    assert "stop text is empty" in capsys.readouterr().err
    assert main(["benchmark", str(tmp_path / "b"), "--repeats", "1", "--new-tokens", "4", "--prompt-tokens", "4",
                 "--selector", "random,margin", "--dtype", "float32", "--json"]) == 0  # fmt: skip
    chosen = capsys.readouterr().out
    assert "random" in chosen
    assert "margin" in chosen


def test_resuming_nothing_leaves_nothing(tmp_path, checkpoint, capsys):
    """Bug: empty folders made before the refusal."""
    data = tmp_path / "d.jsonl"
    data.write_text(json.dumps({"prompt": "a", "response": "b"}) + "\n")
    assert main(["train", str(checkpoint), str(tmp_path / "o"), "--data", str(data), "--resume"]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
    assert not (tmp_path / "o").exists()
