from __future__ import annotations

import csv
import io
import json
import shlex
import tracemalloc
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mlm.config.data import CorpusConfig, SourceConfig
from mlm.config.errors import InputError
from mlm.data import tables
from mlm.data.formats import ReadReport, StoredBytes
from mlm.data.json_rows import array_items, json_rows
from mlm.data.sources import read_documents
from mlm.data.tables import arrow_documents, csv_rows, row_documents

ODD_TEXTS = ['He said "go", then\nleft', "a,b", "NA", "null", "None", "nan", "tab\there", "naïve 灯", "7"]


def read_json(
    text: str, column: str | None = None, array: bool = False, report: ReadReport | None = None
) -> list[str]:
    report = report or ReadReport("a")
    return list(row_documents(json_rows(iter([text]), "a", array, report), "a", column, report, True))


def read_csv(
    text: str, column: str | None = None, tabs: bool = False, report: ReadReport | None = None
) -> list[str]:
    return list(row_documents(csv_rows(iter([text]), "a", tabs), "a", column, report or ReadReport("a")))


def read_parquet(table: pa.Table, column: str | None = None, report: ReadReport | None = None) -> list[str]:
    file = io.BytesIO()
    pq.write_table(table, file)
    stored = io.BufferedReader(StoredBytes(io.BytesIO(file.getvalue()), lambda size: None))
    return list(arrow_documents("parquet", stored, "a", column, report or ReadReport("a")))


@pytest.mark.parametrize("dialect", [{}, {"quoting": csv.QUOTE_ALL}, {"delimiter": ";"}])
def test_csv_is_read_as_written(dialect: dict[str, Any]) -> None:
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n", **dialect)
    writer.writerows([["id", "text"], *enumerate(ODD_TEXTS)])
    assert read_csv(file.getvalue()) == ODD_TEXTS


def test_tsv_is_read_as_written() -> None:
    file = io.StringIO()
    writer = csv.writer(file, "excel-tab", lineterminator="\n")
    writer.writerows([["id", "text"], *enumerate(ODD_TEXTS)])
    assert read_csv(file.getvalue(), tabs=True) == ODD_TEXTS


def test_tsv_without_quoting_keeps_stray_quotes() -> None:
    text = 'id\ttext\n1\t"He left, she said\n2\tthe 5" disk\n3\t"a ""b"" c"\n4\tend "\n'
    assert read_csv(text, tabs=True) == ['"He left, she said', 'the 5" disk', 'a "b" c', 'end "']


def test_json_lines_are_read_as_written() -> None:
    lines = [json.dumps({"id": number, "text": text}) for number, text in enumerate(ODD_TEXTS)]
    assert read_json("\n".join(lines)) == ODD_TEXTS
    assert read_json("[" + ",\n".join(lines) + "]", array=True) == ODD_TEXTS
    assert read_json("\n".join(map(json.dumps, ODD_TEXTS))) == ODD_TEXTS


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())])
def test_parquet_is_read_as_written(kind: pa.DataType) -> None:
    texts = ODD_TEXTS * 300
    table = pa.table({"id": range(len(texts)), "body": pa.array(texts).cast(kind)})
    assert read_parquet(table) == texts


@pytest.mark.parametrize("read", [read_json, read_csv, read_parquet])
def test_rows_without_text_are_counted(read: Any) -> None:
    texts = ["quiet harbour", None, "old stone wall", " ", "two boats"]
    data: Any = {
        read_json: "\n".join(json.dumps({"text": text}) for text in texts),
        read_csv: "text,n\n" + "\n".join(f"{text or ''},1" for text in texts),
        read_parquet: pa.table({"text": texts}),
    }[read]
    report = ReadReport("a")
    assert read(data, report=report) == ["quiet harbour", "old stone wall", "two boats"]
    assert (report.rows, report.rows_without_text) == (5, 2)


def test_text_column_is_found() -> None:
    assert read_json('{"text": "a b", "title": "t"}') == ["a b"]
    assert read_json('{"body": "a b", "n": 1, "code": "12"}') == ["a b"]
    assert read_json('{"body": "a b", "title": "t"}', "title") == ["t"]
    assert read_csv("sentence,label\nNA,1\nb,2\n") == ["NA", "b"]
    assert read_parquet(pa.table({"n": [1], "body": ["a"]})) == ["a"]


@pytest.mark.parametrize("read", [read_json, read_csv, read_parquet])
def test_unclear_text_column_is_an_error(read: Any) -> None:
    data: Any = {
        read_json: '{"headline": "a", "category": "b"}',
        read_csv: "headline,category\na,b\n",
        read_parquet: pa.table({"headline": ["a"], "category": ["b"]}),
    }[read]
    with pytest.raises(InputError, match=r"a: cannot tell .* text_column .* headline, category"):
        read(data)
    with pytest.raises(InputError, match="a: has no column body; set text_column"):
        read(data, "body")
    assert read(data, "headline") == ["a"]


def test_named_column_may_come_after_many_rows() -> None:
    report = ReadReport("a")
    text = '{"id": 1}\n{}\n' * 20 + '{"id": 2, "body": "harbour"}\n'
    assert read_json(text, "body", report=report) == ["harbour"]
    assert (report.rows, report.rows_without_text) == (41, 40)


def test_column_that_comes_late_is_missing_text_before() -> None:
    report = ReadReport("a")
    assert read_json('{"n": 1}\n{"n": 2, "text": "here"}', report=report) == ["here"]
    assert report.rows_without_text == 1


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ('{"text": "a"}\n\n{"text":"old wall"\n{"text": "b"}', "line 3, column 19: not valid JSON"),
        ('{"text": "a"}\n{"text": 5}', "line 2: text is 5, which is not text"),
        ('{"text": "a"}\n{"text": [4]}', r"line 2: text is \[4\], which is not text"),
        ('{"text": "a"}\n[1]', r"line 2: \[1\] is not a JSON object"),
        ('{"text": "a"}\n' + "[" * 100_000, "line 2: not readable JSON"),
    ],
)
def test_bad_json_is_located(text: str, place: str) -> None:
    with pytest.raises(InputError, match=f"a, {place}"):
        read_json(text)


def test_json_array_is_decoded_item_by_item() -> None:
    item = json.dumps({"text": "harbour " * 1000})
    blocks_read = 0

    def blocks() -> Iterator[str]:
        nonlocal blocks_read
        yield "["
        for _ in range(5000):
            blocks_read += 1
            yield item + ",\n"
        yield item + "]"

    tracemalloc.start()
    rows = json_rows(blocks(), "a", True, ReadReport("a"))
    next(rows)
    assert blocks_read < 4
    assert sum(1 for _ in rows) == 5000
    assert tracemalloc.get_traced_memory()[1] < 50 * len(item)
    tracemalloc.stop()


@pytest.mark.parametrize(
    "broken", ['{"text": tru}', '{"text" "a"}', '{"a": 1 2}', '{"text": "a\\q"}', "7 8", "{]"]
)
def test_invalid_json_in_an_array_is_found_without_reading_on(broken: str) -> None:
    def blocks() -> Iterator[str]:
        yield "[" + broken + ', {"text": "the rest of the block"}, '
        raise AssertionError("read too far")

    with pytest.raises(
        InputError, match=r"a, line 1, column \d+: not valid JSON|a, item 1: 7 is not a JSON object"
    ):
        list(json_rows(blocks(), "a", True, ReadReport("a")))


@pytest.mark.parametrize("size", [1, 2, 7, 100])
def test_json_arrays_are_read_as_python_reads_them(size: int) -> None:
    items = [1.5e-7, -12, 'a]\\"b', "\ud83d 灯\n", [], [[{}, None]], {"a": [True, {"b": "}"}]}, float("inf")]
    texts = [json.dumps(items[:number], indent=indent) for number in range(9) for indent in (None, 2)]
    texts += [text[:cut] for text in texts[-2:] for cut in range(1, len(text))]
    texts += [f"{text} {end}" for text in texts[:6] for end in ("]", ",", "x", '"')]
    for text in texts:
        found: Any
        try:
            expected = repr(json.loads(text))
        except json.JSONDecodeError as error:
            expected = f"a, line {error.lineno}, column {error.colno}: not valid JSON: {error.msg}"
        try:
            blocks = (text[begin : begin + size] for begin in range(0, len(text), size))
            found = repr(list(array_items(blocks, "a")))
        except InputError as error:
            found = str(error)
        assert found == expected


def test_bad_json_array_is_located() -> None:
    with pytest.raises(InputError, match="a, line 2, column 10: not valid JSON"):
        read_json('[{"text": "a"},\n{"text": }]', array=True)


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("text,n\na,1\nlong, text,1\n", "line 3: 3 cells under 2 columns"),
        ('text,n\na,1\n"open,1\nb,2\n', "line 4: unexpected end of data in the row that begins in line 3"),
        (
            'text,n\n"a" b,1\n',
            "line 2: ',' expected after '\"'; in a quoted cell, write a double quote twice",
        ),
    ],
)
def test_bad_csv_is_located(text: str, place: str) -> None:
    with pytest.raises(InputError, match=f"a, {place}"):
        read_csv(text)


def test_rows_without_columns_are_an_error() -> None:
    for reader in (lambda: read_json("{}\n{}"), lambda: read_parquet(pa.table({}))):
        with pytest.raises(InputError, match=r"^a: has no columns$"):
            reader()


def test_open_quote_costs_one_row() -> None:
    report = ReadReport("a", skip_bad_rows=True)
    text = 'text,n\nfirst,1\n"open,1\n"of\ntwo",2\n"wrong" here,3\n"another,4\nlast,5\n'
    rows = list(csv_rows(iter([text]), "a", False, report))
    assert [(place, row["text"]) for place, row in rows] == [
        ("line 2", "first"),
        ("line 5", "of\ntwo"),
        ("line 8", "last"),
    ]
    assert report.bad_rows == 3
    assert report.first_bad_row.startswith(
        "a, line 4: ',' expected after '\"' in the row that begins in line 3"
    )


def test_memory_of_an_open_quote_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "MAX_QUOTED", 1000)
    lines_read = 0

    def blocks() -> Iterator[str]:
        nonlocal lines_read
        yield 'text,n\n"open,1\n'
        for _ in range(100_000):
            lines_read += 1
            yield "a row,2\n"

    with pytest.raises(
        InputError, match=r"a, line \d+: a quoted cell does not end within 1,00\d characters in the row"
    ):
        list(csv_rows(blocks(), "a", False))
    assert lines_read < 200
    rows = csv_rows(blocks(), "a", False, ReadReport("a", skip_bad_rows=True))
    assert [next(rows)[0] for _ in range(300)] == [f"line {number}" for number in range(3, 303)]
    assert lines_read < 600
    assert read_csv('text\n"' + "one line " * 1000 + '"\n') == ["one line " * 1000]


def test_open_quote_in_every_row_is_read_in_linear_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row closes the quote of the row before and opens another: only the end shows the mistake."""
    calls = 0

    class CountedLines(tables._RowLines):
        def __next__(self) -> str:
            nonlocal calls
            calls += 1
            return super().__next__()

    monkeypatch.setattr(tables, "_RowLines", CountedLines)
    text = "text,n\n" + 'aa","a,\na",,"\n' * 2000
    report = ReadReport("a", skip_bad_rows=True)
    assert len(list(csv_rows(iter([text]), "a", False, report))) + report.bad_rows >= 2000
    assert calls < 4001 * (tables.RETRIED_LINES + 3)


def test_blank_lines_before_the_header_are_passed_over() -> None:
    assert read_csv("\n \n\ntext;n\nfirst, then;1\n") == ["first, then"]
    assert read_csv("\n\ntext\tn\nfirst\t1\n", tabs=True) == ["first"]


def test_parquet_row_that_is_not_unicode_is_an_error() -> None:
    broken = pa.Array.from_buffers(
        pa.string(), 1, [None, pa.py_buffer(b"\0\0\0\0\1\0\0\0"), pa.py_buffer(b"\xe9")]
    )
    with pytest.raises(UnicodeDecodeError):
        read_parquet(pa.table({"text": broken}))


def test_half_a_surrogate_pair_is_replaced() -> None:
    assert read_json(r'{"text": "a \ud83d b \ud83d\ude00"}') == ["a ? b 😀"]


def test_long_cells_are_read() -> None:
    text = "word " * 100_000
    assert read_csv(f"text\n{text}\n") == [text]


def test_rows_are_read_as_they_are_drawn() -> None:
    def rows() -> Iterator[tuple[str, dict[str, Any]]]:
        yield from ((f"row {number}", {"text": "a"}) for number in range(1000))
        raise AssertionError("read too far")

    documents = row_documents(rows(), "a", None, ReadReport("a"))
    assert [next(documents) for _ in range(500)] == ["a"] * 500


def test_columns_of_one_name_are_told_apart() -> None:
    head = "id,text,text\n1,the harbour,the gull\n"
    with pytest.raises(
        InputError, match=r"which column holds the text; .* one of: text \(column 2\), text \(column 3\)"
    ):
        read_csv(head)
    with pytest.raises(InputError, match=r"a: has no column text; .*text \(column 2\)"):
        read_csv(head, "text")
    assert read_csv(head, "text (column 3)") == ["the gull"]
    assert read_csv("text,,\nthe harbour,,\n") == [
        "the harbour"
    ]  # commas at the end name nothing twice that counts
    twice = pa.Table.from_arrays([pa.array(["a b"]), pa.array(["c d"])], ["text", "text"])
    with pytest.raises(InputError, match="a: has 2 columns called text; rename all but one"):
        read_parquet(twice)


@pytest.mark.parametrize("value", [{"text": "a b"}, {"data": [{"text": "a b"}]}, [{"text": "a b"}]])
@pytest.mark.parametrize("indent", [1, 4])
def test_objects_over_several_lines_are_explained(value: Any, indent: int) -> None:
    text = json.dumps(value, indent=indent)
    with pytest.raises(InputError, match=r"a, line 1: a JSON value over several lines; .*jq -c"):
        read_json(text)
    if isinstance(value, list):
        assert read_json(text, array=True) == ["a b"]
    else:
        with pytest.raises(InputError, match="JSON value over several lines"):
            read_json(text + "\n" + text, array=True)


NESTED = [
    ({"doc": {"id": 1, "body": "the harbour"}}, "doc.body", "the harbour"),
    ({"n": 1, "meta": {"a": {"b": "far out"}}}, "meta.a.b", "far out"),
    ({"text": ["one part", "and another", ""]}, None, "one part\nand another"),
    ({"id": 7, "parts": ["one part", "and another"]}, None, "one part\nand another"),
    ({"messages": [{"role": "user", "content": "why"}, {"role": "bot", "content": "so"}]}, None, "why\nso"),
    ({"messages": [{"role": "user", "content": "why"}]}, "messages.content", "why"),
    ({"messages": [{"role": "u", "content": [{"type": "text", "text": "why not"}]}]}, None, "why not"),
    ({"doc.body": "as it is", "doc": {"body": "inner"}}, "doc.body", "as it is"),
    ({"turns": [{"say": "a b"}, {"say": "c d"}]}, "turns.say", "a b\nc d"),
]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize(("row", "column", "expected"), NESTED)
def test_nested_values_are_read(tmp_path, row, column, expected, kind):
    path = tmp_path / f"a.{kind}"
    if kind == "jsonl":
        path.write_text(json.dumps(row) + "\n")
    else:
        pq.write_table(pa.Table.from_pylist([row]), path)
    source = SourceConfig(str(path), text_column=column)
    assert list(read_documents(source, "auto")) == [expected]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_only_columns_that_can_be_text_are_offered_and_the_advice_works(tmp_path, kind):
    rows = [{"id": number, "doc": {"body": f"text {number} a", "title": "so so"}} for number in range(3)]
    path = tmp_path / f"my data.{kind}"
    if kind == "jsonl":
        path.write_text("\n".join(map(json.dumps, rows)))
    else:
        pq.write_table(pa.Table.from_pylist(rows), path)
    with pytest.raises(InputError) as caught:
        list(read_documents(SourceConfig(str(path)), "auto"))
    assert "one of: doc.body, doc.title; as in" in str(caught.value)
    _, value = shlex.split(str(caught.value).partition("as in ")[2])
    (source,) = CorpusConfig(sources=value).sources
    assert len(list(read_documents(source, "auto"))) == 3


def test_rows_without_text_are_told_by_reason(tmp_path):
    path = tmp_path / "a.jsonl"
    rows = [{"text": "a b"}, {"body": "x"}, {"text": None, "id": 1}, {"text": " "}, {"body": "y"}]
    path.write_text("\n".join(map(json.dumps, rows)))
    report = ReadReport("a.jsonl")
    assert list(read_documents(SourceConfig(str(path)), "auto", report)) == ["a b"]
    expected = "4 of 5 rows had no text (2 has no text, 1 text is null, 1 text is empty; the first: line 2"
    assert expected in report.summary()


def test_bytes_of_windows_are_called_so(tmp_path, caplog):
    path = tmp_path / "a.csv"
    path.write_bytes(b"text\n\x93caf\xe9\x94 tr\xe8s bon\n")
    with pytest.raises(InputError, match=r"if it is cp1252, give this source its encoding, encoding: cp1252"):
        list(read_documents(SourceConfig(str(path)), "auto"))
    assert list(read_documents(SourceConfig(str(path), encoding="cp1252"), "auto")) == ["“café” très bon"]
    list(read_documents(SourceConfig(str(path), encoding="latin-1"), "auto"))
    assert "is a control character in latin-1" in caplog.text
    path.write_bytes(b"text\ncaf\xe9\n")
    with pytest.raises(InputError, match="if it is latin-1"):
        list(read_documents(SourceConfig(str(path)), "auto"))
