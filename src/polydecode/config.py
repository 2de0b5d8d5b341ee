"""Settings of runs, each with its one default. What a method needs is in the method's own config."""

from dataclasses import dataclass, field

from polydecode.errors import UserError


@dataclass
class DataConfig:
    """Where examples come from and how they become tokens.

    Attributes:
        data: jsonl, json, csv, tsv, parquet or txt files, folders, globs, or hub data sets (owner/name[:config][@split]).
        columns: what columns named otherwise are: text, prompt, response or messages (prompt=question,response=answer).
        data_weights: share of each `data` in an epoch, in order (2,1); without, an epoch is all of them once.
        chat: put prompt/response pairs into the tokenizer's chat template.
        max_length: longest example in tokens; longer ones are cut at the end.
        long_text: text beyond max_length is cut, or split into pieces of that length, each an example of its own.
        train_on: all_assistant turns of a conversation, or the last_assistant turn alone; the others are context.
        enable_thinking: for chat templates that ask for it; recorded with the tokenizer; null leaves it to the template.
        packing: put several whole examples into each row of max_length tokens; batch_size then counts rows.
        eval_data: data to evaluate on, in the same forms, instead of a part held out of `data`.
        eval_fraction: share of `data` held out, chosen by a hash of each document's content.
        max_eval_examples: at most this many held-out examples are evaluated.
        streaming: read while training instead of tokenising first; needs --max-steps, --max-tokens or --max-minutes.
        shuffle_buffer: documents that are shuffled at a time when streaming.
        data_workers: processes that tokenise; 0 means this one.
        no_cache: tokenise anew, and keep nothing in the cache folder.
    """

    data: list[str] = field(default_factory=list)
    columns: list[str] = field(default_factory=list)
    data_weights: list[float] = field(default_factory=list)
    chat: bool = False
    max_length: int = 1024
    long_text: str = "cut"
    train_on: str = "all_assistant"
    enable_thinking: bool | None = None
    packing: bool = False
    eval_data: list[str] = field(default_factory=list)
    eval_fraction: float = 0.02
    max_eval_examples: int = 500
    streaming: bool = False
    shuffle_buffer: int = 10_000
    data_workers: int = 0
    no_cache: bool = False

    def check(self) -> None:
        """Raise `UserError` for values out of range."""
        if not self.data:
            raise UserError("no training data: give --data FILE.jsonl")
        if self.data_weights and len(self.data_weights) != len(self.data):
            raise UserError(f"{len(self.data_weights)} data_weights for {len(self.data)} data; give one for each")
        if not all(0 < weight < float("inf") for weight in self.data_weights):
            raise UserError(f"data_weights are {self.data_weights}; each must be above 0")
        if self.data_weights and not sum(self.data_weights) < float("inf"):
            raise UserError(f"data_weights are {self.data_weights}; together they are too large")
        if self.max_eval_examples < 1:
            raise UserError(f"max_eval_examples is {self.max_eval_examples}; it must be 1 or more")
        if self.packing and self.data_weights and not self.streaming:
            raise UserError(
                "packing with data_weights needs a stream, whose rows are packed as they come: give --streaming"
            )
        if self.shuffle_buffer < 1 or self.data_workers < 0:
            name = "shuffle_buffer" if self.shuffle_buffer < 1 else "data_workers"
            raise UserError(f"{name} is {getattr(self, name)}; it must be {int(name == 'shuffle_buffer')} or more")
        if self.max_length < 2:
            raise UserError(f"max_length is {self.max_length}; it must be 2 or more")
        if self.long_text not in ("cut", "split"):
            raise UserError(f"long_text is {self.long_text!r}; it must be cut or split")
        if self.long_text == "split" and self.streaming and not self.packing:
            raise UserError("long_text split needs --packing when streaming, where a draw is a document")
        if self.train_on not in ("all_assistant", "last_assistant"):
            raise UserError(f"train_on is {self.train_on!r}; it must be all_assistant or last_assistant")
        if not 0 <= self.eval_fraction < 1:
            raise UserError(f"eval_fraction is {self.eval_fraction}; it must be at least 0 and below 1")


@dataclass
class TrainConfig(DataConfig):
    """Train a converted checkpoint on your data and write it to OUT.

    Attributes:
        checkpoint: a converted checkpoint, or any source (then it is trained autoregressively).
        out: folder to write; must be new or empty unless --resume.
        learning_rate: peak learning rate.
        min_learning_rate: where cosine, linear and wsd end.
        schedule: after the warm-up: cosine, linear, constant, or wsd (constant, then down linearly over decay_ratio).
        warmup_ratio: share of the run spent warming up.
        decay_ratio: share of the run in which wsd comes down.
        batch_size: examples per optimiser step, over all processes.
        micro_batch_size: examples per forward; 0 means the whole batch at once.
        max_steps: optimiser steps; 0 means by epochs.
        epochs: passes over the data when max_steps is 0.
        max_minutes: stop after this many minutes, with the schedule ending there; 0 means no limit.
        max_tokens: stop after this many tokens; 0 means no limit.
        weight_decay: AdamW weight decay.
        adam_beta1: AdamW beta 1.
        adam_beta2: AdamW beta 2.
        max_grad_norm: clip the gradient norm here.
        dtype: auto, float32, bfloat16 (mixed precision: weights stay float32).
        gradient_checkpointing: recompute layers in the backward to save memory.
        fsdp: shard weights, gradients and optimiser states over the processes (FSDP2); needs GPUs.
        train_embeddings: train embeddings and head too; null leaves it to the method (block_diffusion does, dmtd does not).
        train_norms: with adapters, train the norms too (without, they always are); null leaves it to the method, as above.
        lora_rank: train low-rank adapters of this rank instead of all weights; 0 means all weights.
        lora_alpha: scale of the adapters; 0 means twice the rank.
        lora_targets: layers that get adapters, by name, with commas (q_proj,v_proj); all-linear is all of attention and MLP.
        adapter_source: name this source in the adapter instead of the checkpoint; its weights must be the same.
        distill_weight: share of the loss that is the divergence from the source model's own predictions; 0 means none.
        distill_source: the source to learn from; empty is the checkpoint's own weights at full depth, as they were.
        distill_top_k: most likely tokens kept of the source's distribution; the rest is one bucket.
        distill_temperature: temperature of both distributions in the divergence.
        save_dtype: dtype of the weights that are written: float32, bfloat16 or float16.
        seed: seed of data order and of every random draw.
        log_steps: steps between log lines.
        eval_steps: steps between evaluations; 0 means only at the end.
        eval_samples: at each evaluation answer this many held-out prompts; tells exact matches and tokens per forward.
        save_steps: steps between checkpoints; 0 means only at the end.
        save_minutes: minutes between checkpoints, beside or instead of save_steps; 0 means none by time.
        save_total_limit: checkpoints to keep.
        keep: what OUT gets at the end: last, or best (the evaluation with the lowest held-out loss).
        spike_factor: skip an update whose gradient norm is this many times the recent median, stop after five; 0 is off.
        report_to: auto (tensorboard files in OUT/logs where it is installed), none, tensorboard, wandb, trackio.
        resume: go on from the last checkpoint in OUT.
    """

    checkpoint: str = ""
    out: str = ""
    learning_rate: float = 1e-4
    min_learning_rate: float = 0.0
    schedule: str = "cosine"
    warmup_ratio: float = 0.1
    decay_ratio: float = 0.2
    batch_size: int = 16
    micro_batch_size: int = 0
    max_steps: int = 0
    epochs: float = 1.0
    max_minutes: float = 0.0
    max_tokens: int = 0
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.95
    max_grad_norm: float = 1.0
    dtype: str = "auto"
    gradient_checkpointing: bool = False
    fsdp: bool = False
    train_embeddings: bool | None = None
    train_norms: bool | None = None
    lora_rank: int = 0
    lora_alpha: int = 0
    lora_targets: str = "all-linear"
    adapter_source: str = ""
    distill_weight: float = 0.0
    distill_source: str = ""
    distill_top_k: int = 64
    distill_temperature: float = 1.0
    save_dtype: str = "float32"
    seed: int = 42
    log_steps: int = 10
    eval_steps: int = 0
    eval_samples: int = 0
    save_steps: int = 0
    save_minutes: float = 0.0
    save_total_limit: int = 2
    keep: str = "last"
    spike_factor: float = 20.0
    report_to: str = "auto"
    resume: bool = False

    def check(self) -> None:
        super().check()
        positive = ("learning_rate", "batch_size", "log_steps", "max_grad_norm", "save_total_limit")
        at_least_zero = (
            "micro_batch_size max_steps epochs max_minutes max_tokens weight_decay lora_rank lora_alpha "
            "eval_steps eval_samples save_steps save_minutes warmup_ratio decay_ratio min_learning_rate spike_factor"
        ).split()
        for name in positive:
            if not getattr(self, name) > 0:
                raise UserError(f"{name} is {getattr(self, name)}; it must be above 0")
        for name in at_least_zero:
            if not getattr(self, name) >= 0:
                raise UserError(f"{name} is {getattr(self, name)}; it must be 0 or more")
        for name in ("adam_beta1", "adam_beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)}; it must be at least 0 and below 1")
        if not 0 <= self.seed < 2**32:
            raise UserError(f"seed is {self.seed}; it must be from 0 to 2^32 - 1")
        choices = {
            "schedule": ("cosine", "linear", "constant", "wsd"),
            "keep": ("last", "best"),
            "report_to": ("auto", "none", "tensorboard", "wandb", "trackio"),
            "dtype": ("auto", "float32", "bfloat16"),
            "save_dtype": ("float32", "bfloat16", "float16"),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise UserError(f"{name} is {getattr(self, name)!r}; it must be one of {', '.join(allowed)}")
        if self.fsdp and self.keep == "best":
            raise UserError("keep best keeps whole weights, which no process holds with fsdp: leave one of them out")
        if self.fsdp and self.distill_weight and not self.distill_source:
            raise UserError("with fsdp the source of distill_weight must be a model of its own: give --distill-source")
        if self.min_learning_rate > self.learning_rate:
            raise UserError(f"min_learning_rate {self.min_learning_rate} is above learning_rate {self.learning_rate}")
        if self.warmup_ratio + (self.decay_ratio if self.schedule == "wsd" else 0) > 1:
            raise UserError(
                f"warmup_ratio {self.warmup_ratio} and decay_ratio {self.decay_ratio} are more than the whole run"
            )
        if self.keep == "best" and not self.eval_steps:
            raise UserError("keep best compares evaluations: give --eval-steps as well")
        if self.keep == "best" and not (self.eval_fraction or self.eval_data):
            raise UserError(
                "keep best compares evaluations, and nothing is held out: give --eval-data or --eval-fraction"
            )
        if self.micro_batch_size and self.batch_size % self.micro_batch_size:
            raise UserError(
                f"batch_size {self.batch_size} is not a multiple of micro_batch_size {self.micro_batch_size}"
            )
        only_with_adapters = {
            "adapter_source": bool(self.adapter_source),
            "lora_targets": self.lora_targets != type(self).lora_targets,
            "lora_alpha": bool(self.lora_alpha),
            "train_norms": self.train_norms is False,
        }
        for name, given in only_with_adapters.items():
            if given and not self.lora_rank:
                raise UserError(f"{name} is for adapters; give --lora-rank as well")
        if self.streaming and not (self.max_steps or self.max_tokens or self.max_minutes):
            raise UserError("a stream has no end: give --max-steps, --max-tokens or --max-minutes with --streaming")
        self._check_distillation()
        if self.max_steps == 0 and self.epochs == 0 and not (self.max_minutes or self.max_tokens):
            raise UserError("nothing bounds the run: give --max-steps, --epochs, --max-minutes or --max-tokens")

    def _check_distillation(self) -> None:
        if not 0 <= self.distill_weight <= 1:
            raise UserError(f"distill_weight is {self.distill_weight}; it must be from 0 to 1")
        if self.distill_top_k < 1:
            raise UserError(f"distill_top_k is {self.distill_top_k}; it must be 1 or more")
        if not 0 < self.distill_temperature < float("inf"):
            raise UserError(f"distill_temperature is {self.distill_temperature}; it must be above 0")
        for name in ("distill_source", "distill_top_k", "distill_temperature"):
            if getattr(self, name) != getattr(type(self), name) and not self.distill_weight:
                raise UserError(f"{name} needs a share of the loss; give --distill-weight as well")
