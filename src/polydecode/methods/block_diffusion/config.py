"""Settings of block diffusion."""

from typing import ClassVar

from polydecode.errors import UserError, unknown_name
from polydecode.methods.base import ParallelDecoderConfig

ATTENTIONS = ("clean_context", "noisy_context", "bidirectional")
PROMPT_ATTENTIONS = ("causal", "bidirectional")
SELECTORS = ("confidence", "margin", "entropy", "random")


class BlockDiffusionConfig(ParallelDecoderConfig):
    """How text is cut into blocks, how blocks are masked in training, and how they are filled in decoding.

    `block_size`: tokens denoised together. `training_block_sizes`: sizes to draw from per example in training, instead of
    `block_size` alone. `attention`: what a noisy block reads: "clean_context", the clean blocks before it (the paper's
    choice), "noisy_context", the noisy ones, or "bidirectional", all of the noisy text. `token_shift`: predict a token from the
    position before it, as the AR model does. `half_life_ratio`: masking favours late positions of a block; the weight
    doubles every `half_life_ratio` x block length positions as the noise level goes to 0; null masks uniformly, 0 masks the
    last positions (right to left). `min_noise_level`: smallest noise level t, so the largest weight 1/t. `noise_draws`: noisy
    copies of an example in one training pass. `fill_last_block`: train the places after an end token, up to the end of its
    block, to repeat the end token. `prompt_attention`: how a prompt reads itself, "causal" as the source model does, or
    "bidirectional". `mask_token_id`: the token that stands for "not known yet"; null lets the conversion choose one.
    `threshold`: commit every token of the block whose confidence reaches it, and always the best one; above 1, one token per
    forward; 0, the whole block. `steps`: forwards per block, committing equally many tokens each, instead of the threshold.
    `selector`: what ranks the tokens: "confidence" (probability), "margin" (over the second best), "entropy" or "random".
    `fuse_write`: write a finished block's keys and values in the next block's first forward, not in one of their own.
    """

    model_type = "polydecode_block_diffusion"
    method = "block_diffusion"
    SETTINGS: ClassVar = {
        "block_size": int,
        "training_block_sizes": (list, type(None)),
        "attention": str,
        "token_shift": bool,
        "half_life_ratio": (float, int, type(None)),
        "min_noise_level": float,
        "noise_draws": int,
        "fill_last_block": bool,
        "prompt_attention": str,
        "mask_token_id": (int, type(None)),
        "threshold": (float, int, type(None)),
        "steps": (int, type(None)),
        "selector": str,
        "fuse_write": bool,
    }

    block_size: int = 16
    training_block_sizes: list | None = None
    attention: str = "clean_context"
    token_shift: bool = False
    half_life_ratio: float | None = 0.1
    min_noise_level: float = 1e-3
    noise_draws: int = 1
    fill_last_block: bool = True
    prompt_attention: str = "causal"
    mask_token_id: int | None = None
    threshold: float | None = 0.9
    steps: int | None = None
    selector: str = "confidence"
    fuse_write: bool = True

    def check(self) -> None:
        super().check()
        for name, allowed in (
            ("attention", ATTENTIONS),
            ("prompt_attention", PROMPT_ATTENTIONS),
        ):
            if getattr(self, name) not in allowed:
                raise unknown_name(name, getattr(self, name), allowed)
        context = getattr(self, "max_position_embeddings", None)
        check_decoding(self.threshold, self.block_size, self.steps, self.selector, context)
        check_count("noise_draws", self.noise_draws)
        if self.training_block_sizes is not None:
            if not self.training_block_sizes:
                raise UserError("training_block_sizes is empty; give at least one size or leave it out")
            for size in self.training_block_sizes:
                check_count("training_block_sizes", size)
                check_block_fits(size, context)
        if self.half_life_ratio is not None and not 0 <= self.half_life_ratio <= 1:
            raise UserError(
                f"half_life_ratio is {self.half_life_ratio}; it must be from 0 to 1, or null for uniform masking"
            )
        if not 0 < self.min_noise_level < 1:
            raise UserError(f"min_noise_level is {self.min_noise_level}; it must be above 0 and below 1")
        if self.noise_draws > 1 and self.attention != "clean_context":
            raise UserError("noise_draws above 1 needs attention clean_context: other noisy copies share their context")
        if self.mask_token_id is not None and self.mask_token_id < 0:
            raise UserError(f"mask_token_id is {self.mask_token_id}; it must be 0 or more")


def check_decoding(
    threshold: object, block_size: int, steps: int | None, selector: str, context: int | None = None
) -> None:
    """Refuse decoding options out of range; `context` is the model's, where it is known."""
    check_count("block_size", block_size)
    check_block_fits(block_size, context)
    check_threshold(threshold)
    if steps is not None:
        check_count("steps", steps)
    if selector not in SELECTORS:
        raise unknown_name("selector", selector, SELECTORS)


def check_count(name: str, value: object) -> None:
    """Refuse what is no integer of 1 or more."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UserError(f"{name} is {value!r}; it must be an integer of 1 or more")


def check_block_fits(size: int, context: int | None) -> None:
    """Refuse a block longer than the model's context."""
    if context is not None and size > context:
        raise UserError(f"block_size is {size}; it must fit the model's context of {context}")


def check_threshold(value: object) -> None:
    """Refuse what is no threshold: a number of 0 or more, or None."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
        raise UserError(f"threshold is {value!r}; it must be a number of 0 or more, or null for one token per forward")
