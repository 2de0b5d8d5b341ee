"""LoRA conversion: what is trained beside the adapters comes back, tied heads stay tied, adapters stand on adapters."""

import contextlib
import copy
import io
import itertools
import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

import polydecode.train as train_module
from polydecode.auto import load, load_base, load_tokenizer, resolve_source
from polydecode.auto.loading import adapter_source
from polydecode.cli import main
from polydecode.config import TrainConfig
from polydecode.convert import convert, convert_to_folder, export_base, save_checkpoint
from polydecode.errors import UserError
from polydecode.ops.vocabulary import grow_vocabulary
from polydecode.train import train
from tiny import tiny_base
from tiny_tokenizer import tiny_tokenizer

METHODS = {"dmtd": {"cycle_length": 2, "num_decoding_layers": 2}, "block_diffusion": {"block_size": 4}}
USED = len(tiny_tokenizer())
IDS = torch.tensor([[5, 6, 7, 8, 9, 10, 11]])
MERGED = 1e-5
"""float32: adapters beside the weights and merged into them round differently, with logits of about 1."""
TRAINED_FILE = "trained_weights.safetensors"
FRESH = """
import sys, torch
from polydecode import load
ids = torch.tensor([[5, 6, 7, 8, 9, 10, 11]])
with torch.no_grad():
    torch.save({path: load(path, dtype="float32")(ids).logits for path in sys.argv[2:]}, sys.argv[1])
"""


def write_data(folder: Path) -> str:
    path = folder / "data.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"say {i} ->", "response": f" apple {i}"}) + "\n" for i in range(40)))
    return str(path)


@pytest.fixture
def data(tmp_path):
    return write_data(tmp_path)


def small_base(rows=USED, tied=True, **overrides):
    return tiny_base(
        dtype=torch.float32, vocab_size=rows, layers=3, initializer_range=0.1, tie_word_embeddings=tied, **overrides
    )


def source_folder(path, dtype=torch.float32, **shape):
    """A plain Hugging Face folder with a tokenizer."""
    small_base(**shape).to(dtype).save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


def checkpoint(tmp_path, method, tied=True, name="checkpoint", rows=USED):
    model = convert(small_base(rows, tied), method, tokenizer=tiny_tokenizer(), **METHODS.get(method, {}))
    return save_checkpoint(model, tiny_tokenizer(), tmp_path / name)


def trained(source, out, data, **changes):
    settings = {"lora_rank": 4, "max_steps": 3, "batch_size": 4, "learning_rate": 1e-2, "eval_fraction": 0.2}
    train(TrainConfig(checkpoint=str(source), out=str(out), data=[data], **(settings | changes)))
    return Path(out)


def logits(model, ids=IDS):
    with torch.no_grad():
        return model.eval()(ids).logits


def is_tied(model) -> bool:
    return model.get_input_embeddings().weight is model.get_output_embeddings().weight


def one_line(function, *args, **kwargs) -> str:
    """The message of the UserError that the call raises; it has one line."""
    with pytest.raises(UserError) as caught:
        function(*args, **kwargs)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- every kind of run, and what a fresh process makes of its folder -----------------------------------------------


@dataclass(frozen=True)
class Case:
    """`added`: the checkpoint has a row more than the source that the adapter names. `everything`: embeddings and norms too."""

    method: str
    tied: bool
    added: bool
    everything: bool

    def __str__(self):
        words = ("tied" * self.tied, "added" * self.added, "everything" * self.everything)
        return "-".join([self.method, *filter(None, words)])


@dataclass
class Run:
    """What a training left: folders, the trained model's logits in memory (method's and plain), and its line on stderr."""

    source: Path
    out: Path
    logits: Tensor
    plain: Tensor
    told: str


CASES = [Case(*values) for values in itertools.product(METHODS, (True, False), (True, False), (True, False))]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lora")
    data = write_data(folder)
    return {case: _run(case, folder / str(case), data) for case in CASES}


def _run(case: Case, folder: Path, data: str) -> Run:
    rows = USED if case.added else USED + 20
    source = source_folder(folder / "source", rows=rows, tied=case.tied)
    base = load_base(source)
    if case.added and case.method == "dmtd":  # which never adds one itself
        grow_vocabulary(base, rows + 1)
    start = convert(base, case.method, tokenizer=tiny_tokenizer(), **METHODS[case.method])
    assert start.config.vocab_size == rows + case.added
    save_checkpoint(start, tiny_tokenizer(), folder / "start")
    seen = {}

    def save(adapter, model, *args, **kwargs):
        seen.update(logits=logits(model), plain=logits(model.base))
        return save_adapter(adapter, model, *args, **kwargs)

    save_adapter = train_module.save_adapter
    choice = {"train_embeddings": case.everything, "train_norms": case.everything, "adapter_source": str(source)}
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(io.StringIO()) as stderr:
        patch.setattr(train_module, "save_adapter", save)
        trained(folder / "start", folder / "out", data, **choice)
    told = next(line for line in stderr.getvalue().splitlines() if line.startswith("training "))
    return Run(source, folder / "out", **seen, told=told)


@pytest.fixture(scope="module")
def fresh(runs, tmp_path_factory):
    """The logits of every run's folder, computed by another process."""
    file = tmp_path_factory.mktemp("fresh") / "logits.pt"
    folders = [str(run.out) for run in runs.values()]
    subprocess.run([sys.executable, "-c", FRESH, str(file), *folders], check=True, timeout=120)
    return torch.load(file)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_an_adapter_comes_back_in_a_fresh_process(runs, fresh, case):
    """Bugs (known faults 1, 4, 5): a trained head, embedding or norm discarded, an added row that is another one, a tied
    head overwritten on reload: the logits are those of the model in memory when training ended."""
    run = runs[case]
    assert fresh[str(run.out)].shape == run.logits.shape
    assert (fresh[str(run.out)] - run.logits).abs().max() < MERGED
    start = logits(load(run.out.parent / "start"))
    assert (run.logits - start).abs().max() > 1e-2


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_merged_export_is_what_was_trained(runs, case, tmp_path):
    """Bug (known fault 4): merged logits that differ from the unmerged ones, or an exported head that comes loose."""
    run = runs[case]
    plain = AutoModelForCausalLM.from_pretrained(export_base(run.out, tmp_path / "plain"), dtype=torch.float32)
    assert (logits(plain) - run.plain).abs().max() < MERGED
    assert is_tied(plain) == case.tied
    assert plain.config.vocab_size == plain.get_input_embeddings().weight.shape[0] == USED + (1 if case.added else 20)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_what_was_trained_beside_adapters_is_kept_and_nothing_else(runs, case):
    """Bugs (known fault 5): the whole embedding written because a row was added, a tied weight written twice, or embeddings,
    head or norms that stay as they were."""
    run = runs[case]
    assert (run.out / TRAINED_FILE).exists() == case.everything
    model, before = load(run.out), load(run.out.parent / "start")
    assert is_tied(model) == case.tied
    names = ["model.embed_tokens.weight", "model.norm.weight"] + ["lm_head.weight"] * (not case.tied)
    now, then = model.base.state_dict(), before.base.state_dict()
    assert all((not torch.equal(now[name], then[name])) == case.everything for name in names)
    if case.everything:
        kept = set(load_file(run.out / TRAINED_FILE))
        layer_norms = {name for name in then if "layernorm" in name}
        assert kept == {*names, *layer_norms}
        assert json.loads((run.out / "polydecode_adapter.json").read_text())["trained_weights"] == sorted(kept)
    kinds = [part.split(" of ")[-1] for part in run.told.partition(": ")[2].split(", ")]
    embeddings = "embeddings" if case.tied else "embeddings and head"
    assert kinds == (["adapters", embeddings, "norms"] if case.everything else ["adapters"])


@pytest.mark.parametrize("case", [c for c in CASES if c.everything and c.added], ids=str)
def test_a_merged_model_saves_the_same_again(runs, case, tmp_path):
    """Bug: weights that change on every way through a folder."""
    first = save_checkpoint(load(runs[case].out), None, tmp_path / "first")
    second = save_checkpoint(load(first), None, tmp_path / "second")
    weights = [(folder / "model.safetensors").read_bytes() for folder in (first, second)]
    assert weights[0] == weights[1]
    assert torch.equal(logits(load(first)), logits(load(runs[case].out)))


def test_the_method_chooses_what_is_trained_beside_adapters(tmp_path, data, capsys):
    """Bug: LoRA for block diffusion without embeddings, norms and head, which "must remain trainable" (paper, appendix F)."""
    for method, told in (("dmtd", False), ("block_diffusion", True), ("autoregressive", False)):
        out = trained(checkpoint(tmp_path, method, name=method), tmp_path / f"{method}_out", data)
        assert (out / TRAINED_FILE).exists() == told
        assert ("of norms" in capsys.readouterr().err) == told


def test_two_runs_write_the_same_bytes(tmp_path, data):
    """Bug: an adapter folder that holds times, paths or an order of its own."""
    source = checkpoint(tmp_path, "block_diffusion")
    one, two = (trained(source, tmp_path / name, data, max_steps=2) for name in "ab")
    names = ["adapter_model.safetensors", TRAINED_FILE, "adapter_config.json", "config.json", "polydecode_adapter.json"]
    assert all((one / name).read_bytes() == (two / name).read_bytes() for name in names)


def test_a_tied_head_gets_the_gradient_of_both_uses(tmp_path, data):
    """Bug: peft's copies of a tied embedding, of which only one is trained: rows that no text holds move through the head."""
    source = checkpoint(tmp_path, "block_diffusion", rows=USED + 20)
    out = trained(source, tmp_path / "out", data, max_steps=1)
    before, after = (load(path).get_input_embeddings().weight for path in (source, out))
    assert (before[USED + 5] != after[USED + 5]).any()


# --- dtypes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("everything", [True, False])
def test_the_dtype_of_the_file_is_not_that_of_the_model(tmp_path, data, everything):
    """Bug: an adapter saved in bfloat16 that is merged into a rounded model, but only where embeddings were trained."""
    source = checkpoint(tmp_path, "block_diffusion")
    choice = {"train_embeddings": everything, "train_norms": everything, "save_dtype": "bfloat16"}
    out = trained(source, tmp_path / "out", data, **choice)
    for name in ["adapter_model.safetensors"] + [TRAINED_FILE] * everything:
        with safe_open(out / name, "pt") as weights:
            assert {weights.get_slice(k).get_dtype() for k in weights.keys()} == {"BF16"}  # noqa: SIM118
    assert load(out).dtype == load(source).dtype == torch.float32
    assert load(out, dtype="bfloat16").dtype == torch.bfloat16


@pytest.mark.parametrize("kind", ["folder", "checkpoint"])
def test_the_row_added_to_a_half_precision_source_is_made_again(tmp_path, data, kind):
    """Bug: the rounded row of a bfloat16 checkpoint taken for another one, so that the whole embedding is written."""
    source = source_folder(tmp_path / "source", torch.bfloat16)
    if kind == "checkpoint":
        source = convert_to_folder(source, tmp_path / "plain", "autoregressive")
    start = convert_to_folder(source, tmp_path / "start", "block_diffusion", {"block_size": 4})
    choice = {"train_embeddings": False, "train_norms": False, "adapter_source": str(source)}
    out = trained(start, tmp_path / "out", data, **choice)
    assert not (out / TRAINED_FILE).exists()
    rows = [load(path, dtype="float32").get_input_embeddings().weight for path in (start, out)]
    assert rows[0].shape[0] == USED + 1
    assert torch.equal(*rows)


def test_a_row_that_cannot_be_made_again_is_kept(tmp_path, data):
    """Bug: a trained mask row replaced by the mean of the others when the adapter is loaded."""
    source = source_folder(tmp_path / "source")
    start = load(convert_to_folder(source, tmp_path / "start", "block_diffusion", {"block_size": 4}))
    with torch.no_grad():
        start.get_input_embeddings().weight[USED] += 1
    save_checkpoint(start, tiny_tokenizer(), tmp_path / "moved")
    choice = {"train_embeddings": False, "train_norms": False, "adapter_source": str(source)}
    out = trained(tmp_path / "moved", tmp_path / "out", data, **choice)
    assert list(load_file(out / TRAINED_FILE)) == ["model.embed_tokens.weight"]
    assert torch.equal(load(out).get_input_embeddings().weight, start.get_input_embeddings().weight)


# --- chains --------------------------------------------------------------------------------------------------------


@pytest.fixture
def pair(tmp_path, data):
    """A folder with the adapters `control` (on a plain source) and `blocks`, which stands on it and has one more row."""
    folder = tmp_path / "adapters"
    control = trained(source_folder(tmp_path / "source"), folder / "control", data)
    start = convert_to_folder(control, tmp_path / "start", "block_diffusion", {"block_size": 4})
    trained(start, folder / "blocks", data, adapter_source=str(control))
    return folder


def test_an_adapter_may_stand_on_an_adapter(pair, tmp_path):
    """Bug: the path of the second one's source lost when both are moved, or the first one not applied."""
    assert json.loads((pair / "blocks" / "polydecode_adapter.json").read_text())["source"] == "../control"
    expected = logits(load(pair / "blocks"))
    moved = tmp_path / "elsewhere" / "moved"
    moved.parent.mkdir()
    shutil.move(pair, moved)
    blocks = moved / "blocks"
    model = load(blocks)
    assert torch.equal(logits(model), expected)
    assert model.config.vocab_size == USED + 1
    assert torch.equal(logits(load_base(blocks)), logits(model.base))
    plain = AutoModelForCausalLM.from_pretrained(export_base(blocks, tmp_path / "plain"))
    assert torch.equal(logits(plain), logits(model.base))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (blocks / name).unlink()
    assert load_tokenizer(blocks).eos_token_id == 2
    (tmp_path / "link").symlink_to(blocks)
    assert torch.equal(logits(load(tmp_path / "link")), expected)


def test_train_and_export_take_a_chain_from_the_command_line(pair, tmp_path, data, capsys):
    """Bug: a chain that only `load` understands."""
    third = convert_to_folder(pair / "blocks", tmp_path / "third", "dmtd", {"num_decoding_layers": 2})
    words = [third, pair / "third", "--data", data, "--lora-rank", "4", "--max-steps", "1", "--batch-size", "4"]
    words += ["--adapter-source", pair / "blocks", "--lora-targets", "q_proj,v_proj", "--train-embeddings", "true"]
    assert main(["train", *map(str, words)]) == 0, capsys.readouterr().err
    assert adapter_source(resolve_source(pair / "third")) == str(pair / "blocks")
    assert (pair / "third" / TRAINED_FILE).exists()
    assert main(["export", str(pair / "third"), "--base", str(tmp_path / "plain")]) == 0, capsys.readouterr().err
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    assert torch.equal(logits(plain), logits(load(pair / "third").base))


def test_a_source_beside_the_adapter_is_named_from_the_folder(tmp_path, data, monkeypatch):
    """Bug: "adapters/../adapters/x" or a relative path written as it was given, which is lost in another folder."""
    source_folder(tmp_path / "source")
    monkeypatch.chdir(tmp_path)
    trained("source", "out", data, max_steps=1)
    trained("./../" + tmp_path.name + "/source", "two", data, max_steps=1)
    trained("source", "deep/out", data, max_steps=1)
    (tmp_path / "far" / "inner").mkdir(parents=True)
    shutil.copytree(tmp_path / "source", tmp_path / "far" / "source")
    (tmp_path / "hop").symlink_to(tmp_path / "far" / "inner")
    trained("hop/../source", "far/out", data, max_steps=1)
    outs = ("out", "two", "deep/out", "far/out")
    named = [json.loads((tmp_path / out / "polydecode_adapter.json").read_text())["source"] for out in outs]
    assert named == ["../source", "../source", str(tmp_path / "source"), "../source"]
    monkeypatch.chdir("/")
    assert torch.equal(logits(load(tmp_path / "out")), logits(load(tmp_path / "two")))


def test_only_one_added_row_may_differ_from_the_source(tmp_path, data):
    """Bug: an adapter that names a source with other weights, told by the added row alone."""
    source = source_folder(tmp_path / "source")
    start = convert_to_folder(source, tmp_path / "start", "block_diffusion", {"block_size": 4})
    other = load_base(source)
    with torch.no_grad():
        other.get_input_embeddings().weight[3, 3] += 1e-3
    other.save_pretrained(tmp_path / "other")
    fewer = small_base()
    fewer.resize_token_embeddings(USED - 1)
    fewer.save_pretrained(tmp_path / "fewer")
    for name in ("other", "fewer"):
        message = one_line(trained, start, tmp_path / "x", data, adapter_source=str(tmp_path / name))
        assert "other weights" in message
    assert not (tmp_path / "x").exists()


def test_adapters_that_name_each_other_are_told(pair):
    """Bug: endless recursion."""
    note = pair / "control" / "polydecode_adapter.json"
    for name in (".", "../blocks"):
        note.write_text(json.dumps({"source": name}))
        assert "names itself" in one_line(load, pair / "blocks" if name != "." else pair / "control")
        assert "names itself" in one_line(load, pair / "control")
    shutil.rmtree(pair / "control")
    assert "needs its source" in one_line(load, pair / "blocks")


def test_an_adapter_on_a_source_without_a_tokenizer_is_exported(tmp_path):
    """Bug: an adapter held back because nobody has a tokenizer, which a checkpoint is not."""
    from peft import LoraConfig, get_peft_model

    from polydecode.convert import save_adapter

    small_base().save_pretrained(tmp_path / "source")
    model = convert(tmp_path / "source", "dmtd", num_decoding_layers=1)
    adapted = get_peft_model(model.base, LoraConfig(r=2, target_modules="all-linear"))
    save_adapter(adapted, model, tmp_path / "source", tmp_path / "adapter")
    exported = export_base(tmp_path / "adapter", tmp_path / "plain")
    assert (exported / "config.json").exists()


# --- settings, and damaged folders ---------------------------------------------------------------------------------


def test_targets_are_names_of_layers(tmp_path, data):
    """Bug: a misspelt layer that trains nothing."""
    source = checkpoint(tmp_path, "dmtd")
    out = trained(source, tmp_path / "a", data, lora_targets="q_proj, v_proj")
    assert sorted(json.loads((out / "adapter_config.json").read_text())["target_modules"]) == ["q_proj", "v_proj"]
    for wrong in ("q_prj", "q_proj,lm_head", ","):
        message = one_line(trained, source, tmp_path / "b", data, lora_targets=wrong)
        assert "down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj" in message
        assert repr(wrong.split(",")[-1]) in message or "is empty" in message
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize(
    "setting",
    [{"lora_targets": "q_proj"}, {"lora_alpha": 8}, {"train_norms": False}, {"adapter_source": "smollm2-135m"}],
)
def test_settings_of_adapters_need_a_rank(setting):
    """Bug: a run over all weights where adapters were meant, because the rank was left out."""
    message = one_line(TrainConfig(checkpoint="c", out="o", data=["d"], **setting).check)
    assert "--lora-rank" in message
    TrainConfig(checkpoint="c", out="o", data=["d"], lora_rank=2, **setting).check()


def _other_shape(out):
    weights = load_file(out / TRAINED_FILE)
    save_file(weights | {"model.norm.weight": torch.zeros(3)}, out / TRAINED_FILE)


def _without_norm(out):
    weights = load_file(out / TRAINED_FILE)
    del weights["model.norm.weight"]
    save_file(weights, out / TRAINED_FILE)


def _one_more(out):
    save_file(load_file(out / TRAINED_FILE) | {"model.layers.9.bias": torch.zeros(3)}, out / TRAINED_FILE)


def _one_more_adapter(out):
    file = out / "adapter_model.safetensors"
    name = "base_model.model.model.layers.9.self_attn.q_proj.lora_A.weight"
    save_file(load_file(file) | {name: torch.zeros(4, 32)}, file)


def _truncated(out):
    file = out / TRAINED_FILE
    file.write_bytes(file.read_bytes()[:-50])


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda out: (out / TRAINED_FILE).unlink(), "incomplete"),
        (_other_shape, "does not fit"),
        (_without_norm, "incomplete: no 'model.norm.weight'"),
        (_one_more, "has no 'model.layers.9.bias'"),
        (_one_more_adapter, "does not fit its source"),
        (_truncated, "cannot apply"),
    ],
)
def test_damaged_weights_are_told(tmp_path, data, damage, told):
    """Bug: a file that does not fit, or is gone, taken in part or in silence."""
    out = trained(checkpoint(tmp_path, "block_diffusion"), tmp_path / "adapter", data, max_steps=1)
    damage(out)
    assert told in one_line(load, out)


# --- the real model ------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "told"),
    [
        ("dmtd", "(3.5%): 4,884,480 of adapters"),
        ("block_diffusion", "4,884,480 of adapters, 28,312,128 of embeddings, 35,136 of norms"),
    ],
)
def test_smollm2_with_rank_16_comes_back(tmp_path, data, capsys, method, told):
    """Bug (known fault 1): the mask token of SmolLM2, whose tokenizer uses all 49,152 rows, outside the embedding or lost."""
    seen = {}

    def save(adapter, model, *args, **kwargs):
        seen["logits"] = logits(model)
        seen["merged"] = copy.deepcopy(adapter).merge_and_unload().state_dict()
        return save_adapter(adapter, model, *args, **kwargs)

    save_adapter = train_module.save_adapter
    start = convert_to_folder("smollm2-135m", tmp_path / "start", method, {}, dtype="float32")
    choice = {
        "lora_rank": 16,
        "max_steps": 1,
        "learning_rate": 1e-3,
        "max_length": 32,
        "adapter_source": "smollm2-135m",
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_module, "save_adapter", save)
        out = trained(start, tmp_path / "out", data, **choice, max_eval_examples=1)
    line = next(line for line in capsys.readouterr().err.splitlines() if line.startswith("training "))
    assert line.endswith(told)
    again = load(out)
    assert again.config.vocab_size == 49152 + (method == "block_diffusion")
    state = again.base.state_dict()
    assert state.keys() == seen["merged"].keys()
    assert all(torch.equal(state[name], value) for name, value in seen["merged"].items())
    assert (logits(again) - seen["logits"]).abs().max() < 5e-3  # of about 20; float32 is 9e-4 off float64 as it is
    assert is_tied(again)
