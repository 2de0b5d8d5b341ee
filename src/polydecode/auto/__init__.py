"""Open a model: any source in, a model behind the contract out.

Importing this module registers every method with transformers, so that `AutoModelForCausalLM.from_pretrained(folder)` opens
a polydecode checkpoint as it opens any other. `load` opens more: Hugging Face models (which come as the `autoregressive`
method), GGUF files, LoRA adapter folders, and the packaged demo model by its name.
"""

import warnings

from transformers import AutoConfig, AutoModelForCausalLM

from polydecode.auto.loading import check_architecture, load, load_base, load_tokenizer
from polydecode.auto.sources import KNOWN, Source, read_config, resolve_source
from polydecode.methods import get_method, is_builtin, method_names

__all__ = [
    "KNOWN",
    "Source",
    "check_architecture",
    "load",
    "load_base",
    "load_tokenizer",
    "read_config",
    "resolve_source",
]


def _register() -> None:
    """Make every method known to AutoConfig and AutoModelForCausalLM as `polydecode_<method>`.

    A method of another package that fails to import is told in a warning and left out; one of ours raises.
    """
    for name in method_names():
        try:
            config_class, model_class = get_method(name)
        except Exception as error:
            if is_builtin(name):
                raise
            warnings.warn(f"method {name!r} cannot be imported and is left out: {error}", stacklevel=2)
            continue
        AutoConfig.register(config_class.model_type, config_class, exist_ok=True)
        AutoModelForCausalLM.register(config_class, model_class, exist_ok=True)


_register()
