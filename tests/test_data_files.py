"""Where training data comes from: formats, columns, mixtures, and what malformed files say."""

import csv
import gzip
import json
import warnings
from itertools import islice

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polydecode.config import DataConfig
from polydecode.data import data_fingerprint, files, load_examples, split_held_out, token_cache, training_data
from polydecode.data.columns import choose_columns, parse_columns
from polydecode.data.files import START, read_rows
from polydecode.data.mixture import REPEAT, Mixture, shares
from polydecode.data.sources import open_sources
from polydecode.errors import UserError, UserNotice
from tiny_tokenizer import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
RECORDS = [
    {"prompt": "the capital", "response": " Paris\nand more"},
    {"prompt": 'a "quoted", thing\u2028end', "response": " höhe 🙂"},
    {"prompt": "three", "response": " 3"},
]


def jsonl(records):
    return "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records).encode()


def write(folder, name, content):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    return path


def write_records(folder, name, records=RECORDS):
    """`records` as a file of the format that `name` says."""
    kind = files.kind_of(name)
    path = folder / name
    if kind == "jsonl":
        return write(folder, name, jsonl(records))
    if kind == "json":
        return write(folder, name, json.dumps(records, indent=2).encode())
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(records), path, row_group_size=2)
        return path
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, list(records[0]), delimiter="\t" if kind == "tsv" else ",")
        table.writeheader()
        table.writerows(records)
    return path if not name.endswith(".gz") else write(folder, name, path.read_bytes())


def config(*data, **settings):
    return DataConfig(data=[str(d) for d in data], **settings)


def load(*data, **settings):
    return load_examples([str(d) for d in data], TOKENIZER, config(*data, **settings))


def texts(examples):
    return [TOKENIZER.decode(e.input_ids) for e in examples]


FORMATS = ["a.jsonl", "a.ndjson", "a.jsonl.gz", "a.json", "a.json.gz", "a.csv", "a.csv.gz", "a.tsv", "a.parquet"]


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_gives_the_same_examples(tmp_path, name):
    """Bug: a format that drops rows, splits lines at U+2028, loses quotes or renumbers the examples."""
    found = load(write_records(tmp_path, name))
    expected = [r["prompt"] + r["response"] + "<|im_end|>" for r in RECORDS]
    assert texts(found) == expected
    assert [e.example_id for e in found] == [0, 1, 2]


@pytest.mark.parametrize("name", FORMATS)
def test_reading_goes_on_at_any_row(tmp_path, name):
    """Bug: a position that repeats or skips a row, so that a resumed stream trains on one twice."""
    rows = list(read_rows(write_records(tmp_path, name, RECORDS * 3)))
    assert [r.record for r in rows] == RECORDS * 3
    for i, row in enumerate(rows):
        rest = list(read_rows(tmp_path / name, row.after))
        assert rest == rows[i + 1 :]
    assert list(read_rows(tmp_path / name, START)) == rows


def test_json_may_be_one_object_per_line_and_lines_may_end_in_cr_lf_after_a_bom(tmp_path):
    """Bug: a BOM or CRLF, as Windows writes them, taken for malformed data."""
    content = b"\xef\xbb\xbf" + jsonl(RECORDS).replace(b"\n", b"\r\n")
    for name in ("a.jsonl", "b.json"):
        assert texts(load(write(tmp_path, name, content))) == texts(load(write_records(tmp_path, "c.jsonl")))
    assert texts(load(write(tmp_path, "a.csv", b"\xef\xbb\xbftext\r\nhello\r\n"))) == ["hello<|im_end|>"]
    assert texts(load(write(tmp_path, "a.txt", b"\xef\xbb\xbfone\r\n\r\ntwo"))) == ["one\n\ntwo<|im_end|>"]
    list_of = b"\xef\xbb\xbf " + json.dumps(RECORDS).encode()
    assert len(load(write(tmp_path, "list.json", list_of))) == 3


def test_folder_and_glob_take_all_data_files_sorted(tmp_path):
    """Bug: files in the file system's order, hidden files, or a README taken for data."""
    for name in ("b/2.txt", "a.txt", "b/1.txt", "README.md", ".hidden/x.txt", "b/.y.txt"):
        write(tmp_path, name, name.encode())
    write(tmp_path, "b/empty.txt", b"")
    assert texts(load(tmp_path)) == [f"{n}<|im_end|>" for n in ("a.txt", "b/1.txt", "b/2.txt")]
    assert texts(load(tmp_path / "**" / "*.txt")) == [f"{n}<|im_end|>" for n in ("a.txt", "b/1.txt", "b/2.txt")]
    assert texts(load(tmp_path / "b" / "[12].*")) == ["b/1.txt<|im_end|>", "b/2.txt<|im_end|>"]


GOOD = b'{"text": "a"}\n'
PAIR = b'{"prompt": "a", "response": "b"}\n'
MALFORMED = {
    "bad json": ("a.jsonl", GOOD + b'{"text": "a"\n', 2, "not valid JSON"),
    "two objects on a line": ("a.jsonl", GOOD + b'{"text": "a"} {"text": "b"}\n', 2, "not valid JSON"),
    "cut last line": ("a.jsonl", GOOD * 2 + b'{"text": "a', 3, "not valid JSON"),
    "cut last gz": ("a.jsonl.gz", None, None, "cannot be read"),
    "no gz at all": ("a.jsonl.gz", None, 1, "cannot be read"),
    "a list per line": ("a.jsonl", GOOD + b"[1, 2]\n", 2, "must be a JSON object"),
    "a string per line": ("a.jsonl", b'"hello"\n', 1, "must be a JSON object"),
    "nested without end": ("a.jsonl", GOOD + b'{"text": ' + b"[" * 200_000 + b"\n", 2, "nested too deeply"),
    "number of 5000 digits": ("a.jsonl", GOOD + b'{"text": ' + b"1" * 5000 + b"}\n", 2, "not readable JSON"),
    "half a surrogate pair": ("a.jsonl", GOOD + b'{"text": "\\ud83d"}\n', 2, "surrogate"),
    "half a surrogate pair in a list": ("a.json", b'[{"text": "a"},\n{"text": "\\uD83D"}]', 2, "surrogate"),
    "NUL in a line": ("a.jsonl", GOOD + b'{"text": "a\x00b"}\n', 2, "not valid JSON"),
    "line of NULs": ("a.jsonl", GOOD + b"\x00" * 100 + b"\n", 2, "not valid JSON"),
    "wrong columns": ("a.jsonl", b'{"txt": "a"}\n', 1, "needs text, or prompt and response"),
    "wrong columns later": ("a.jsonl", GOOD + b"\n" + b'{"txt": "a"}\n', 3, "needs text"),
    "empty answer": ("a.jsonl", PAIR + b'{"prompt": "a", "response": ""}\n', 2, "non-empty"),
    "null answer": ("a.jsonl", PAIR + b'{"prompt": "a", "response": null}\n', 2, "needs prompt, response"),
    "null answer first": ("a.jsonl", b'{"prompt": "a", "response": null}\n' + PAIR, 1, "needs text"),
    "answer of another type": ("a.jsonl", PAIR + b'{"prompt": "a", "response": 3}\n', 2, "non-empty string"),
    "mixed formats": ("a.jsonl", PAIR + GOOD, 2, "needs prompt, response"),
    "mixed formats, more": ("a.jsonl", GOOD + b'{"text": "a", "messages": []}\n', 2, "one form per file"),
    "latin-1": ("a.jsonl", GOOD + '{"text": "höhe"}\n'.encode("latin-1"), 2, "not UTF-8"),
    "UTF-16": ("a.jsonl", '{"text": "a"}\n'.encode("utf-16"), 1, "not UTF-8"),
    "huge line": ("a.jsonl", GOOD + b'{"text": "' + b"a" * 5000 + b'"}\n' + GOOD, 2, "longer than 4000 bytes"),
    "messages no list": ("a.jsonl", b'{"messages": "hello"}\n', 1, "messages must be"),
    "messages of strings": ("a.jsonl", b'{"messages": ["hello"]}\n', 1, "messages must be"),
    "messages bad JSON text": ("a.csv", b'messages\n"[{]"\n', 2, "messages is no valid JSON"),
    "unknown sender": ("a.jsonl", b'{"conversations": [{"from": "bard", "value": "a"}]}\n', 1, "unknown sender 'bard'"),
    "empty": ("a.jsonl", b"", None, "no records"),
    "only white space": ("a.jsonl", b"\n \r\n", None, "no records"),
    "empty txt": ("a.txt", b" \n", None, "no records"),
    "empty csv": ("a.csv", b"", None, "no records"),
    "csv of a header": ("a.csv", b"text\n", None, "no records"),
    "empty list": ("a.json", b"[]", None, "no records"),
    "list never closed": ("a.json", b'[{"text": "a"},\n{"text": "b"}\n', 3, "not closed"),
    "list without comma": ("a.json", b'[{"text": "a"}\n{"text": "b"}]', 2, "comma"),
    "list with one comma too many": ("a.json", b'[{"text": "a"},\n]', 2, "not valid JSON"),
    "list with bad item": ("a.json", b'[{"text": "a"},\n{"text":\n nope}]', 3, "not valid JSON"),
    "list of strings": ("a.json", b'[\n"a"]', 2, "must be a JSON object"),
    "text after list": ("a.json", b'[{"text": "a"}]\n{"text": "b"}', 1, "more text after"),
    "one object over lines": ("a.json", b'{\n"text": "a"}', 1, "one list of objects, or one object per line"),
    "huge list": ("a.json", b"[" + b" " * 9000 + b"]", None, "longer than 8000 bytes"),
    "list not UTF-8": ("a.json", b'[{"text": "a"},\n{"text": "\xff"}]', 2, "not UTF-8"),
    "ragged row": ("a.csv", b'prompt,response\na,b\n"c\nc",d\na,b,c\n', 5, "3 fields, the header has 2"),
    "short row": ("a.csv", b"prompt,response\na,b\na\n", 3, "1 fields"),
    "quote never closed": ("a.csv", b'text\na\n"b\nc\nd\n', 3, "a quote is never closed"),
    "quote never closed, long": ("a.csv", b'text\na\n"b' + b"\nc" * 3000, 3, "an open quote?"),
    "text after quote": ("a.csv", b'text\n"a"b\n', 2, "not valid csv"),
    "csv with NUL": ("a.csv", b"text\na\nb\x00\n", 3, "NUL byte"),
    "csv not UTF-8": ("a.csv", b"text\na\n\xff\n", 3, "not UTF-8"),
    "csv names a column twice": ("a.csv", b"text,text\na,b\n", 1, "twice"),
    "csv names no column": ("a.csv", b"text,\na,b\n", 1, "no name"),
    "csv of semicolons": ("a.csv", b"prompt;response\na;b\n", 2, "has prompt;response; needs"),
    "csv with empty answer": ("a.csv", b"prompt,response\na,b\na,\n", 3, "non-empty"),
    "txt with NUL": ("a.txt", b"a\nb\x00", 2, "NUL byte"),
    "txt not UTF-8": ("a.txt", b"a\n\xfe\xff", 2, "not UTF-8"),
    "txt too long": ("a.txt", b"a" * 5000, None, "longer than 4000 bytes"),
    "parquet cut off": ("a.parquet", None, 1, "not a readable parquet file"),
    "parquet of nothing": ("a.parquet", b"", 1, "not a readable parquet file"),
    "parquet damaged inside": ("a.parquet", None, None, "a.parquet:"),
    "prompt too long": ("a.jsonl", PAIR + b'{"prompt": "' + b"hello " * 99 + b'", "response": "a"}\n', 2, "max_length"),
}


def malformed_file(folder, name, content, case):
    if content is not None:
        return write(folder, name, content)
    path = folder / name
    if case == "cut last gz":
        path.write_bytes(gzip.compress(b"".join(b'{"text": "%d"}\n' % i for i in range(3)))[:-12])
    elif case == "no gz at all":
        path.write_bytes(GOOD)
    else:
        pq.write_table(pa.Table.from_pylist([{"text": f"hello {i}"} for i in range(500)]), path, compression="zstd")
        raw = bytearray(path.read_bytes())
        if case == "parquet cut off":
            raw = raw[: len(raw) // 2]
        else:
            raw[40:200] = b"\xff" * 160
        path.write_bytes(raw)
    return path


@pytest.mark.parametrize("case", MALFORMED)
@pytest.mark.parametrize("streaming", [False, True], ids=["map", "stream"])
def test_malformed_input_is_one_line_with_file_and_line(tmp_path, monkeypatch, case, streaming):
    """Bug: a traceback, a message of several lines, or one that does not say where."""
    monkeypatch.setattr(files, "MAX_ROW_BYTES", 4000 if "nested" not in case and "digits" not in case else 2**20)
    monkeypatch.setattr(files, "MAX_LIST_BYTES", 8000)
    name, content, line, says = MALFORMED[case]
    path = malformed_file(tmp_path, name, content, case)
    settings = config(path, max_length=50, streaming=streaming, eval_fraction=0.0)
    with pytest.raises(UserError) as error:
        list(islice(training_data(settings, TOKENIZER, seed=1)[0], 5))
    message = str(error.value)
    assert says in message
    assert "\n" not in message
    assert f"{name}{f':{line}:' if line else ''}" in message


MANGLED = st.tuples(st.sampled_from(FORMATS), st.integers(0, 10_000), st.binary(max_size=6), st.booleans())


@given(MANGLED)
def test_mangled_files_are_read_or_refused_in_one_line(tmp_path_factory, mangled):
    """Bug: bytes that raise something else than a `UserError`, wherever they stand in a file of any format."""
    name, at, garbage, cut = mangled
    folder = tmp_path_factory.mktemp("mangled")
    path = write_records(folder, name)
    raw = path.read_bytes()
    at %= len(raw) + 1
    path.write_bytes(raw[:at] + garbage + (b"" if cut else raw[at + len(garbage) :]))
    said = name
    try:
        list(open_sources([path])[0].documents({}))
    except UserError as error:
        said = str(error)
    assert "\n" not in said
    assert name in said


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("missing.jsonl", "no data file"),
        ("data/missing.jsonl", "no data file"),
        ("folder/a.cvs", "did you mean 'folder/a.csv'"),
        ("*.jsonl", "no data file matches"),
        ("nothing", "no data file"),
        ("empty", "holds no data files"),
        ("notes.md", "no known kind"),
        ("a.parquet.gz", "no known kind"),
        ("just a name", "no data file"),
    ],
)
def test_what_is_no_data_is_refused(tmp_path, monkeypatch, name, says):
    """Bug: a mistyped file name looked up on the hub, or a folder of nothing that trains on nothing."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    write(tmp_path, "folder/a.csv", b"text\na\n")
    (tmp_path / "notes.md").write_text("x")
    (tmp_path / "a.parquet.gz").write_text("x")
    with pytest.raises(UserError, match=says):
        open_sources([name])


def test_hub_name_without_the_hub_is_one_line():
    """Bug: forty lines of traceback from requests when the machine is offline."""
    with pytest.raises(UserError, match="'nobody/nothing' cannot be loaded from the hub") as error:
        open_sources(["nobody/nothing:main@test"])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("streaming", [False, True])
def test_hub_data_set_is_read_with_configuration_and_split(tmp_path, monkeypatch, streaming):
    """Bug: the configuration or split ignored; another text than the file's own."""
    path, asked, load_dataset = str(write_records(tmp_path, "a.jsonl")), [], datasets.load_dataset

    def local(name, configuration=None, split=None, streaming=False):
        asked.append((name, configuration, split))
        return load_dataset("json", data_files=path, split="train", streaming=streaming, cache_dir=str(tmp_path / "c"))

    monkeypatch.setattr(datasets, "load_dataset", local)
    source = open_sources(["owner/name:en@test"], streaming)[0]
    found = list(source.documents({}))
    assert asked == [("owner/name", "en", "test")]
    assert [d.record for d in found] == RECORDS
    assert found[1].place == "owner/name@test:2"
    assert [r.record for r in source.shards[0].rows(found[0].after)] == RECORDS[1:]


SHAREGPT = {
    "conversations": [
        {"from": "system", "value": "s"},
        {"from": "human", "value": "hi"},
        {"from": "gpt", "value": "yes"},
    ]
}
CHAT = {"messages": [{"role": r, "content": c} for r, c in (("system", "s"), ("user", "hi"), ("assistant", "yes"))]}


@pytest.mark.parametrize(
    ("record", "columns", "same_as", "told"),
    [
        (
            {"question": "a", "answer": "b"},
            "",
            {"prompt": "a", "response": "b"},
            "question as prompt, answer as response",
        ),
        ({"prompt": "a", "completion": "b"}, "", {"prompt": "a", "response": "b"}, "completion as response"),
        ({"content": "a", "id": "7"}, "", {"text": "a"}, "content as text"),
        ({"instruction": "a", "input": "i", "output": "b"}, "", {"prompt": "a\n\ni", "response": "b"}, "input under"),
        ({"instruction": "a", "input": "", "output": "b"}, "", {"prompt": "a", "response": "b"}, "input under"),
        (SHAREGPT, "", CHAT, "conversations as messages"),
        (CHAT | {"id": None}, "", CHAT, ""),
        ({"messages": json.dumps(CHAT["messages"])}, "", CHAT, ""),
        ({"q": "a", "a": "b"}, "prompt=q,response=a", {"prompt": "a", "response": "b"}, ""),
        ({"q": "a", "response": "b"}, "prompt=q", {"prompt": "a", "response": "b"}, ""),
        ({"body": "a", "text": "wrong"}, "text=body", {"text": "a"}, ""),
        ({"chat": SHAREGPT["conversations"], "text": "x"}, "messages=chat", CHAT, ""),
    ],
)
def test_columns_are_found_or_told(tmp_path, capsys, record, columns, same_as, told):
    """Bug: a data set in a common form refused, or read by a guess that nobody is told of."""
    found = load(write(tmp_path, "a.jsonl", jsonl([record])), columns=[columns] if columns else [])
    note = capsys.readouterr().err
    assert texts(found) == texts(load(write(tmp_path, "b.jsonl", jsonl([same_as]))))
    assert (told in note) if told else (note == "")


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        (["prompt"], "write what it is"),
        (["promt=a"], "did you mean 'prompt'"),
        (["text=a,prompt=b"], "mixes forms"),
        (["text=a", "text=b"], "twice"),
        (["prompt=questio,response=answer"], "did you mean 'question'"),
        ([], "several ways"),
    ],
)
def test_wrong_columns_say_what_is_there(tmp_path, columns, says):
    """Bug: a KeyError, or training on the wrong column."""
    path = write(tmp_path, "a.jsonl", jsonl([{"question": "a", "answer": "b", "output": "c"}]))
    with pytest.raises(UserError, match=says) as error:
        load(path, columns=columns)
    assert "\n" not in str(error.value)


def test_parse_columns_reads_repeated_and_comma_separated_settings():
    """Bug: the second of two flags ignored."""
    assert parse_columns(["prompt=q", "response=a"]) == parse_columns(["prompt=q, response=a"])
    assert choose_columns({"prompt": "q", "response": "a"}, {"q": "1", "a": "2"}, "x:1").record(
        {"q": "1", "a": "2"}, "x:1"
    ) == {
        "prompt": "1",
        "response": "2",
    }


def test_split_keeps_duplicates_together_and_does_not_depend_on_format_or_order(tmp_path):
    """Bug: the same text in the training and the held-out part, or a split that moves when a file is converted."""
    records = [{"text": f"hello {i % 150}"} for i in range(300)]
    settings = config("x", eval_fraction=0.3)
    halves = []
    for name, rows in (("a.jsonl", records), ("b.csv", records[::-1]), ("c.parquet", records[1::2] + records[::2])):
        training, held_out = split_held_out(load(write_records(tmp_path, name, rows)), settings)
        halves.append((sorted(texts(training)), sorted(texts(held_out))))
    assert halves[0] == halves[1] == halves[2]
    training, held_out = halves[0]
    assert not set(training) & set(held_out)
    assert 40 < len(held_out) < 140
    assert len(training) + len(held_out) == 300


def test_eval_data_takes_every_format(tmp_path):
    """Bug: eval_data read by another reader than data."""
    data, held = write_records(tmp_path, "a.jsonl"), write_records(tmp_path, "b.parquet")
    training, held_out = training_data(config(data, eval_data=[str(held)], max_eval_examples=2), TOKENIZER, seed=1)
    assert texts(held_out) == texts(training)[:2]


def mixture(tmp_path, sizes, weights, **settings):
    paths = []
    for i, size in enumerate(sizes):
        paths.append(write(tmp_path, f"{i}.jsonl", jsonl([{"text": f"source {i} hello {k}"} for k in range(size)])))
    data, _ = training_data(config(*paths, data_weights=weights, eval_fraction=0.0, **settings), TOKENIZER, seed=3)
    return data


def test_mixture_gives_the_shares_and_repeats_evenly(tmp_path):
    """Bug: weights read as sizes; a small source that is not repeated; noise of repeats that is the same."""
    data = mixture(tmp_path, [30, 10], [1.0, 3.0])
    drawn = [data[i] for i in range(len(data))]
    assert len(drawn) == 40
    ids = [e.example_id for e in drawn]
    assert len(set(ids)) == 40
    places = [i % REPEAT for i in ids]
    assert sum(p < 30 for p in places) == 10
    assert all(places.count(p) == 3 for p in range(30, 40))
    assert {i // REPEAT for i in ids} == {0, 1, 2}


def test_mixture_draws_anew_each_epoch_and_covers_what_it_subsamples(tmp_path):
    """Bug: the same tenth of a big source in every epoch; draws that depend on what was drawn before."""
    data = mixture(tmp_path, [30, 10], [1.0, 3.0])
    epochs = []
    for epoch in range(3):
        data.set_epoch(epoch)
        epochs.append([data[i].example_id for i in range(len(data))])
    big = [[i for i in e if i % REPEAT < 30] for e in epochs]
    assert sorted(big[0] + big[1] + big[2]) == list(range(30))
    again = Mixture(data.parts, [1.0, 3.0], seed=3)
    again.set_epoch(1)
    assert [again[i].example_id for i in range(len(again))] == epochs[1]


@given(st.integers(0, 1000), st.lists(st.floats(0.01, 100), min_size=1, max_size=5))
def test_shares_sum_to_the_whole(total, weights):
    """Bug: rounding that loses an example, or a share more than one off."""
    counts = shares(total, weights)
    assert sum(counts) == total
    exact = np.array(weights) / sum(weights) * total
    assert np.all(np.abs(np.array(counts) - exact) < 1 + 1e-6)


def test_settings_of_mixtures_are_checked():
    """Bug: a weight for a source that is not there, or a negative one."""
    for weights, says in (
        ([1.0], "1 data_weights for 2 data"),
        ([1.0, 0.0], "above 0"),
        ([1.0, float("nan")], "above 0"),
    ):
        with pytest.raises(UserError, match=says):
            config("a", "b", data_weights=weights).check()
    with pytest.raises(UserError, match="give --streaming"):
        config("a", packing=True, data_weights=[1.0]).check()
    config("a", packing=True, data_weights=[1.0], streaming=True).check()


def test_names_in_any_case_and_a_hint_in_the_files_own_names(tmp_path):
    """Bug: a file with Question and Answer refused, and told to write prompt=question, which it has not."""
    pairs = [{"Question ": "a", "ANSWER": "b", "id": 1}]
    assert texts(load(write(tmp_path, "a.jsonl", jsonl(pairs)))) == texts(
        load(write(tmp_path, "b.jsonl", jsonl([{"prompt": "a", "response": "b"}])))
    )
    path = write(tmp_path, "c.jsonl", jsonl([{"id": 1, "Frage": "a", "Antwort": "b"}]))
    with pytest.raises(UserError, match=r"has id, Frage, Antwort; .*such as prompt=Frage,response=Antwort"):
        load(path)
    with pytest.raises(UserError, match="such as text=inhalt"):
        load(write(tmp_path, "d.jsonl", jsonl([{"inhalt": "a"}])))


def test_pairs_without_the_template_are_noted(tmp_path):
    """Bug: training on bare pairs and generating with the template, without a word."""
    bare = tiny_tokenizer()
    bare.chat_template = None
    pairs = write(tmp_path, "a.jsonl", jsonl([{"prompt": "a", "response": "b"}]))
    text = write(tmp_path, "b.jsonl", jsonl([{"text": "a"}]))
    with pytest.warns(UserNotice, match="nothing is put between prompt and response; --chat"):
        load_examples([str(pairs)], TOKENIZER, config(pairs))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_examples([str(text)], TOKENIZER, config(text))
        load_examples([str(pairs)], TOKENIZER, config(pairs, chat=True))
        load_examples([str(pairs)], bare, config(pairs))


def test_data_is_told_apart_by_its_documents(tmp_path):
    """Bug: a run that resumes on other data, or refuses the same data in another file."""
    a = training_data(config(write_records(tmp_path, "a.jsonl")), TOKENIZER, seed=1)[0]
    b = training_data(config(write_records(tmp_path, "b.csv")), TOKENIZER, seed=1)[0]
    c = training_data(config(write_records(tmp_path, "c.jsonl", RECORDS[::-1])), TOKENIZER, seed=1)[0]
    assert data_fingerprint(a) == data_fingerprint(b) != data_fingerprint(c)


@pytest.mark.parametrize("workers", [0, 2])
def test_long_text_in_pieces_loses_nothing(tmp_path, workers, monkeypatch):
    """Bug: the rest of a book dropped, pieces that overlap, a false end in the middle, or a cache of uneven batches."""
    monkeypatch.setattr(token_cache, "ROWS", 8)
    book = "".join(f"word {i} " for i in range(400))
    records = [{"text": "short"}, {"text": book}, {"text": "x" * 31}]
    path = write(tmp_path, "a.jsonl", jsonl(records * 4))
    pairs = write(tmp_path, "b.jsonl", jsonl([{"prompt": "a", "response": "b" * 50}]))
    split = config(path, long_text="split", max_length=32, data_workers=workers // 2)
    found = load_examples([str(path)], TOKENIZER, split)
    whole = load_examples([str(path)], TOKENIZER, config(path, max_length=10**6))
    at = 0
    for example in whole:
        ids: list[int] = []
        pieces = []
        while len(ids) < len(example.input_ids):
            pieces.append(found[at])
            ids += found[at].input_ids
            at += 1
        assert all(len(p.input_ids) == 32 for p in pieces[:-1])
        assert all(len(p.input_ids) <= 32 and len(p.input_ids) > 1 for p in pieces)
        assert all(p.content_hash == example.content_hash for p in pieces), "held out together"
        assert ids == example.input_ids
    assert at == len(found)
    assert [e.example_id for e in found] == list(range(at))
    assert found.lengths().tolist() == [len(e.input_ids) for e in found]
    cut_short = load_examples([str(path)], TOKENIZER, config(path, max_length=32))
    assert len(cut_short) == 12
    (pair,) = load_examples([str(pairs)], TOKENIZER, config(pairs, long_text="split", max_length=32))
    assert len(pair.input_ids) == 32, "what has a prompt is cut"


def test_long_text_in_a_stream_needs_packing(tmp_path):
    """Bug: pieces that a stream silently leaves out."""
    path = write(tmp_path, "a.jsonl", jsonl([{"text": "word " * 100}, {"text": "b"}]))
    with pytest.raises(UserError, match="needs --packing"):
        config(path, long_text="split", streaming=True).check()
    told = {"long_text": "split", "streaming": True, "packing": True, "max_length": 32, "eval_fraction": 0.0}
    stream = training_data(config(path, **told), TOKENIZER, seed=1)[0]
    rows = [row for row, _ in zip(stream, range(40), strict=False)]
    examples = [e for row in rows for e in row]
    assert len({e.example_id for e in examples}) == len(examples)
    tokens = len(TOKENIZER("word " * 100)["input_ids"]) + 1
    assert max(sum(len(e.input_ids) for e in row) for row in rows) <= 32
    assert sum(len(e.input_ids) == 32 for e in examples) >= tokens // 32
