"""The contract of a decoding method: a config, a model around an unmodified AR model, and seven verbs.

A method is one folder under `polydecode/methods` with `config.py` and `model.py`; its model subclasses `ParallelDecoder` and
its config subclasses `ParallelDecoderConfig`. Everything outside (training, generation, serving, evaluation, benchmarks)
talks to these verbs and never looks inside a `State`.

Legend: B rows, T tokens, K most tokens a step commits, D width, V vocabulary.
"""

import json
import os
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    GenerationMixin,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.configuration_utils import SubConfigSpec
from transformers.modeling_outputs import CausalLMOutputWithPast

from polydecode.errors import UserError, unknown_name
from polydecode.methods.batch import Batch, Finding, LossOutput, Score, Step, TrainingPass
from polydecode.ops.layers import DecoderStack
from polydecode.ops.sampling import RowGenerators

State = Any


class Choose(Protocol):
    """The sampler as a function: logits (N, V) -> token ids (N,). `rows` says which row of the batch each belongs to, in
    rising order, where a row has several or none; without it there is one for each row."""

    def __call__(self, logits_NV: Tensor, rows: list[int] | None = None) -> Tensor: ...


class ParallelDecoderConfig(PreTrainedConfig):
    """The settings of a method around the config of the AR model it wraps (`base_config`)."""

    sub_configs_defaults = {"base_config": SubConfigSpec(AutoConfig, model_type="llama", optional=True)}
    method: ClassVar[str] = ""
    SETTINGS: ClassVar[dict[str, type | tuple[type, ...]]] = {}
    """The method's own settings and their types; what `convert` accepts."""

    base_config: dict | PreTrainedConfig | None = None
    tie_word_embeddings: bool = False

    def __post_init__(self, **kwargs):
        if isinstance(self.base_config, PreTrainedConfig):  # super() would reset the choice of a model in memory
            kwargs.setdefault("attn_implementation", self.base_config._attn_implementation)
        super().__post_init__(**kwargs)
        if not isinstance(self.base_config, PreTrainedConfig):
            return
        self.base_config._name_or_path = ""
        for name in ("vocab_size", "hidden_size", "num_hidden_layers", "max_position_embeddings"):
            setattr(self, name, getattr(self.base_config, name))
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            setattr(self, name, getattr(self.base_config, name, None))
        self.tie_word_embeddings = bool(self.base_config.tie_word_embeddings)
        self.check()

    def check(self) -> None:
        """Refuse settings of a wrong type or range with a `UserError`. Methods extend it."""
        for name, allowed in self.SETTINGS.items():
            value = getattr(self, name)
            allowed_types = allowed if isinstance(allowed, tuple) else (allowed,)
            wrong_bool = isinstance(value, bool) and bool not in allowed_types
            if wrong_bool or not isinstance(value, allowed_types):
                expected = " or ".join("null" if t is type(None) else t.__name__ for t in allowed_types)
                raise UserError(f"{name} is {value!r}; it must be of type {expected}")

    @classmethod
    def check_names(cls, settings: dict[str, Any]) -> None:
        """Refuse a setting this method does not have, with the nearest name."""
        for name in settings:
            if name not in cls.SETTINGS:
                raise unknown_name(f"setting of {cls.method}", name, cls.SETTINGS)

    def settings(self) -> dict[str, Any]:
        """The method's settings as they are."""
        return {name: getattr(self, name) for name in self.SETTINGS}


class ParallelDecoder(PreTrainedModel, GenerationMixin):
    """A method's model: `.base` is the AR model, unmodified and without new parameters."""

    config_class: type[ParallelDecoderConfig]
    base_model_prefix = ""
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    OPTIONS: ClassVar[tuple[str, ...]] = ()
    """Keyword arguments of `prefill` that a caller may set per call (and per row)."""
    TRAINS_EMBEDDINGS: ClassVar[bool] = False
    """Whether training this method changes embeddings, head and (beside low-rank adapters) norms, unless told otherwise."""

    def __init__(self, config: ParallelDecoderConfig, base: PreTrainedModel | None = None):
        super().__init__(config)
        assert config.base_config is not None
        if base is None:
            base = AutoModelForCausalLM.from_config(config.base_config, attn_implementation=config._attn_implementation)
        self.base = base
        self._stack: DecoderStack | None = None
        self.post_init()

    @classmethod
    def from_base(cls, base: PreTrainedModel, tokenizer: Any = None, **settings: Any) -> "ParallelDecoder":
        """The method's model around `base`, which is wrapped and not copied, with its generation config carried over.

        A method that needs something of the tokenizer or of the base (a mask token) extends this; `tokenizer` is None when
        the source has none or `settings` are those of a finished model. Raises `UserError` for wrong settings.
        """
        cls.config_class.check_names(settings)
        model = cls(cls.config_class(base_config=base.config, **settings), base)
        write_generation_config(model)
        return model

    @property
    def stack(self) -> DecoderStack:
        """The base model as numbered layers."""
        if self._stack is None or self._stack.base is not self.base:
            self._stack = DecoderStack(self.base)
        return self._stack

    # --- the verbs -----------------------------------------------------------------------------------------------

    def loss(self, batch: Batch, generator: RowGenerators) -> LossOutput:
        """The training loss; every random draw of row b comes from `generator.row(b)`."""
        raise NotImplementedError

    def num_targets(self, batch: Batch, generator: RowGenerators) -> int:
        """How many targets `loss` averages over, given the same generator; cheap, on the CPU."""
        return int(batch.predicted().sum())

    def training_pass(self, prompt: int, answer: int) -> TrainingPass:
        """What `loss` costs for a row of that many prompt and answer tokens, at most; for memory and time estimates."""
        return TrainingPass(prompt + answer, answer)

    def advice(self, answers: list[int], tokenizer: Any = None) -> list[Finding]:
        """What to know before training on answers of these lengths (tokens); none where there are no data."""
        return []

    def prefill(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        seeds: list[int] | None = None,
        **options: Any,
    ) -> State:
        """Read the prompts (B, P) in one forward; `options` are the method's OPTIONS.

        `seeds`: one per row, for a method that draws at random beyond the sampler.
        """
        raise NotImplementedError

    def step(self, state: State, choose: Choose) -> Step:
        """Commit tokens, and hand out 0..K per row. Where `prefill` gives logits the first step costs no forward."""
        raise NotImplementedError

    def keep_rows(self, state: State, rows: Tensor) -> State:
        """The state of `rows` only, in that order."""
        raise NotImplementedError

    def join(self, state: State, other: State) -> State:
        """Both states' rows in one."""
        raise NotImplementedError

    def score(self, batch: Batch) -> Score:
        """Log-likelihood of each row's targets."""
        raise NotImplementedError

    def hidden(self, batch: Batch) -> Tensor:
        """Normalised hidden states (B, T, D) after the last layer, reading the rows at full depth as prompts are read."""
        raise NotImplementedError

    @torch.no_grad()
    def embed(self, batch: Batch) -> Tensor:
        """Text embeddings (B, D) float32: the mean of `hidden` over each row's real tokens."""
        real_BT1 = batch.attention_mask.bool()[..., None]
        summed_BD = (self.hidden(batch).float() * real_BT1).sum(1)
        return summed_BD / real_BT1.sum(1).clamp_min(1)

    def forwards_per_token(self, count_head: bool = False, **options: Any) -> float | None:
        """Predicted cost of a token in forwards of the whole model; None where it depends on the text. `count_head` counts
        the head's weights too."""
        raise NotImplementedError

    @classmethod
    def predicted_costs(cls, base: PreTrainedModel, settings: dict[str, Any] | None = None) -> list[dict[str, Any]]:
        """Predictions around `base` (which may be on the meta device) for a choice of settings and options, for `inspect`.

        Each row has `settings` and `options` (the varied ones), `forwards_per_token`, `forwards_per_token_with_head`,
        `speedup` and `speedup_with_head`. `settings` of an existing checkpoint come first. Empty: nothing to choose.
        """
        return []

    # --- shared ----------------------------------------------------------------------------------------------------

    def check_options(self, options: dict[str, Any]) -> None:
        """Refuse an option this method does not have."""
        for name in options:
            if name not in self.OPTIONS:
                raise unknown_name(f"generation option of {self.config.method}", name, self.OPTIONS or ("(none)",))

    def logits(self, input_ids: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor:
        """Logits (B, T, V) of a full forward over right-padded rows, under the method's own attention."""
        raise NotImplementedError

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        batch: Batch | None = None,
        generator: RowGenerators | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast | LossOutput:
        """`loss(batch, generator)` when a batch is given (so that distributed wrappers see it), else logits (B, T, V).

        Raises `UserError` for `labels`: what a label means depends on the method, so losses take a `Batch`.
        """
        if kwargs.pop("labels", None) is not None:
            raise UserError(
                f"{type(self).__name__} takes no labels: call .loss(batch, generator), or train with polydecode"
            )
        if batch is not None:
            assert generator is not None
            return self.loss(batch, generator)
        if input_ids is None:
            raise UserError("forward needs input_ids")
        if attention_mask is not None and bool((attention_mask[:, 1:] > attention_mask[:, :-1]).any()):
            raise UserError(
                "forward takes rows padded on the right (positions count from the left); use padding_side='right'"
            )
        for unused in ("use_cache", "return_dict", "past_key_values", "cache", "position_ids", "logits_to_keep"):
            kwargs.pop(unused, None)
        return CausalLMOutputWithPast(logits=self.logits(input_ids, attention_mask, **kwargs))

    def generate(self, input_ids: Tensor | None = None, **kwargs: Any) -> Any:  # type: ignore[override]
        """Prompt and new tokens (B, P + N), as in transformers; see `polydecode.generate.generate`."""
        from polydecode.generate import generate

        return generate(self, input_ids, **kwargs)

    def get_input_embeddings(self):
        return self.base.get_input_embeddings()

    def set_input_embeddings(self, value):
        self.base.set_input_embeddings(value)

    def get_output_embeddings(self):
        return self.base.get_output_embeddings()

    def set_output_embeddings(self, value):
        self.base.set_output_embeddings(value)

    def get_decoder(self):
        return self.base.get_decoder()

    def save_pretrained(self, save_directory: str | os.PathLike, **kwargs: Any) -> None:  # type: ignore[override]
        """Write the checkpoint, with a shim that lets plain transformers load it by `trust_remote_code=True`."""
        type(self)._auto_class = None
        type(self.config)._auto_class = None
        self.config.base_config.dtype = str(self.dtype).removeprefix("torch.")
        self.config.auto_map = {
            "AutoConfig": f"{_SHIM}.{type(self.config).__name__}",
            "AutoModelForCausalLM": f"{_SHIM}.{type(self).__name__}",
        }
        super().save_pretrained(save_directory, **kwargs)
        if kwargs.get("is_main_process", True):
            package = type(self).__module__.rsplit(".", 1)[0]
            shim = (
                f"# Lets transformers open this checkpoint with trust_remote_code=True; needs polydecode installed.\n"
                f"from {package}.config import {type(self.config).__name__}  # noqa: F401\n"
                f"from {package}.model import {type(self).__name__}  # noqa: F401\n"
            )
            (Path(save_directory) / f"{_SHIM}.py").write_text(shim)


_SHIM = "modeling_polydecode"


def write_generation_config(model: ParallelDecoder) -> None:
    """Carry over the source's special tokens; sampling defaults start greedy."""
    source: GenerationConfig | None = getattr(model.base, "generation_config", None)
    if source is not None:
        model.generation_config = GenerationConfig.from_dict(json.loads(json.dumps(source.to_dict())))


def cost_row(
    settings: dict[str, Any], options: dict[str, Any], forwards: float, forwards_with_head: float
) -> dict[str, Any]:
    """One row of `predicted_costs`."""
    return {
        "settings": settings,
        "options": options,
        "forwards_per_token": forwards,
        "forwards_per_token_with_head": forwards_with_head,
        "speedup": 1 / forwards,
        "speedup_with_head": 1 / forwards_with_head,
    }
