"""Settings of Direct Multi-Token Decoding."""

from typing import ClassVar

from polydecode.errors import UserError, unknown_name
from polydecode.methods.base import ParallelDecoderConfig

MERGES = ("replace", "add")
PROMPT_GATES = ("full", "cyclic")


class DMTDConfig(ParallelDecoderConfig):
    """How the layers are split, and how long a cycle is.

    Layers are cut into `num_encoding_layers` (E), thinking (the rest, T) and `num_decoding_layers` (D). Thinking layers
    run for the head of each cycle of `cycle_length` tokens; encoding and decoding layers run for every token.

    `merge`: what the decoding layers read at a head: "replace", the thinking output alone, or "add", the paper's
    encoding output plus thinking output. `prompt_gate`: "full" runs the prompt as the source model does and counts the phase
    from its last token; "cyclic" gates the prompt as well and counts from the start of the document (the training code of
    2025). `training_cycle_lengths`: lengths to draw from per example in training instead of `cycle_length` alone.
    """

    model_type = "polydecode_dmtd"
    method = "dmtd"
    SETTINGS: ClassVar = {
        "cycle_length": int,
        "num_encoding_layers": int,
        "num_decoding_layers": int,
        "merge": str,
        "prompt_gate": str,
        "training_cycle_lengths": (list, type(None)),
    }

    cycle_length: int = 3
    num_encoding_layers: int = 0
    num_decoding_layers: int = 8
    merge: str = "replace"
    prompt_gate: str = "full"
    training_cycle_lengths: list | None = None

    @property
    def num_thinking_layers(self) -> int:
        """T, the layers that only heads go through in time."""
        return self.num_hidden_layers - self.num_encoding_layers - self.num_decoding_layers

    def check(self) -> None:
        super().check()
        if self.merge not in MERGES:
            raise unknown_name("merge", self.merge, MERGES)
        if self.prompt_gate not in PROMPT_GATES:
            raise unknown_name("prompt_gate", self.prompt_gate, PROMPT_GATES)
        for length in (self.cycle_length, *(self.training_cycle_lengths or ())):
            check_cycle_length(length)
        if self.training_cycle_lengths == []:
            raise UserError("training_cycle_lengths is empty; give at least one length or leave it out")
        encoding, decoding, total = self.num_encoding_layers, self.num_decoding_layers, self.num_hidden_layers
        if encoding < 0 or decoding < 0:
            raise UserError("num_encoding_layers and num_decoding_layers must be 0 or more")
        if encoding + decoding > total:
            raise UserError(
                f"{encoding} encoding and {decoding} decoding layers are more than the model's {total} layers; "
                f"num_encoding_layers + num_decoding_layers must be at most {total}"
            )


def check_cycle_length(length: object) -> None:
    """Refuse what is no cycle length."""
    if not isinstance(length, int) or isinstance(length, bool) or length < 1:
        raise UserError(f"cycle_length is {length!r}; it must be an integer of 1 or more")
