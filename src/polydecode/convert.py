"""Convert a model to a method, and write models as folders: checkpoints, adapters, and back to the source architecture.

A conversion adds no parameters: the method's model wraps the source model as it is. What can be checked before the weights
are read (names, values, the architecture) is, and then one prompt is run both ways: `check_architecture` refuses a model
whose layers cannot be run in slices. Every folder is written whole or not at all.
"""

import copy
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from polydecode.auto import check_architecture, load, load_base, load_tokenizer, read_config, resolve_source
from polydecode.auto.folders import check_free, save_tokenizer, whole_folder, write_json
from polydecode.auto.loading import adapter_source, check_stack, check_structure, has_tokenizer, stored_dtype
from polydecode.auto.sources import ADAPTER_FILE, TRAINED_FILE
from polydecode.errors import UserError
from polydecode.methods import get_method
from polydecode.methods.base import ParallelDecoder, ParallelDecoderConfig
from polydecode.ops.vocabulary import mean_row

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedTokenizerBase


def convert(
    source: str | os.PathLike | PreTrainedModel,
    method: str = "dmtd",
    *,
    dtype: str | torch.dtype | None = None,
    attn_implementation: str | None = None,
    tokenizer: "PreTrainedTokenizerBase | None" = None,
    **settings: Any,
) -> ParallelDecoder:
    """A model of `method` around `source`, in evaluation mode.

    `source`: what `polydecode.load` opens, or a model in memory, which is wrapped and not copied; of a polydecode model,
    the model it wraps is taken. `settings` are the method's own. `dtype` and `attn_implementation` are for sources that
    are loaded here. `tokenizer` is the source's own unless given. Raises `UserError` for an unknown method or setting, a
    wrong value, a source that cannot be opened, or an architecture whose layers cannot be run in slices.
    """
    config_class, model_class = get_method(method)
    config_class.check_names(settings)
    if isinstance(source, torch.nn.Module):
        base = _base_in_memory(source)
        check_stack(base)
        _check_values(config_class, base.config, settings)
    else:
        config: Any = read_config(resolve_source(source))
        base_config: Any = config.base_config if isinstance(config, ParallelDecoderConfig) else config
        check_structure(base_config, os.fspath(source))
        _check_values(config_class, base_config, settings)
        base = load_base(source, dtype, attn_implementation)
        tokenizer = tokenizer if tokenizer is not None else tokenizer_or_none(source)
    check_architecture(base)
    return model_class.from_base(base, tokenizer, **settings).eval()


def _check_values(config_class: type[ParallelDecoderConfig], base_config: Any, settings: dict[str, Any]) -> None:
    """Raise `UserError` for a wrong value, leaving `base_config` untouched."""
    config_class(base_config=base_config.to_dict(), **settings)


def _base_in_memory(model: torch.nn.Module) -> PreTrainedModel:
    if isinstance(model, ParallelDecoder):
        return model.base
    if not isinstance(model, PreTrainedModel):
        raise UserError(
            f"a {type(model).__name__} cannot be converted; give a transformers language model, or a source"
        )
    if model.get_output_embeddings() is None:
        raise UserError(f"a {type(model).__name__} has no language-model head; load it with AutoModelForCausalLM")
    return model


def tokenizer_or_none(source: str | os.PathLike) -> "PreTrainedTokenizerBase | None":
    """The tokenizer of `source`, or None where a local folder (of an adapter, its source too) has none."""
    found = resolve_source(source)
    if found.kind in ("folder", "checkpoint", "adapter") and not has_tokenizer(Path(found.location)):
        return tokenizer_or_none(adapter_source(found)) if found.kind == "adapter" else None
    return load_tokenizer(source)


def convert_to_folder(
    source: str | os.PathLike,
    out: str | os.PathLike,
    method: str = "dmtd",
    settings: dict[str, Any] | None = None,
    *,
    dtype: str | torch.dtype | None = None,
    overwrite: bool = False,
) -> Path:
    """Convert `source` and write the checkpoint folder `out`; its path. Raises `UserError` as `convert` and
    `save_checkpoint` do, for a taken `out` before any work."""
    check_free(out, overwrite)
    tokenizer = tokenizer_or_none(source)
    model = convert(source, method, dtype=dtype, tokenizer=tokenizer, **(settings or {}))
    return save_checkpoint(model, tokenizer, out, overwrite)


def save_checkpoint(
    model: ParallelDecoder,
    tokenizer: "PreTrainedTokenizerBase | None",
    out: str | os.PathLike,
    overwrite: bool = False,
) -> Path:
    """Write model, generation config, tokenizer and chat template as the folder `out`; its path.

    Raises `UserError` when `out` is a folder with files and not `overwrite`, and when the disk is full. On any failure
    nothing is left, and an old `out` stays as it was.
    """
    with whole_folder(out, overwrite) as folder:
        model.save_pretrained(folder)
        if tokenizer is not None:
            save_tokenizer(tokenizer, folder)
    return Path(out).expanduser()


def save_adapter(
    peft_model: "PeftModel",
    model: ParallelDecoder,
    source: str | os.PathLike,
    out: str | os.PathLike,
    tokenizer: "PreTrainedTokenizerBase | None" = None,
    overwrite: bool = False,
    destined_for: str | os.PathLike | None = None,
) -> Path:
    """Write the LoRA weights of `peft_model` (around `model.base`) as an adapter folder that `polydecode.load` opens.

    The folder names `source`, which is loaded again and merged with the adapter; a folder beside `out` (or beside
    `destined_for`, where the caller will move it) is named relative to it, another local source by its absolute path. What
    was trained beside the adapters (embeddings, norms, head) is kept whole in `trained_weights.safetensors`, and so are
    embeddings with added rows, unless the rows are those that loading makes again. Raises `UserError` as
    `save_checkpoint` does.
    """
    note: dict[str, Any] = {"source": _name_of_source(source, destined_for or out), "method": model.config.method}
    beside = _trained_beside(model, source)
    with whole_folder(out, overwrite) as folder:
        peft_model.save_pretrained(str(folder), save_embedding_layers=False)
        if beside:
            save_file(beside, folder / TRAINED_FILE)
            note["trained_weights"] = sorted(beside)
        (folder / "README.md").unlink(missing_ok=True)
        adapter_config = json.loads((folder / "adapter_config.json").read_text())
        adapter_config["base_model_name_or_path"] = None
        write_json(folder / "adapter_config.json", adapter_config)
        config = copy.deepcopy(model.config)
        frozen = next(p for p in model.base.parameters() if not p.requires_grad)  # the others may be cast to save_dtype
        config.dtype = config.base_config.dtype = str(frozen.dtype).removeprefix("torch.")
        if hasattr(config, "auto_map"):  # there are no full weights here for trust_remote_code to open
            del config.auto_map
        config.save_pretrained(folder)
        write_json(folder / ADAPTER_FILE, note)
        if tokenizer is not None:
            save_tokenizer(tokenizer, folder)
    return Path(out).expanduser()


def _trained_beside(model: ParallelDecoder, source: str | os.PathLike) -> dict[str, torch.Tensor]:
    """The weights by name that neither `source` nor the adapters hold; a tied one once."""
    rows, stored = read_config(resolve_source(source)).vocab_size, stored_dtype(source)

    def is_made_again(weight: torch.Tensor) -> bool:
        return bool((weight[rows:] == mean_row(weight[:rows], stored)).all())

    layers: Any = (model.get_input_embeddings(), model.get_output_embeddings())
    weights = [layer.weight for layer in layers if len(layer.weight) > rows]
    kept = {id(weight) for weight in weights if not is_made_again(weight)}
    return {
        name: p.detach().contiguous()
        for name, p in model.base.named_parameters()
        if "lora_" not in name and (p.requires_grad or id(p) in kept)
    }


def _name_of_source(source: str | os.PathLike, out: str | os.PathLike) -> str:
    """What an adapter at `out` calls `source`, so that it is found from any working folder."""
    found = resolve_source(source)
    path = Path(found.given).expanduser()
    if found.kind == "hub" or not path.exists():
        return found.given
    path, beside = path.resolve(), Path(out).expanduser().resolve()
    return f"../{path.name}" if path.parent == beside.parent else str(path)


def export_base(checkpoint: str | os.PathLike, out: str | os.PathLike) -> Path:
    """Write the model inside a polydecode checkpoint (or adapter, merged) as a plain checkpoint of its source
    architecture, with its tokenizer; the path. Raises `UserError` as `load` and `save_checkpoint` do."""
    check_free(out)
    base = load(checkpoint).base
    tokenizer = tokenizer_or_none(checkpoint)
    base.config._name_or_path = ""
    if hasattr(base.config, "auto_map"):
        del base.config.auto_map
    with whole_folder(out) as folder:
        base.save_pretrained(folder)
        if tokenizer is not None:
            save_tokenizer(tokenizer, folder)
    return Path(out).expanduser()
