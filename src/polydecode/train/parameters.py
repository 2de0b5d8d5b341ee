"""Which parameters a run trains: all, or low-rank adapters with or without embeddings, norms and head beside them.

Embeddings, norms and head are trained in place, not as peft's `modules_to_save`: those copy the embeddings, which unties a
tied head. An adapter folder keeps what was trained that way in a file of its own (`convert.save_adapter`).
"""

import sys
from typing import Any

import torch
from torch import nn

from polydecode.auto import load_base
from polydecode.config import TrainConfig
from polydecode.errors import UserError
from polydecode.methods.base import ParallelDecoder

ALL_LINEAR = "all-linear"


def prepare_parameters(model: ParallelDecoder, config: TrainConfig) -> Any:
    """Freeze what is not trained; the PeftModel around `model.base` when `lora_rank` asks for adapters, else None.

    Raises `UserError` for `lora_targets` that name no linear layer.
    """
    adapter = None
    if config.lora_rank:
        from peft import LoraConfig, get_peft_model

        alpha = config.lora_alpha or 2 * config.lora_rank
        targets = _targets(model, config.lora_targets)
        lora = LoraConfig(r=config.lora_rank, lora_alpha=alpha, target_modules=targets, lora_dropout=0.0)
        adapter = get_peft_model(model.base, lora)
        norms = _chosen(config.train_norms, model)
        for parameter in _norm_parameters(model):
            parameter.requires_grad_(norms)
    embeddings = _chosen(config.train_embeddings, model)
    for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
        for parameter in layer.parameters():
            parameter.requires_grad_(embeddings)
    return adapter


def _chosen(choice: bool | None, model: ParallelDecoder) -> bool:
    return type(model).TRAINS_EMBEDDINGS if choice is None else choice


def _norm_parameters(model: ParallelDecoder) -> list[nn.Parameter]:
    modules = (m for m in model.base.get_decoder().modules() if type(m).__name__.lower().endswith("norm"))
    return [parameter for module in modules for parameter in module.parameters(recurse=False)]


def _targets(model: ParallelDecoder, told: str) -> str | list[str]:
    if told == ALL_LINEAR:
        return told
    head = model.get_output_embeddings()
    there = sorted(
        {
            name.rsplit(".", 1)[-1]
            for name, module in model.base.named_modules()
            if isinstance(module, nn.Linear) and module is not head
        }
    )
    names = [name.strip() for name in told.split(",") if name.strip()]
    for name in names:
        if name not in there:
            raise UserError(f"lora_targets names {name!r}; the linear layers are {', '.join(there)}, or {ALL_LINEAR}")
    if not names:
        raise UserError(f"lora_targets is empty; name some of {', '.join(there)}, or {ALL_LINEAR}")
    return names


def check_same_weights(model: ParallelDecoder, config: TrainConfig) -> None:
    """Refuse an `adapter_source` whose weights are not those of the checkpoint, an added vocabulary row aside."""
    expected = load_base(config.adapter_source, torch.float32).state_dict()
    actual = model.base.state_dict()
    same = expected.keys() == actual.keys() and all(
        actual[k].dim() == e.dim() and len(actual[k]) - len(e) in (0, 1) and torch.equal(actual[k][: len(e)], e)
        for k, e in expected.items()
    )
    if not same:
        raise UserError(
            f"{config.adapter_source!r} has other weights than {config.checkpoint!r}: leave out adapter_source"
        )


def report_parameters(model: ParallelDecoder) -> None:
    """One line on stderr: how much is trained, and of what kind beside adapters."""
    parameters = dict(model.named_parameters())
    trained = {name: p.numel() for name, p in parameters.items() if p.requires_grad}
    total = sum(p.numel() for p in parameters.values())
    count = sum(trained.values())
    line = f"training {count:,} of {total:,} parameters ({count / total:.1%})"
    adapters = sum(n for name, n in trained.items() if "lora_" in name)
    if adapters:
        head = model.get_output_embeddings()
        tied = head.weight is model.get_input_embeddings().weight
        of_both = {id(p) for layer in (model.get_input_embeddings(), head) for p in layer.parameters()}
        embeddings = sum(n for name, n in trained.items() if id(parameters[name]) in of_both)
        kinds = {
            "adapters": adapters,
            "embeddings" if tied else "embeddings and head": embeddings,
            "norms": count - adapters - embeddings,
        }
        line += ": " + ", ".join(f"{n:,} of {kind}" for kind, n in kinds.items() if n)
    print(line, file=sys.stderr)
