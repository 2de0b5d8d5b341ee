"""Tiny tokenizers with the special tokens and the chat templates (tests/golden/templates) of four public families."""

from functools import cache
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

TEMPLATES = Path(__file__).parent / "golden" / "templates"
WORDS = ["system user assistant You are a helpful AI named SmolLM trained by Hugging Face", "Be brief", "What is two"]
WORDS += ["plus two and three", "It is four Five", "think adding up"]
CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
SPECIAL = {  # family: (special tokens, bos, eos, pad)
    "smollm2": (CHATML, "<|im_start|>", "<|im_end|>", "<|im_end|>"),
    "smollm2_tagged": (CHATML, "<|im_start|>", "<|im_end|>", "<|im_end|>"),
    "qwen3": (CHATML, None, "<|im_end|>", "<|endoftext|>"),
    "llama3": (
        ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        "<|begin_of_text|>",
        "<|eot_id|>",
        None,
    ),
    "mistral": (("<s>", "</s>", "[INST]", "[/INST]"), "<s>", "</s>", None),
}


@cache
def family_tokenizer(family: str) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer whose words are whole tokens, with the family's special tokens and template."""
    special, bos, eos, pad = SPECIAL[family]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*WORDS, *("\n" + w for w in WORDS)] * 3, trainer)
    if family == "qwen3":  # one token each, but not special ones
        tokenizer.add_tokens([AddedToken(t, normalized=False) for t in ("<think>", "</think>")])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=bos, eos_token=eos, pad_token=pad)
    fast.chat_template = (TEMPLATES / f"{family}.jinja").read_text().rstrip("\n")
    return fast
