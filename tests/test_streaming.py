"""Streams: each document once per pass, an exact state, and runs that are killed and resumed."""

import gzip
import json
import multiprocessing
import os
import signal
from itertools import islice

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from polydecode.config import DataConfig, TrainConfig
from polydecode.convert import convert, save_checkpoint
from polydecode.data import Collator, ExampleStream, load_examples, split_held_out, streaming, training_data
from polydecode.data.files import START, Row
from polydecode.data.sources import Source, open_sources
from polydecode.data.streaming import ROWS, SHARDS, stream_id
from polydecode.errors import UserError
from polydecode.train import train
from polydecode.train.draws import StreamState
from polydecode.train.trainer import DecoderTrainer
from tiny import tiny_base
from tiny_tokenizer import tiny_tokenizer

TOKENIZER = tiny_tokenizer()


class ListShard:
    """Documents in memory that count how often they are read."""

    def __init__(self, name, count):
        self.name, self.count, self.read = name, count, []

    def rows(self, start=START):
        for i in range(start[0], self.count):
            self.read.append(i)
            yield Row(i + 1, {"text": f"{self.name} {i}"}, (i + 1, i + 1))

    def fingerprint(self):
        return self.name

    def identity(self):
        return self.name


def make(sizes, weights=(), seed=5, fraction=0.0, buffer=7):
    """A stream of one source per size (one source of all of them when no weights are given)."""
    shards = [ListShard(f"f{i}", size) for i, size in enumerate(sizes)]
    sources = [Source(s.name, [s]) for s in shards] if weights else [Source("all", shards)]
    config = DataConfig(
        data=[s.name for s in sources], data_weights=list(weights), eval_fraction=fraction, shuffle_buffer=buffer
    )
    return ExampleStream(sources, TOKENIZER, config, seed)


def take(stream, count):
    return [e.example_id for e in islice(stream, count)]


def resumed(make_stream, state):
    stream = make_stream()
    stream.load_state_dict(json.loads(json.dumps(state)))
    return stream


SIZES = st.lists(st.integers(0, 25), min_size=1, max_size=4).filter(any)


@given(SIZES, st.integers(1, 40), st.integers(0, 3))
def test_every_pass_has_every_document_once(sizes, buffer, seed):
    """Bug: documents lost at the end of a file, chunk or pass, or seen twice in a pass."""
    total = sum(sizes)
    ids = take(make(sizes, seed=seed, buffer=buffer), 3 * total)
    everything = sorted(stream_id(0, f, i + 1) for f, size in enumerate(sizes) for i in range(size))
    for number in range(3):
        one = ids[number * total : (number + 1) * total]
        assert sorted(i - number * SHARDS * ROWS for i in one) == everything


def test_passes_are_shuffled_differently_and_by_seed():
    """Bug: a stream in the order of the file, or the same order in every pass and for every seed."""
    ids = take(make([30, 30], buffer=20), 120)
    first, second = [i % (SHARDS * ROWS) for i in ids[:60]], [i % (SHARDS * ROWS) for i in ids[60:]]
    assert first != sorted(first)
    assert first != second
    one = take(make([40], buffer=20), 40)
    assert [i + 20 for i in one[:20]] != one[20:]  # the second chunk in the order of the first
    assert take(make([30, 30], buffer=20), 60) == ids[:60]
    assert take(make([30, 30], buffer=20, seed=6), 60) != ids[:60]


@given(SIZES, st.lists(st.integers(0, 60), min_size=1, max_size=4), st.integers(1, 30), st.booleans())
def test_resumed_any_number_of_times_it_draws_what_it_would_have(sizes, cuts, buffer, weighted):
    """Bug: datasets#8295, the second resume begins the stream anew; a chunk drawn twice or left out."""
    sizes = [size + 1 for size in sizes]
    weights = [1.0 + i for i in range(len(sizes))] if weighted else []

    def fresh():
        return make(sizes, weights, buffer=buffer)

    stream, parts = fresh(), []
    for cut in cuts:
        parts += take(stream, cut)
        stream = resumed(fresh, stream.state_dict())
    parts += take(stream, 20)
    assert parts == take(fresh(), len(parts))


def test_resume_reads_one_chunk_again_and_tokenises_nothing(monkeypatch):
    """Bug: transformers#18649, an hour to skip what was consumed."""
    tokenised = []
    monkeypatch.setattr(
        streaming,
        "examples_of",
        lambda document, *_, real=streaming.examples_of: tokenised.append(document) or real(document, *_),
    )
    stream = make([5000], buffer=50)
    list(islice(stream, 4020))
    again = make([5000], buffer=50)
    again.load_state_dict(stream.state_dict())
    tokenised.clear()
    take(again, 5)
    assert len(tokenised) == 5
    read = again.sources[0].shards[0].read
    assert read[0] == 0  # the first row says which columns the file has
    assert read[1] == 4000
    assert len(read) == 51


def test_peeking_draws_nothing():
    """Bug: the loss before the first step taking the first examples out of the run."""
    stream = make([20])
    take(stream, 3)
    state = stream.state_dict()
    assert [e.example_id for e in stream.peek(4)] == take(resumed(lambda: make([20]), state), 4)
    assert stream.state_dict() == state
    assert take(stream, 4) == take(make([20]), 7)[3:]  # a second iteration goes on as well


def test_a_stream_holds_one_chunk_at_most():
    """Bug: reading everything before the first example."""
    stream = make([100_000], buffer=50)
    take(stream, 120)
    assert len(stream.sources[0].shards[0].read) == 150


def test_a_chunk_is_bounded_in_bytes(monkeypatch):
    """Bug: ten thousand books in memory because the buffer counts documents."""
    monkeypatch.setattr(streaming, "CHUNK_BYTES", 200)
    stream = make([1000], buffer=500)
    take(stream, 1)
    assert len(stream.sources[0].shards[0].read) < 20
    ids = take(make([100], buffer=500), 100)
    assert len(set(ids)) == 100


def test_items_of_one_line_have_ids_of_their_own(tmp_path):
    """Bug: json.dump writes a list on one line, and all its records draw the same noise."""
    path = tmp_path / "one.json"
    path.write_text(json.dumps([{"text": f"document {i}"} for i in range(20)]))
    stream = ExampleStream(
        open_sources([str(path)], True), TOKENIZER, DataConfig(data=[str(path)], eval_fraction=0.0), 1
    )
    assert len(set(take(stream, 20))) == 20


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "json", "csv", "parquet", "txt"])
def test_state_seeks_in_files_of_every_kind(tmp_path, kind):
    """Bug: a position that means something else after reopening the file."""
    records = [{"text": f"hello {i}\u2028, and more"} for i in range(40)]
    for f in range(2):
        path, part = tmp_path / f"{f}.{kind}", records[20 * f : 20 * f + 20]
        lines = "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in part)
        if kind == "parquet":
            pq.write_table(pa.Table.from_pylist(part), path, row_group_size=6)
        elif kind == "txt":
            for i, record in enumerate(part):
                (tmp_path / f"{f}-{i:02}.txt").write_text(record["text"])
        elif kind == "csv":
            path.write_text("text\n" + "".join(f'"{r["text"]}\n."\n' for r in part))
        elif kind == "json":
            path.write_text(json.dumps(part, indent=1))
        else:
            path.write_bytes(gzip.compress(lines.encode()) if kind.endswith("gz") else lines.encode())

    def fresh():
        config = DataConfig(data=[str(tmp_path)], shuffle_buffer=9, eval_fraction=0.0)
        return ExampleStream(open_sources(config.data, streaming=True), TOKENIZER, config, 3)

    whole = [(e.example_id, e.input_ids) for e in islice(fresh(), 100)]
    stream, parts = fresh(), []
    for cut in (4, 23, 9, 41, 23):
        parts += [(e.example_id, e.input_ids) for e in islice(stream, cut)]
        stream = resumed(fresh, stream.state_dict())
    assert parts == whole
    assert len({tuple(ids) for _, ids in whole}) == 40


@given(st.lists(st.floats(0.1, 10), min_size=2, max_size=4), st.integers(1, 150))
def test_weights_hold_at_every_moment(weights, count):
    """Bug: shares that hold on average over hours only, or a small source that ends the stream."""
    sizes = [3 + 5 * i for i in range(len(weights))]
    ids = take(make(sizes, weights), count)
    assert len(set(ids)) == count
    for i, weight in enumerate(weights):
        drawn = sum(i == (x // ROWS) % SHARDS for x in ids)
        assert abs(drawn - count * weight / sum(weights)) < len(weights)


@pytest.mark.parametrize(("batch_size", "world_size"), [(1, 2), (3, 2), (2, 4)])
def test_ranks_share_the_draws_of_one(batch_size, world_size):
    """Bug: examples seen by two ranks or by none, or another order with more ranks."""
    group = batch_size * world_size
    whole = take(make([50, 31]), 6 * group)
    ranks = []
    for rank in range(world_size):
        stream = make([50, 31])
        stream.shard(batch_size, rank, world_size)
        ranks.append(take(stream, 6 * batch_size))
        assert stream.state_dict(6 * group) == make_state([50, 31], 6 * group)
    merged = [i for step in range(6) for ids in ranks for i in ids[step * batch_size : (step + 1) * batch_size]]
    assert merged == whole


def make_state(sizes, drawn):
    stream = make(sizes)
    take(stream, drawn)
    return stream.state_dict()


def test_state_of_one_number_of_ranks_goes_on_with_another():
    """Bug: a run that cannot move from two machines to one."""
    whole = take(make([50, 31]), 36)
    two = make([50, 31])
    two.shard(3, 1, 2)
    take(two, 9)
    state = two.state_dict(18)
    one = make([50, 31])
    one.load_state_dict(state)
    assert take(one, 18) == whole[18:]


def packed(monkeypatch, sizes=(50, 31), weights=(), window=8):
    """A stream that packs its documents (of 9 to 11 tokens here) into rows of 30."""
    monkeypatch.setattr(streaming, "PACK_WINDOW", window)
    stream = make(list(sizes), weights)
    stream.config.packing, stream.config.max_length = True, 30
    return stream


def rows_of(stream, count):
    return [([e.example_id for e in row], row.window, row.number) for row in islice(stream, count)]


@pytest.mark.parametrize("weights", [(), (1.0, 2.0)])
def test_packed_rows_hold_every_draw_once(monkeypatch, weights):
    """Bug: documents lost between two windows, or rows longer than max_length."""
    rows = list(islice(packed(monkeypatch, weights=weights), 40))
    whole = [row for row in rows if row.window < rows[-1].window]
    ids = [e.example_id for row in whole for e in row]
    assert sorted(ids) == sorted(take(make([50, 31], weights), len(ids)))
    assert all(sum(len(e.input_ids) for e in row) <= 30 for row in rows)
    assert max(len(row) for row in rows) >= 2


@pytest.mark.parametrize(("batch_size", "world_size"), [(1, 2), (3, 2), (2, 4)])
def test_ranks_share_the_packed_rows_of_one(monkeypatch, batch_size, world_size):
    """Bug: a row seen by two ranks or by none; other rows with more ranks."""
    whole = rows_of(packed(monkeypatch), 6 * batch_size * world_size)
    ranks = []
    for rank in range(world_size):
        stream = packed(monkeypatch)
        stream.shard(batch_size, rank, world_size)
        ranks.append(rows_of(stream, 6 * batch_size))
    merged = [r for step in range(6) for rows in ranks for r in rows[step * batch_size : (step + 1) * batch_size]]
    assert merged == whole


@pytest.mark.parametrize("cut", range(1, 14))
def test_a_packed_stream_resumes_at_any_row(monkeypatch, cut):
    """Bug: a resume that begins at the window, or one row early or late, also at a window's last row and on more ranks."""
    whole = rows_of(packed(monkeypatch), 24)
    first = packed(monkeypatch)
    _, window, number = rows_of(first, cut)[-1]
    islice(first, 5)
    state = json.loads(json.dumps(first.state_dict(window, number + 1)))
    again = packed(monkeypatch)
    again.load_state_dict(state)
    assert rows_of(again, 24 - cut) == whole[cut:]
    _, window, number = whole[cut]
    state = again.state_dict(window, number + 1)
    third = packed(monkeypatch)
    third.load_state_dict(state)
    third.shard(1, 1, 2)
    assert rows_of(third, 3) == whole[cut + 2 : cut + 8 : 2]
    with pytest.raises(UserError, match="packing was True"):
        make([50, 31]).load_state_dict(state)


def test_states_are_walked_to_from_the_last_one(monkeypatch):
    """Bug: each save of a long run reading all raw documents since its beginning again."""
    stream = packed(monkeypatch, sizes=(400,))
    rows_of(stream, 100)
    shard = stream.sources[0].shards[0]
    stream.state_dict(160, 1)
    shard.read.clear()
    stream.state_dict(168, 1)
    assert len(shard.read) <= 7 + 8 + 7, "a chunk again, and the way"


def batches(stream, batch_size, count):
    loader = DataLoader(
        stream,
        batch_size=batch_size,
        collate_fn=Collator(2),
        num_workers=stream.config.data_workers,
        multiprocessing_context="fork" if stream.config.data_workers else None,
    )
    return [b["example_ids"].tolist() for b in islice(loader, count)]


def test_dataloader_workers_change_neither_order_nor_state():
    """Bug: each worker reading all the data (every example twice), or a state that counts what workers read ahead."""
    single = batches(make([60, 31]), 4, 20)
    stream = make([60, 31])
    stream.config.data_workers = 2
    stream.shard(4, 0, 1)
    assert batches(stream, 4, 10) == single[:10]
    state = stream.state_dict(40)
    assert state == make_state([60, 31], 40)
    again = make([60, 31])
    again.config.data_workers = 3
    again.shard(4, 0, 1)
    again.load_state_dict(state)
    assert batches(again, 4, 10) == single[10:]
    assert again.state_dict(60) == make_state([60, 31], 60)
    assert again.state_dict(80) == make_state([60, 31], 80)


def test_hub_shards_are_files_of_the_stream(monkeypatch):
    """Bug: a hub stream that cannot go on, or of which each dataloader worker reads its own part and skips the others'."""

    def rows(shards):
        for shard in shards:
            yield from ({"text": f"shard {shard} {i}"} for i in range(90))

    data = datasets.IterableDataset.from_generator(rows, gen_kwargs={"shards": [0, 1, 2]})
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: data)
    config = DataConfig(data=["owner/name"], shuffle_buffer=50, eval_fraction=0.0)

    def fresh():
        return ExampleStream(open_sources(config.data, streaming=True), TOKENIZER, config, 3)

    whole = batches(fresh(), 6, 60)
    assert len({i for batch in whole[:45] for i in batch}) == 270
    stream = fresh()
    assert batches(stream, 6, 20) == whole[:20]
    config.data_workers = 2
    stream = resumed(fresh, stream.state_dict())
    stream.shard(6, 0, 1)
    assert batches(stream, 6, 20) == whole[20:40]
    assert batches(resumed(fresh, stream.state_dict(240)), 1, 2) == [[i] for i in whole[40][:2]]


def test_held_out_documents_are_those_of_the_whole_data(tmp_path):
    """Bug: a held-out document trained on in the stream, or a split that differs from the one of a run without it."""
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": f"hello {i}"}) + "\n" for i in range(200)))
    config = DataConfig(data=[str(path)], eval_fraction=0.2, streaming=True, shuffle_buffer=30)
    stream, held_out = training_data(config, TOKENIZER, seed=1)
    training, held = split_held_out(load_examples([path], TOKENIZER, config), config)
    assert {tuple(e.input_ids) for e in held_out} == {tuple(e.input_ids) for e in held}
    streamed = {tuple(e.input_ids) for e in islice(stream, len(training))}
    assert streamed == {tuple(e.input_ids) for e in training}
    config.max_eval_examples = 3
    assert len(training_data(config, TOKENIZER, seed=1)[1]) == 3


def test_all_held_out_is_refused_instead_of_searched_for_ever():
    """Bug: a stream that reads its data in circles because nothing of it may be trained on."""
    with pytest.raises(UserError, match="no training documents"):
        take(make([5], fraction=0.999999999), 1)


def test_set_epoch_never_goes_back():
    """Bug: the training loop's set_epoch(0) after a resume beginning the stream anew."""
    stream = make([20])
    take(stream, 25)
    state = stream.state_dict()
    stream.set_epoch(0)
    stream.set_epoch(1)
    assert stream.state_dict() == state
    stream.set_epoch(3)
    assert take(stream, 1)[0] // (SHARDS * ROWS) == 3


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"sizes": [20, 20]}, "data files"),
        ({"seed": 6}, "seed was 5"),
        ({"buffer": 8}, "shuffle_buffer was 7, now it is 8"),
    ],
)
def test_state_of_other_data_is_refused_by_name(change, says):
    """Bug: going on at line 70,000 of another file."""
    state = make_state([20], 5)
    with pytest.raises(UserError, match=says) as error:
        make(**{"sizes": [20]} | change).load_state_dict(state)
    assert "\n" not in str(error.value)


def train_config(tmp_path, out, **changes):
    settings = {
        "batch_size": 4,
        "micro_batch_size": 2,
        "max_steps": 7,
        "save_steps": 2,
        "save_total_limit": 10,
        "learning_rate": 1e-2,
        "log_steps": 1,
        "dtype": "float32",
        "streaming": True,
        "shuffle_buffer": 9,
        "eval_fraction": 0.1,
    }
    return TrainConfig(
        checkpoint=str(tmp_path / "checkpoint"),
        out=str(tmp_path / out),
        data=[str(tmp_path / "a.jsonl"), str(tmp_path / "b.csv")],
        **settings | changes,
    )


@pytest.fixture
def checkpoint(tmp_path):
    base = tiny_base(dtype=torch.float32, vocab_size=300, initializer_range=0.05)
    save_checkpoint(convert(base, method="block_diffusion", block_size=4), tiny_tokenizer(), tmp_path / "checkpoint")
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": f"the capital {i}"}) + "\n" for i in range(15)))
    (tmp_path / "b.csv").write_text("prompt,response\n" + "".join(f"say {i}, it is {i}\n" for i in range(8)))
    return tmp_path


def _recorded_run(config, log, kill_at):
    """Train, writing (step, example ids, loss) of each forward to `log`; kill this process in the forward of step `kill_at`."""
    compute_loss = DecoderTrainer.compute_loss

    def recorded(self, model, inputs, *arguments, **named):
        loss = compute_loss(self, model, inputs, *arguments, **named)
        step = self.state.global_step + 1
        if step == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        with open(log, "a") as file:
            file.write(json.dumps([step, inputs["example_ids"].tolist(), float(loss)]) + "\n")
        return loss

    DecoderTrainer.compute_loss = recorded
    train(config)


def recorded_run(config, log, kill_at=None):
    child = multiprocessing.get_context("fork").Process(target=_recorded_run, args=(config, log, kill_at))
    child.start()
    child.join()
    assert child.exitcode == (0 if kill_at is None else -signal.SIGKILL)
    return [json.loads(line) for line in log.read_text().splitlines()]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"data_weights": [1.0, 2.0], "data_workers": 1},
        {"packing": True, "max_length": 40},
        {"packing": True, "max_length": 40, "data_weights": [1.0, 2.0], "data_workers": 2},
    ],
    ids=["joined", "weighted, by a worker", "packed", "packed, weighted, by workers"],
)
def test_killed_and_resumed_twice_equals_the_uninterrupted_run(checkpoint, changes, monkeypatch):
    """Bug: NeMo#2508, datasets#8295: examples lost, repeated, or other noise, after kill -9 and resume."""
    monkeypatch.setattr(streaming, "PACK_WINDOW", 11)
    whole = recorded_run(train_config(checkpoint, "whole", **changes), checkpoint / "whole.log")
    log = checkpoint / "parts.log"
    recorded_run(train_config(checkpoint, "parts", **changes), log, kill_at=4)
    recorded_run(train_config(checkpoint, "parts", resume=True, **changes), log, kill_at=6)
    parts = recorded_run(train_config(checkpoint, "parts", resume=True, **changes), log)
    assert [row[0] for row in parts] == [1, 1, 2, 2, 3, 3, 3, 3, 4, 4, 5, 5, 5, 5, 6, 6, 7, 7]
    assert parts[:4] + parts[6:10] + parts[12:] == whole
    assert parts[4:6] == parts[6:8]
    if "packing" in changes:
        assert len({i for _, ids, _ in whole for row in ids for i in row if i >= 0}) > 40
    else:
        assert len({i for _, ids, _ in whole for i in ids}) == 28
    results = [json.loads((checkpoint / out / "training_metrics.json").read_text()) for out in ("whole", "parts")]
    assert results[0]["final"]["eval_loss"] == results[1]["final"]["eval_loss"]


def test_token_budget_ends_a_stream_without_max_steps(checkpoint):
    """Bug: the library's demand for max_steps reaching the user, or a run that never ends."""
    metrics = train(train_config(checkpoint, "out", max_steps=0, max_tokens=300, save_steps=0))
    assert 300 <= metrics["tokens"] < 400


def test_stream_without_an_end_is_refused(tmp_path):
    """Bug: epochs of a stream, which has none."""
    with pytest.raises(UserError, match="--max-steps, --max-tokens or --max-minutes"):
        train_config(tmp_path, "out", max_steps=0).check()


def test_checkpoint_without_stream_state_is_refused(checkpoint):
    """Bug: a resumed stream that silently begins anew."""
    train(train_config(checkpoint, "out", streaming=False, max_steps=2))
    with pytest.raises(UserError, match=r"stream\.json"):
        train(train_config(checkpoint, "out", resume=True))
    train(train_config(checkpoint, "streamed", max_steps=2))
    with pytest.raises(UserError, match="give --streaming"):
        train(train_config(checkpoint, "streamed", resume=True, streaming=False))


@pytest.mark.parametrize("workers", [0, 1])
def test_malformed_document_in_the_middle_of_a_run_is_one_line(checkpoint, workers):
    """Bug: a dataloader worker's traceback as the message."""
    with (checkpoint / "a.jsonl").open("a") as file:
        file.write('{"text": ""}\n')
    with pytest.raises(UserError) as error:
        train(train_config(checkpoint, "out", data_workers=workers, eval_fraction=0.0, shuffle_buffer=15))
    assert str(error.value) == f"{checkpoint}/a.jsonl:16: text must be a non-empty string"


def test_mixture_killed_and_resumed_in_its_second_epoch_equals_the_uninterrupted_run(checkpoint):
    """Bug: a resumed run that draws the first epoch's examples in its second."""
    settings = {"data_weights": [1.0, 2.0], "streaming": False, "max_steps": 9}
    whole = recorded_run(train_config(checkpoint, "whole", **settings), checkpoint / "whole.log")
    log = checkpoint / "parts.log"
    recorded_run(train_config(checkpoint, "parts", **settings), log, kill_at=4)
    recorded_run(train_config(checkpoint, "parts", resume=True, **settings), log, kill_at=9)
    parts = recorded_run(train_config(checkpoint, "parts", resume=True, **settings), log)
    last = {}
    for step, ids, loss in parts:
        last.setdefault(step, []).append((ids, loss))
    assert len(parts) == len(whole) + 2
    for step in range(1, 10):
        assert last[step][-2:] == [(ids, loss) for s, ids, loss in whole if s == step][-2:]


def test_state_is_written_for_what_was_trained_on():
    """Bug: a state that counts batches read ahead."""
    stream = make([20])
    state = StreamState(stream, per_step=6)
    state.on_train_begin(None, None, None)
    state.on_step_end(None, None, None)
    take(stream, 9)
    assert stream.state_dict(state.drawn) == make_state([20], 6)
