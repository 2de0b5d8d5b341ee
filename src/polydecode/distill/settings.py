"""Settings of a distillation."""

from dataclasses import dataclass

from polydecode.errors import UserError


@dataclass
class DistillConfig:
    """What is asked, and how it is answered.

    Attributes:
        source: any source: a hub id, a folder, a GGUF file, a packaged model, a converted checkpoint or an adapter.
        prompts: .jsonl with prompt or messages (a last assistant turn is answered anew), or .txt with one prompt per line.
        output: .jsonl file to write, ready for `train --data`; the settings go beside it, into OUTPUT.meta.json.
        chat: put each prompt into the tokenizer's chat template, as the user's turn.
        system: system prompt of every conversation that has none; for chat prompts and messages.
        autoregressive: decode a converted checkpoint one token per forward.
        samples_per_prompt: answers to each prompt; more than one needs a temperature.
        max_new_tokens: longest answer; what has not ended there is left out, or see keep_unfinished.
        keep_unfinished: keep answers cut at max_new_tokens, as finish_reason "length"; training teaches no end there.
        temperature: 0 takes the most likely token each time; above 0 tokens are drawn.
        top_k: draw from this many most likely tokens; 0 means all.
        top_p: draw from the most likely tokens that reach this probability together.
        seed: seed of the draws; those of an answer depend on seed, prompt and sample alone.
        batch_size: answers decoded at a time; one that ends gives its row to the next.
        window: answers sorted by length and written together; what a killed run loses at most.
        resume: go on with what is there of OUTPUT.
        overwrite: replace OUTPUT.
    """

    source: str
    prompts: str = ""
    output: str = ""
    chat: bool = False
    system: str = ""
    autoregressive: bool = False
    samples_per_prompt: int = 1
    max_new_tokens: int = 256
    keep_unfinished: bool = False
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    batch_size: int = 32
    window: int = 256
    resume: bool = False
    overwrite: bool = False

    def check(self) -> None:
        """Raise `UserError` for values out of range."""
        for name in ("prompts", "output"):
            if not getattr(self, name):
                raise UserError(f"no {name} file: give --{name} FILE")
        if not self.output.endswith(".jsonl"):
            raise UserError(f"output is {self.output!r}; its name must end in .jsonl")
        for name in ("samples_per_prompt", "max_new_tokens", "batch_size", "window"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)}; it must be 1 or more")
        if self.temperature != 0 and not 1e-3 <= self.temperature < float("inf"):
            raise UserError(
                f"temperature is {self.temperature}; it must be 0 (the most likely token), or 0.001 or more"
            )
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p is {self.top_p}; it must be above 0 and at most 1")
        if self.top_k < 0:
            raise UserError(f"top_k is {self.top_k}; it must be 0 or more")
        if self.temperature == 0 and self.samples_per_prompt > 1:
            raise UserError(f"{self.samples_per_prompt} samples per prompt are all the same at temperature 0")
        try:
            self.system.encode()
        except UnicodeEncodeError:
            raise UserError("system is no valid text: it must be UTF-8") from None
        if self.resume and self.overwrite:
            raise UserError("give --resume or --overwrite, not both")

    def sampling(self) -> dict:
        """The draw as transformers names it; greedy at temperature 0."""
        if self.temperature == 0:
            return {"do_sample": False, "temperature": None, "top_k": None, "top_p": None}
        return {"do_sample": True, "temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p}
