"""From a source to a model: load, load_base, load_tokenizer, and the check that the layers can be run in slices."""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from polydecode.auto.folders import first_line, told
from polydecode.auto.sources import ADAPTER_FILE, TRAINED_FILE, Source, read_config, read_json, resolve_source
from polydecode.errors import UserError, unknown_name
from polydecode.methods import get_method
from polydecode.methods.base import ParallelDecoder, ParallelDecoderConfig
from polydecode.ops.layers import SUPPORTED, DecoderStack, slice_error
from polydecode.ops.vocabulary import grow_vocabulary

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")
ATTENTION = ("sdpa", "eager", "flex_attention")

SLICE_TOLERANCE_FLOAT32 = 1e-4
"""Of the largest logit. Families that the slices reproduce measure 1e-6 or less (another order of summation at most); the
smallest real difference seen, a soft-cap over small logits, is above 1e-3."""
SLICE_TOLERANCE_HALF = 5e-2
"""Of the largest logit, where a float32 copy is too dear: some ten roundings of 2^-8."""
FLOAT32_CHECK_PARAMETERS = 2_000_000_000
"""Half-precision models up to this size are checked in float32."""


def load(
    source: str | os.PathLike,
    dtype: str | torch.dtype | None = None,
    attn_implementation: str | None = None,
    device: str | torch.device | None = None,
) -> ParallelDecoder:
    """The model of `source`, in evaluation mode: a polydecode checkpoint or adapter gives its method's model, any other
    source the `autoregressive` model around it.

    `dtype`: a torch dtype or its name; None or "auto" keeps the dtype of the checkpoint. `attn_implementation`: "sdpa",
    "eager" or "flex_attention" (for GPUs); None is sdpa, or eager for a family without it. `device`: None leaves it on the
    CPU. Raises `UserError` of one line for a source that cannot be opened or an architecture that is not supported.
    """
    found = resolve_source(source)
    dtype, attn_implementation = _check_choices(dtype, attn_implementation)
    if found.kind == "adapter":
        model = _load_adapter(found, dtype, attn_implementation)
    else:
        config = read_config(found)
        if isinstance(config, ParallelDecoderConfig):
            model = _load_checkpoint(found, config, dtype, attn_implementation)
        else:
            base = _load_plain(found, config, dtype, attn_implementation)
            check_architecture(base)
            model = get_method("autoregressive")[1].from_base(base)
    return _to_device(model.eval(), device)


def load_base(
    source: str | os.PathLike, dtype: str | torch.dtype | None = None, attn_implementation: str | None = None
) -> PreTrainedModel:
    """The plain transformers model of `source`: of a polydecode checkpoint or adapter, the model it wraps.

    Raises `UserError` as `load` does, but does not measure whether the layers can be run in slices.
    """
    found = resolve_source(source)
    dtype, attn_implementation = _check_choices(dtype, attn_implementation)
    if found.kind == "adapter":
        return _load_adapter(found, dtype, attn_implementation).base
    config = read_config(found)
    if isinstance(config, ParallelDecoderConfig):
        return _load_checkpoint(found, config, dtype, attn_implementation).base
    return _load_plain(found, config, dtype, attn_implementation)


def load_tokenizer(source: str | os.PathLike) -> "PreTrainedTokenizerBase":
    """The tokenizer of `source`; of an adapter folder without one, its source's. `UserError` when there is none."""
    found = resolve_source(source)
    name = found.name_for_transformers()
    if found.kind != "hub" and not has_tokenizer(Path(name)):
        if found.kind == "adapter":
            return load_tokenizer(adapter_source(found))
        raise UserError(f"folder {found.given!r} has no tokenizer; save one into it with tokenizer.save_pretrained")
    with told(f"open the tokenizer of {found.given!r}"):
        return AutoTokenizer.from_pretrained(name, trust_remote_code=False)


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder holds the files of a tokenizer."""
    return any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model"))


def check_architecture(base: PreTrainedModel) -> float:
    """The measured difference between running the layers in slices and the model's own forward, relative to the largest
    logit; `UserError` naming the architecture when it is more than rounding."""
    name = base.config.model_type
    half = next(base.parameters()).dtype in (torch.float16, torch.bfloat16)
    in_float32 = half and base.num_parameters() <= FLOAT32_CHECK_PARAMETERS
    tolerance = SLICE_TOLERANCE_HALF if half and not in_float32 else SLICE_TOLERANCE_FLOAT32
    dtypes = [parameter.dtype for parameter in base.parameters()]
    try:
        if in_float32:
            cast_parameters(base, torch.float32)
        with _unsupported(name):
            error = slice_error(base)
    finally:
        if in_float32:
            for parameter, dtype in zip(base.parameters(), dtypes, strict=True):
                parameter.data = parameter.data.to(dtype)
    if not error <= tolerance:
        raise UserError(
            f"architecture {name!r} is not supported: running its layers one by one changes the logits by {error:.1e} of "
            f"the largest (at most {tolerance:.0e} is rounding); {SUPPORTED}"
        )
    return error


def cast_parameters(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Cast the floating parameters in place; unlike `.to(dtype)` not the buffers, whose rotary frequencies stay float32."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)


# --- the kinds of source -------------------------------------------------------------------------------------------


def _load_plain(
    found: Source, config: PreTrainedConfig, dtype: torch.dtype | str, attention: str | None
) -> PreTrainedModel:
    check_structure(config, found.given)
    base = _from_pretrained(found, config, dtype, attention)
    if found.kind != "hub":
        base.config._name_or_path = base.name_or_path = ""
    return base


def _load_checkpoint(
    found: Source, config: ParallelDecoderConfig, dtype: torch.dtype | str, attention: str | None
) -> ParallelDecoder:
    model = _from_pretrained(found, config, dtype, attention)
    model.base.generation_config = GenerationConfig.from_dict(model.generation_config.to_dict())
    return model


def _load_adapter(found: Source, dtype: torch.dtype | str, attention: str | None) -> ParallelDecoder:
    """The source of an adapter, with the adapter merged in float32, wrapped by the adapter's method."""
    from peft import PeftConfig, get_peft_model
    from peft.utils import get_peft_model_state_dict, load_peft_weights, set_peft_model_state_dict

    folder = Path(found.location)
    config = read_config(found)
    if not isinstance(config, ParallelDecoderConfig):
        raise UserError(f"{str(folder / 'config.json')!r} is not the config of a polydecode method")
    read_json(folder / "adapter_config.json")
    source = adapter_source(found)
    base = load_base(source, torch.float32, attention)
    grow_vocabulary(base, config.vocab_size, stored_dtype(source))
    model = get_method(config.method)[1].from_base(base, **config.settings())
    if model.config.vocab_size != config.vocab_size:
        raise UserError(
            f"adapter {found.given!r} is for {config.vocab_size} vocabulary rows, its source has {model.config.vocab_size}"
        )
    with told(f"apply the adapter {found.given!r}"):
        peft_config = PeftConfig.from_pretrained(str(folder))
        peft_config.inference_mode = True
        adapted = get_peft_model(base, peft_config)
        weights = load_peft_weights(str(folder), device="cpu")
        _check_keys(
            f"adapter {found.given!r}", get_peft_model_state_dict(adapted, save_embedding_layers=False), weights
        )
        set_peft_model_state_dict(adapted, weights)
        model.base = adapted.merge_and_unload()
        _restore_trained(model.base, folder)
    wanted = (config.dtype if dtype == "auto" else dtype) or torch.float32
    assert isinstance(wanted, torch.dtype)
    cast_parameters(model.base, wanted)
    model.base.config.dtype = wanted
    return model


def stored_dtype(source: str | os.PathLike) -> torch.dtype:
    """The dtype in which `load` would open `source`; float32 where its config names none."""
    return read_config(resolve_source(source)).dtype or torch.float32


def _check_keys(holder: str, expected: Iterable[str], found: Iterable[str]) -> None:
    """Refuse weights that lack a name or have one too many."""
    missing, unknown = sorted(set(expected) - set(found)), sorted(set(found) - set(expected))
    if missing:
        raise UserError(f"{holder} is incomplete: no {_first_of(missing)}")
    if unknown:
        raise UserError(f"{holder} does not fit its source, which has no {_first_of(unknown)}")


@torch.no_grad()
def _restore_trained(base: PreTrainedModel, folder: Path) -> None:
    """Put the weights that were trained beside an adapter, which `ADAPTER_FILE` names, into `base`."""
    file = folder / TRAINED_FILE
    names = read_json(folder / ADAPTER_FILE).get("trained_weights", [])
    trained = load_file(file) if file.is_file() else {}
    _check_keys(repr(str(file)), names, trained)
    parameters = dict(base.named_parameters())
    for name, value in trained.items():
        if name not in parameters or parameters[name].shape != value.shape:
            raise UserError(f"{str(file)!r} holds {name!r}, which does not fit the source")
        parameters[name].copy_(value)


def adapter_source(found: Source) -> str:
    """The source that an adapter folder was trained on; `UserError` when it, or one that it stands on, is not there."""
    first = below = _named_source(found)
    seen = {Path(found.location).resolve()}
    while below.kind == "adapter":
        folder = Path(below.location).resolve()
        if folder in seen:
            raise UserError(f"adapter {found.given!r} names itself as its source, directly or by {below.given!r}")
        seen.add(folder)
        below = _named_source(below)
    return first.given


def _named_source(found: Source) -> Source:
    """What the file in an adapter folder names; a path with a dot first starts at the folder."""
    name = read_json(Path(found.location) / ADAPTER_FILE).get("source")
    if not isinstance(name, str):
        raise UserError(f"{ADAPTER_FILE} in {found.given!r} names no source")
    if name.startswith("."):
        name = os.path.normpath(Path(found.location).resolve() / name)
    try:
        return resolve_source(name)
    except UserError as error:
        raise UserError(f"adapter {found.given!r} needs its source {name!r}: {error}") from error


# --- helpers -------------------------------------------------------------------------------------------------------


def check_structure(config: PreTrainedConfig, given: str) -> None:
    """Refuse, before any weight is read, an architecture that is no decoder-only model with numbered layers."""
    name = config.model_type
    if config.is_encoder_decoder or type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UserError(f"{given!r} is a {name!r} model, which is no decoder-only language model; {SUPPORTED}")
    with _unsupported(name), torch.device("meta"):
        DecoderStack(AutoModelForCausalLM.from_config(config))


def check_stack(base: PreTrainedModel) -> None:
    """Refuse a model in memory that is no decoder with numbered layers."""
    with _unsupported(base.config.model_type):
        DecoderStack(base)


@contextmanager
def _unsupported(architecture: str) -> Iterator[None]:
    """Whatever fails inside means that the architecture is not supported."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"architecture {architecture!r} is not supported: {first_line(error)}; {SUPPORTED}") from error


def _from_pretrained(found: Source, config: PreTrainedConfig, dtype: torch.dtype | str, attention: str | None):
    """The model of transformers, with every weight taken from the checkpoint; `UserError` if one is missing."""
    choice = {} if attention is None else {"attn_implementation": attention}
    with told(f"load {found.given!r}"):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            found.name_for_transformers(),
            config=config,
            dtype=dtype,
            **choice,
            output_loading_info=True,
            trust_remote_code=False,
        )
    model, info = loaded
    missing = sorted(info["missing_keys"])
    if missing:
        raise UserError(f"cannot load {found.given!r}: its weights lack {_first_of(missing)}")
    return model


def _first_of(names: list[str]) -> str:
    return repr(names[0]) + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def _check_choices(dtype: str | torch.dtype | None, attention: str | None) -> tuple[torch.dtype | str, str | None]:
    """The dtype as transformers takes it ("auto" for None), and the attention; `UserError` for unknown names."""
    if attention is not None and attention not in ATTENTION:
        raise unknown_name("attention implementation", str(attention), ATTENTION)
    if dtype is None:
        return "auto", attention
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise unknown_name("dtype", name, DTYPES)
    return ("auto" if name == "auto" else getattr(torch, name)), attention


def _to_device(model: ParallelDecoder, device: str | torch.device | None) -> ParallelDecoder:
    if device is None:
        return model
    try:
        return model.to(device)  # type: ignore[arg-type]
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"cannot use device {str(device)!r}: {first_line(error)}") from error
