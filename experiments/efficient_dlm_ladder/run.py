"""Efficient-DLM's ladder (its table 1, and table 2's masking schedules) at small scale: `python run.py OUT [RUNG ...]`.

A small llama is trained from scratch on two of the demo's tasks (reverse words, sort numbers), then converted by every rung's
YAML in this folder with the same data, seed and tokens. Prints one table: exact answers at each threshold with the tokens
per forward (prefill not counted), and how far the weights moved. Legend of columns in EXPERIMENTS.md.
"""

import json
import shutil
import sys
import time
from pathlib import Path

import torch
import yaml
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from polydecode import convert, load
from polydecode.config import TrainConfig
from polydecode.convert import save_checkpoint
from polydecode.demo.tasks import WORDS, Item, held_out, items, write_jsonl
from polydecode.generate import generate
from polydecode.train import train

HERE = Path(__file__).parent
TASKS = ("reverse", "sort")


def make_tokenizer() -> PreTrainedTokenizerFast:
    words = ["<end>", "<pad>", "->", "Reverse:", "Sort:", *WORDS, *map(str, range(10, 100))]
    inner = Tokenizer(models.WordLevel({w: i for i, w in enumerate(dict.fromkeys(words))}, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>", pad_token="<pad>", unk_token="<pad>")


def chosen_items(seed: int, count: int) -> list[Item]:
    return [item for item in items(seed, count * 3 // 2) if item.task in TASKS]


def train_to(checkpoint: Path, out: Path, data: Path, common: dict, tokens: int, rate: float) -> dict:
    if (out / "training_metrics.json").exists():  # of an earlier run of this script
        return {}
    shutil.rmtree(out, ignore_errors=True)
    return train(
        TrainConfig(
            checkpoint=str(checkpoint), out=str(out), data=[str(data)], batch_size=common["batch_size"], epochs=100,
            max_tokens=tokens, learning_rate=rate, train_embeddings=True, eval_fraction=0.002, log_steps=100,
        )
    )  # fmt: skip


def measure(model, tokenizer, questions: list[Item], common: dict, **options) -> tuple[float, float]:
    """(share of exact answers, tokens per forward without the prefill), one item at a time."""
    right = tokens = forwards = 0
    for question in questions:
        ids = torch.tensor([tokenizer(question.prompt)["input_ids"]])
        out = generate(
            model, ids, max_new_tokens=common["answer_tokens"], do_sample=False, eos_token_id=0,
            return_dict_in_generate=True, **options,
        )  # fmt: skip
        answer = out.sequences[0, ids.shape[1] :].tolist()
        right += answer == [*tokenizer(question.answer)["input_ids"], tokenizer.eos_token_id]
        tokens += out.num_new_tokens[0]
        forwards += out.forwards - (model.config.method == "block_diffusion")
    return right / len(questions), tokens / forwards


def drift(model, source) -> float:
    """Mean absolute change of the layers' weights, in thousandths."""
    pairs = zip(model.base.model.layers.parameters(), source.base.model.layers.parameters(), strict=True)
    changes = torch.cat([(a - b).abs().flatten() for a, b in pairs])
    return 1000 * float(changes.mean())


def main() -> None:
    out, wanted = Path(sys.argv[1]), sys.argv[2:]
    out.mkdir(parents=True, exist_ok=True)
    common = yaml.safe_load((HERE / "common.yaml").read_text())
    tokenizer = make_tokenizer()
    training = chosen_items(1, common["items"])
    questions = [q for q in held_out(2, 2 * common["held_out"], {i.prompt for i in training}) if q.task in TASKS]
    questions = questions[: common["held_out"]]
    write_jsonl(out / "train.jsonl", training)
    base_config = LlamaConfig(
        vocab_size=len(tokenizer), max_position_embeddings=64, tie_word_embeddings=False, bos_token_id=None,
        eos_token_id=0, pad_token_id=None, **common["model"],
    )  # fmt: skip
    torch.manual_seed(0)
    start = out / "start"
    save_checkpoint(convert(LlamaForCausalLM(base_config), "autoregressive"), tokenizer, start, overwrite=True)
    train_to(start, out / "source", out / "train.jsonl", common, common["ar_tokens"], common["ar_learning_rate"])
    source = load(out / "source")
    print(f"source: exact {measure(source, tokenizer, questions, common)[0]:.3f}", flush=True)
    results = []
    for file in sorted(HERE.glob("[a-z]_*.yaml")):
        rung = yaml.safe_load(file.read_text())
        if wanted and file.stem not in wanted:
            continue
        began = time.monotonic()
        settings = rung["settings"]
        if rung["method"] == "block_diffusion":
            settings = {"block_size": common["block_size"], **settings}
        model = convert(out / "source", rung["method"], **settings)
        save_checkpoint(model, tokenizer, out / f"{file.stem}_start", overwrite=True)
        tokens = int(common["tokens"] * rung.get("tokens_factor", 1))
        train_to(
            out / f"{file.stem}_start", out / file.stem, out / "train.jsonl", common, tokens, common["learning_rate"]
        )
        model = load(out / file.stem)
        ways = common["thresholds"] if rung["method"] == "block_diffusion" else [None]
        cells = [measure(model, tokenizer, questions, common, **({} if t is None else {"threshold": t})) for t in ways]
        row = {
            "rung": file.stem, "exact": [round(c[0], 3) for c in cells], "per_forward": [round(c[1], 2) for c in cells],
            "drift": round(drift(model, source), 3), "tokens": tokens, "minutes": round((time.monotonic() - began) / 60, 1),
        }  # fmt: skip
        results.append(row)
        print(json.dumps(row), flush=True)
    (out / "results.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
