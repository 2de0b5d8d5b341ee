"""GGUF files: converted once to an ordinary Hugging Face folder, kept in the user's cache.

transformers opens a GGUF file but takes half a minute for it and cannot save it. The dense copy holds the weights in
float32, the only dtype that keeps every dequantised value, with the tokenizer, and is named after the sha256 of the file.
A manifest of its files' hashes is checked on every use, so a truncated or altered copy is made anew; it is written under
another name and renamed, so a killed run leaves nothing and two runs at once do not meet.
"""

import hashlib
import json
import shutil
import sys
import time
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from polydecode.auto.folders import PARTIAL, save_tokenizer, told, whole_folder, write_json
from polydecode.errors import UserError
from polydecode.paths import cache_folder

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

FORMAT = 1
MANIFEST = "polydecode_manifest.json"
STALE_AFTER_S = 3600.0


def dense_folder(file: Path) -> Path:
    """The Hugging Face folder (float32) of a GGUF file, converted on first use.

    Raises `UserError` for a file that is no GGUF file or is damaged, and for a full disk.
    """
    status = file.stat()
    return _dense_folder(file.absolute(), status.st_size, status.st_mtime_ns, cache_folder())


@lru_cache(maxsize=8)
def _dense_folder(file: Path, size: int, modified_ns: int, cache: Path) -> Path:
    """`dense_folder`, hashed and verified once per process for a file of this size and time."""
    with file.open("rb") as stream:
        if stream.read(4) != b"GGUF":
            raise UserError(f"{str(file)!r} is not a GGUF file")
    sha256 = file_sha256(file)
    folder = cache / "gguf" / f"{sha256}-{FORMAT}"
    if not is_intact(folder):
        _remove_stale(folder.parent)
        _convert(file, folder)
    return folder


def is_intact(folder: Path) -> bool:
    """Whether every file of a converted folder has the hash that its manifest says."""
    try:
        hashes = json.loads((folder / MANIFEST).read_text())["files"]
        return all(file_sha256(folder / name) == sha256 for name, sha256 in hashes.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def file_sha256(file: Path) -> str:
    """The hash of a file's content, in hex."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _convert(file: Path, folder: Path) -> None:
    """Write the dense copy of `file` as `folder`; another run that finishes first wins."""
    try:
        with whole_folder(folder, overwrite=True) as temporary:
            _write(file, temporary)
            if is_intact(folder):
                raise _Done
    except _Done:
        pass
    except OSError:
        if not is_intact(folder):
            raise


class _Done(Exception):
    """Another process has written the same folder meanwhile."""


def _write(file: Path, folder: Path) -> None:
    """Dequantise the model and convert the tokenizer of `file` into `folder`, then the manifest."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    print(f"reading {file.name}: once, the model is then kept in {str(folder.parent)!r}", file=sys.stderr)
    with told(f"read GGUF file {str(file)!r}"):
        model = AutoModelForCausalLM.from_pretrained(
            str(file.parent),
            gguf_file=file.name,
            quantization_config=GgufConfig(dequantize=True),
            dtype=torch.float32,
        )
        tokenizer = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
    write_folder(file, folder, model, tokenizer)


def write_folder(file: Path, folder: Path, model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase") -> None:
    """Save a dense model and its tokenizer, without traces of where they come from, and the manifest of the files."""
    for name in ("_name_or_path", "_model_name_or_path", "quantization_config"):
        if name in model.config.__dict__:
            delattr(model.config, name)
    model.save_pretrained(folder)
    save_tokenizer(tokenizer, folder)
    files = {path.name: file_sha256(path) for path in sorted(folder.iterdir())}
    write_json(folder / MANIFEST, {"gguf": file.name, "files": files})


def _remove_stale(folder: Path) -> None:
    """Remove what killed runs left, once it is old enough not to belong to a run in progress."""
    for path in folder.glob(f".*{PARTIAL}*"):
        try:
            if time.time() - path.stat().st_mtime > STALE_AFTER_S:
                shutil.rmtree(path, ignore_errors=True)
        except OSError:
            continue
