"""What `transformers.Trainer` is told: a run's settings in its words, and where its numbers go."""

from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import TrainerCallback, TrainingArguments

from polydecode.config import TrainConfig
from polydecode.errors import UserError
from polydecode.train.distributed import check_can_shard, split_batch, world_size
from polydecode.train.folder import out_folder


def reporter(told: str) -> str:
    """Where numbers go: `auto` is tensorboard where it is installed. `UserError` for one whose package is missing."""
    if told == "auto":
        return "tensorboard" if find_spec("tensorboard") else "none"
    if told != "none" and find_spec(told) is None:
        raise UserError(f"report_to {told} needs its package: pip install {told}")
    return told


def tensorboard(folder: Path) -> TrainerCallback:
    from torch.utils.tensorboard import SummaryWriter
    from transformers.integrations import TensorBoardCallback

    return TensorBoardCallback(SummaryWriter(str(folder)))


def training_arguments(config: TrainConfig, has_eval: bool, layer_class: str) -> TrainingArguments:
    """What the Trainer is told: `config` in its words, for the processes there are; FSDP wraps every `layer_class`."""
    if config.fsdp:
        check_can_shard()
    micro, accumulation = split_batch(config.batch_size, config.micro_batch_size, world_size())
    bf16 = config.dtype == "bfloat16" or (config.dtype == "auto" and torch.cuda.is_available())
    return TrainingArguments(
        output_dir=str(out_folder(config) / "checkpoints"),
        per_device_train_batch_size=micro,
        per_device_eval_batch_size=micro,
        gradient_accumulation_steps=accumulation,
        learning_rate=config.learning_rate,
        weight_decay=config.weight_decay,
        adam_beta1=config.adam_beta1,
        adam_beta2=config.adam_beta2,
        max_grad_norm=config.max_grad_norm,
        max_steps=config.max_steps or -1,
        num_train_epochs=config.epochs or 1_000_000,
        bf16=bf16,
        use_cpu=not torch.cuda.is_available(),
        gradient_checkpointing=config.gradient_checkpointing,
        logging_steps=config.log_steps,
        eval_strategy="steps" if config.eval_steps and has_eval else "no",
        eval_steps=config.eval_steps or None,
        save_strategy="steps" if config.save_steps else "no",
        save_steps=config.save_steps or 500,
        seed=config.seed,
        data_seed=config.seed,
        report_to=[reporter(config.report_to)] if reporter(config.report_to) in ("wandb", "trackio") else [],
        logging_nan_inf_filter=False,
        remove_unused_columns=False,
        dataloader_drop_last=False,
        ddp_find_unused_parameters=False,
        fsdp=config.fsdp or None,  # type: ignore[arg-type]
        fsdp_config={"transformer_layer_cls_to_wrap": [layer_class], "state_dict_type": "SHARDED_STATE_DICT"}
        if config.fsdp
        else None,
        disable_tqdm=True,
        label_names=[],
        include_for_metrics=[],
    )
