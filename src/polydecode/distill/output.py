"""The output file while it grows: whole windows only, each on the disk before it counts.

`OUTPUT.partial` takes the records, `OUTPUT.partial.json` says how many windows and bytes of it count. A window is appended and
synced first and counted after, by replacing the second file, so a run that dies in between leaves bytes that do not count;
`resume` cuts them off. When all windows are there both files take their final names.
"""

import fcntl
import hashlib
import json
import os
from pathlib import Path
from typing import Any

from polydecode.distill.settings import DistillConfig
from polydecode.errors import UserError

META_SUFFIX = ".meta.json"
COUNTS = ("windows", "bytes", "answers", "written", "empty", "unfinished", "new_tokens")
_FREE_TO_CHANGE = ("output", "prompts", "resume", "overwrite")


def settings_of(config: DistillConfig, machine: dict[str, str]) -> dict[str, Any]:
    """Everything the answers depend on, by name: the settings, the prompts' content, and dtype and device."""
    chosen = {k: v for k, v in vars(config).items() if k not in _FREE_TO_CHANGE and k not in machine}
    digest = hashlib.sha256(Path(config.prompts).read_bytes()).hexdigest()
    return {**chosen, "prompts_sha256": digest, **machine}


class Output:
    """A distillation's files. `counts`: what is on the disk so far; `done`: whether they have their final names."""

    def __init__(self, config: DistillConfig, settings: dict[str, Any]):
        self.path = Path(config.output)
        self.meta_path = self.path.with_name(self.path.name + META_SUFFIX)
        self.partial = self.path.with_name(self.path.name + ".partial")
        self.partial_meta = self.path.with_name(self.path.name + ".partial.json")
        self.settings = settings
        self.counts = dict.fromkeys(COUNTS, 0)
        self.done = False
        self.resumed = False
        self._file: Any = None

    def check(self, config: DistillConfig) -> None:
        """Refuse to touch what is there without being told to, or to go on with other settings. Writes nothing."""
        parent = self.path.parent
        if not parent.is_dir():
            raise UserError(f"no folder {str(parent)!r} for the output")
        if self.path.resolve() == Path(config.prompts).resolve():
            raise UserError(f"output {str(self.path)!r} is the file of the prompts; give another name")
        if config.overwrite:
            return
        unfinished = self.partial_meta.is_file()
        if not config.resume:
            for path, what in ((self.path, "exists"), (self.partial_meta, "is an unfinished run")):
                if path.exists():
                    raise UserError(f"output {str(path)!r} {what}: give --resume, --overwrite or another --output")
        elif unfinished or self.meta_path.is_file():
            self._adopt(self.partial_meta if unfinished else self.meta_path, finished=not unfinished)
        elif self.path.exists():
            raise UserError(
                f"{str(self.path)!r} was not written by distill (no {META_SUFFIX} beside it): cannot resume it"
            )

    def _adopt(self, meta_path: Path, finished: bool) -> None:
        try:
            meta = json.loads(meta_path.read_text())
            settings, counts = dict(meta["settings"]), {name: int(meta["counts"][name]) for name in COUNTS}
        except (ValueError, KeyError, TypeError):
            raise UserError(f"{str(meta_path)!r} is not a distillation's settings: give --overwrite") from None
        for name in self.settings:
            if settings.get(name) != self.settings[name]:
                was, now = (json.dumps(s.get(name), ensure_ascii=False) for s in (settings, self.settings))
                raise UserError(f"cannot resume {str(self.path)!r}: {name} was {was}, now it is {now}")
        records = self.path if finished or not self.partial.is_file() else self.partial
        there = records.stat().st_size if records.is_file() else 0
        if there < counts["bytes"]:
            raise UserError(f"{str(records)!r} has {there} bytes, {counts['bytes']} were written: give --overwrite")
        self.counts, self.done, self.resumed = counts, finished, True

    def open(self) -> None:
        """Take the files: cut off what does not count, and keep other runs away."""
        if self.done or (self.resumed and not self.partial.is_file()):
            return
        self._file = self.partial.open("r+b" if self.resumed else "ab")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(f"another run is writing {str(self.partial)!r}") from None
        self._file.truncate(self.counts["bytes"])
        self._file.seek(self.counts["bytes"])
        if not self.resumed:
            self._write_meta()

    def append(self, records: list[dict[str, Any]], counted: dict[str, int]) -> None:
        """Write one window's records and count it."""
        data = "".join(_line(record) for record in records).encode()
        self._file.write(data)
        self._file.flush()
        os.fsync(self._file.fileno())
        added = {"windows": 1, "bytes": len(data), "written": len(records), **counted}
        self.counts = {name: self.counts[name] + added[name] for name in COUNTS}
        self._write_meta()

    def finish(self) -> None:
        """Give the files their final names."""
        if self._file is not None:
            self._file.close()
        if self.partial.is_file():
            os.replace(self.partial, self.path)
        if self.partial_meta.is_file():
            os.replace(self.partial_meta, self.meta_path)
        self.done = True

    def discard(self) -> None:
        """Remove what was begun."""
        if self._file is not None:
            self._file.close()
        for path in (self.partial, self.partial_meta):
            path.unlink(missing_ok=True)

    def _write_meta(self) -> None:
        from polydecode import __version__

        meta = {"polydecode": __version__, "settings": self.settings, "counts": self.counts}
        aside = self.partial_meta.with_name(self.partial_meta.name + ".new")
        with aside.open("w") as file:
            file.write(json.dumps(meta, ensure_ascii=False, indent=1) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, self.partial_meta)


def _line(record: dict[str, Any]) -> str:
    """JSON on one line for every reader: some also end lines at these three characters."""
    text = json.dumps(record, ensure_ascii=False)
    for character in ("\x85", "\u2028", "\u2029"):
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text + "\n"
