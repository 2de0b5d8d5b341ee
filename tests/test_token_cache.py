"""The token cache: made once, by one process, read lazily, never believed when it is damaged."""

import json
import multiprocessing
import os
import pickle
import time
from pathlib import Path

import numpy as np
import pytest

from polydecode.config import DataConfig, TrainConfig
from polydecode.data import load_examples, token_cache
from polydecode.data.examples import Example
from polydecode.data.lazy import Chosen
from polydecode.data.sources import open_sources
from polydecode.errors import UserError
from tiny_tokenizer import tiny_tokenizer

TOKENIZER = tiny_tokenizer()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where this test's tokens are cached."""
    monkeypatch.setattr(token_cache, "cache_folder", lambda: tmp_path / "cache")
    return tmp_path / "cache" / "tokens"


@pytest.fixture
def encoded(monkeypatch):
    """Counts the records that are tokenised."""
    counts = {"records": 0}
    encode = token_cache.encode_pieces

    def counted(*arguments):
        counts["records"] += 1
        return encode(*arguments)

    monkeypatch.setattr(token_cache, "encode_pieces", counted)
    return counts


def data_file(tmp_path, count=40, name="a.jsonl"):
    path = tmp_path / name
    path.write_text("".join(json.dumps({"text": f"hello {i}" * (1 + i % 3)}) + "\n" for i in range(count)))
    return path


def load(path, tokenizer=TOKENIZER, **settings):
    return load_examples([path], tokenizer, DataConfig(data=[str(path)], **settings))


def test_second_load_reads_what_the_first_made(tmp_path, folder, encoded):
    """Bug: tokenising again at every start, or other examples from the cache than without it."""
    path = data_file(tmp_path, 1200)
    first = list(load(path))
    assert encoded["records"] == 1200
    again = load(path)
    assert encoded["records"] == 1200
    assert list(again) == first == list(load(path, no_cache=True))
    assert [again[i].example_id for i in (0, 511, 512, 1199, -1)] == [0, 511, 512, 1199, 1199]
    assert all(type(getattr(again[0], n)) is type(getattr(first[0], n)) for n in Example.__dataclass_fields__)
    with pytest.raises(IndexError):
        again[1200]


def test_a_copy_of_the_file_is_the_same_data_and_another_content_is_not(tmp_path, folder, encoded):
    """Bug: a key by name, so that a changed file trains on old tokens."""
    path = data_file(tmp_path)
    load(path)
    load(path.rename(tmp_path / "b.jsonl"))
    assert encoded["records"] == 40
    content = (tmp_path / "b.jsonl").read_text()
    (tmp_path / "b.jsonl").write_text(content.replace("hello 7", "hullo 7"))
    assert len(load(tmp_path / "b.jsonl")) == 40
    assert encoded["records"] == 80


def test_big_files_are_told_apart_by_size_time_and_ends(tmp_path, folder, encoded, monkeypatch):
    """Bug: reading a terabyte to find the key; or not seeing that a big file changed."""
    monkeypatch.setattr("polydecode.data.sources.HASHED_WHOLE_BYTES", 100)
    monkeypatch.setattr("polydecode.data.sources._END_BYTES", 10)
    path = data_file(tmp_path)
    load(path)
    load(path)
    assert encoded["records"] == 40
    os.utime(path, ns=(1, 1))
    load(path)
    assert encoded["records"] == 80


@pytest.mark.parametrize(
    ("settings", "made_anew"),
    [
        ({"max_length": 9}, True),
        ({"columns": ["text=text"]}, True),
        ({"eval_fraction": 0.5, "data_weights": [2.0], "max_eval_examples": 3, "shuffle_buffer": 5}, False),
    ],
)
def test_key_holds_the_settings_that_matter_and_no_others(tmp_path, folder, encoded, settings, made_anew):
    """Bug: examples cut at an old max_length; or a new share of held-out data that tokenises for an hour."""
    path = data_file(tmp_path)
    load(path)
    load(path, **settings)
    assert encoded["records"] == (80 if made_anew else 40)


def test_key_holds_vocabulary_and_template(tmp_path, folder, encoded):
    """Bug: another tokenizer or template training on the first one's tokens."""
    path = data_file(tmp_path)
    saved = tmp_path / "tokenizer"
    TOKENIZER.save_pretrained(saved)
    same = TOKENIZER.__class__.from_pretrained(saved)
    others = [tiny_tokenizer(vocab_size=280), tiny_tokenizer(chat_template="{{ messages }}"), tiny_tokenizer()]
    others[2].add_tokens(["hello"])
    load(path)
    load(path, same)
    assert encoded["records"] == 40
    for count, other in enumerate(others, 2):
        load(path, other)
        assert encoded["records"] == 40 * count


def test_training_settings_are_not_in_the_key(tmp_path, folder):
    """Bug: a new learning rate that tokenises anew."""
    source = open_sources([data_file(tmp_path)])[0]
    keys = {
        token_cache.cache_key(source, TOKENIZER, TrainConfig(data=["x"], learning_rate=rate, seed=int(rate)))
        for rate in (1.0, 2.0)
    }
    assert keys == {token_cache.cache_key(source, TOKENIZER, DataConfig(data=["x"]))}


@pytest.mark.parametrize("damage", ["cut", "flipped", "emptied", "seal gone", "seal damaged", "unsealed by a kill"])
def test_damaged_cache_is_made_anew(tmp_path, folder, encoded, damage):
    """Bug: a crash, or training on what a full disk or a killed process left."""
    path = data_file(tmp_path)
    expected = list(load(path))
    file = next(folder.glob("*.arrow"))
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 2] ^= 0x10
    new = {"cut": raw[:-9], "flipped": raw, "emptied": b"", "unsealed by a kill": raw}.get(damage)
    if new is not None:
        file.unlink()
        file.write_bytes(new)
    if damage in ("seal gone", "unsealed by a kill"):
        file.with_suffix(".seal").unlink()
    if damage == "seal damaged":
        file.with_suffix(".seal").write_text('{"bytes"')
    assert list(load(path)) == expected
    assert encoded["records"] == 80
    load(path)
    assert encoded["records"] == 80


def test_malformed_record_leaves_no_cache(tmp_path, folder):
    """Bug: a file of the records before the bad one, taken for the whole at the next start."""
    path = data_file(tmp_path, 600)
    path.write_text(path.read_text() + '{"text": ""}\n')
    for workers in (0, 1):
        with pytest.raises(UserError, match=r"a\.jsonl:601: .*non-empty"):
            load(path, data_workers=workers)
    assert not list(folder.glob("*.arrow"))
    assert not list(folder.glob(".making-*"))


def _load_and_count(path, cache, log):
    encode = token_cache.encode_pieces

    def slow(*arguments):
        with open(log, "a") as file:
            file.write(f"{os.getpid()}\n")
        time.sleep(0.002)
        return encode(*arguments)

    token_cache.encode_pieces = slow
    token_cache.cache_folder = lambda: cache
    assert len(load(path)) == 200


def test_of_several_processes_one_tokenises(tmp_path, folder):
    """Bug: ranks that write the same file at once, or each tokenise all."""
    path, log = data_file(tmp_path, 200), tmp_path / "log"
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=_load_and_count, args=(path, tmp_path / "cache", log)) for _ in range(3)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert [rank.exitcode for rank in ranks] == [0, 0, 0]
    pids = log.read_text().split()
    assert len(pids) == 200
    assert len(set(pids)) == 1


def test_a_killed_writer_leaves_the_lock_free(tmp_path, folder):
    """Bug: a lock file of a killed run that makes every later one wait for ever."""
    path, log = data_file(tmp_path, 200), tmp_path / "log"
    writer = multiprocessing.get_context("fork").Process(target=_load_and_count, args=(path, tmp_path / "cache", log))
    writer.start()
    while not log.exists():
        time.sleep(0.01)
    writer.kill()
    writer.join()
    assert not list(folder.glob("*.arrow"))
    assert len(load(path)) == 200


def test_worker_processes_make_the_same_examples(tmp_path, folder):
    """Bug: batches in the order in which the workers finish."""
    path = data_file(tmp_path, 1100)
    assert list(load(path, data_workers=2)) == list(load(path, no_cache=True))


def test_examples_are_read_when_asked_for_and_travel_to_workers_by_name(tmp_path, folder):
    """Bug: all examples in memory, or a memory map pickled whole to each dataloader worker."""
    examples = load(data_file(tmp_path, 3000))
    packed = pickle.dumps(examples)
    assert len(packed) < 2000
    assert pickle.loads(packed)[2999] == examples[2999]
    odd = Chosen(examples, np.arange(1, 3000, 2))
    assert odd.lengths().tolist() == [len(e.input_ids) for e in odd]
    assert examples.content_hashes().tolist() == [e.content_hash for e in examples]
    assert examples.lengths().tolist() == [len(e.input_ids) for e in examples]


def test_cache_that_cannot_be_written_is_one_line(tmp_path, monkeypatch):
    """Bug: a traceback from a read-only home folder, without a way out."""
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(token_cache, "cache_folder", lambda: tmp_path / "file")
    with pytest.raises(UserError, match="POLYDECODE_CACHE") as error:
        load(data_file(tmp_path))
    assert "\n" not in str(error.value)
    assert len(load(data_file(tmp_path), no_cache=True)) == 40


def test_examples_that_reach_max_length_are_counted(tmp_path, folder):
    """Bug: a book given as one .txt, of which one page is trained on without a word."""
    book = Path(tmp_path / "book.txt")
    book.write_text("hello " * 500)
    with pytest.warns(UserWarning, match="1 of 1 examples reach max_length 50"):
        load(book, max_length=50)
