"""Data sets of the hub, `owner/name[:config][@split]`, through the `datasets` library."""

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from polydecode.data.files import START, Position, Row
from polydecode.errors import UserError


class HubName(NamedTuple):
    """A data set, its configuration (None: its only one) and split."""

    path: str
    config: str | None
    split: str


_BATCH = 64
_PATTERN = re.compile(r"([\w.-]+/[\w.-]+)(?::([\w.-]+))?(?:@([\w.-]+))?")


def hub_name(text: str) -> HubName | None:
    """`owner/name[:config][@split]` in parts (the split is train unless given), None for anything else."""
    found = _PATTERN.fullmatch(text)
    return HubName(found[1], found[2], found[3] or "train") if found else None


def open_hub(name: HubName, streaming: bool) -> list["HubShard"]:
    """The data set's shards: one when it is downloaded, as many as it has files when it is streamed."""
    import datasets

    try:
        data: Any = datasets.load_dataset(name.path, name.config, split=name.split, streaming=streaming)
    except Exception as error:  # the library raises its own, requests' and huggingface_hub's kinds
        told = " ".join(str(error).split())[:300]
        raise UserError(
            f"data set {name.path!r} cannot be loaded from the hub: {type(error).__name__}: {told}"
        ) from None
    place = f"{name.path}@{name.split}"
    if not streaming:
        return [HubShard(place, data, str(data._fingerprint))]
    count = data.num_shards
    identity = f"{name} {data.info.version} {data.info.dataset_size} {count}"
    return [
        HubShard(f"{place} shard {i}" if count > 1 else place, data.shard(num_shards=count, index=i), f"{identity} {i}")
        for i in range(count)
    ]


class HubShard:
    """Rows of a downloaded data set, or of one streamed shard of it; a position counts rows."""

    def __init__(self, name: str, data: Any, identity: str):
        self.name, self.data, self._identity = name, data, identity

    def rows(self, start: Position = START) -> Iterator[Row]:
        """The rows from `start` on; rows before it are passed over raw."""
        number = start[0]
        data = self.data
        if number:
            data = data.skip(number)
        try:
            for batch in data.iter(_BATCH):  # not iter(data), which in a dataloader worker would read a part only
                for values in zip(*batch.values(), strict=True):
                    number += 1
                    yield Row(number, dict(zip(batch, values, strict=True)), (number, number))
        except Exception as error:  # a lost connection, a damaged file: any kind the library's readers raise
            told = " ".join(str(error).split())[:200]
            raise UserError(f"{self.name}:{number + 1}: cannot be read: {type(error).__name__}: {told}") from None

    def fingerprint(self) -> str:
        """What tells this data from other data."""
        return self._identity

    def identity(self) -> str:
        """The same."""
        return self._identity
