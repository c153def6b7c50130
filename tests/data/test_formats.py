from __future__ import annotations

import bz2
import gzip
import io
import lzma
import statistics
import tarfile
from collections.abc import Callable, Iterator

import pyarrow as pa
import pytest

from mlm.config.data import DocumentRule, SourceConfig
from mlm.config.errors import InputError
from mlm.data.formats import (
    BLOCK_BYTES,
    ReadReport,
    StoredBytes,
    cut_text,
    decompressed,
    format_of,
    split_lines,
    text_blocks,
)
from mlm.data.sources import read_documents

TEXT = "first line\nsecond line\n\nanother\nparagraph\n"


def zstd(data: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(data)
    return sink.getvalue().to_pybytes()


COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "zst": zstd,
}


def decode(data: bytes, encoding: str = "utf-8") -> str:
    return "".join(text_blocks(io.BufferedReader(io.BytesIO(data)), "a.txt", encoding))


def cut(text: str, rule: DocumentRule, report: ReadReport | None = None) -> list[str]:
    return list(cut_text(iter([text]), rule, report or ReadReport("a.txt")))


@pytest.mark.parametrize("name", COMPRESS)
@pytest.mark.parametrize("data", [b"", b"x", TEXT.encode() * 100_000])
def test_every_compression_is_undone(name: str, data: bytes) -> None:
    read: list[int] = []
    packed = COMPRESS[name](data)
    stored = io.BufferedReader(StoredBytes(io.BytesIO(packed), read.append))
    assert decompressed(stored).read() == data
    assert sum(read) == len(packed)


@pytest.mark.parametrize("data", [b"", b"BZh is no archive", b"\x1f"])
def test_plain_bytes_stay_as_they_are(data: bytes) -> None:
    stored = io.BufferedReader(StoredBytes(io.BytesIO(data), lambda size: None))
    assert decompressed(stored).read() == data


@pytest.mark.parametrize("pad", range(4))
@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "latin-1"])
def test_decoding_equals_python_across_block_borders(encoding: str, pad: int) -> None:
    text = "x" * (BLOCK_BYTES - 3 - pad) + "é\r\nü\rß\n" * 5
    data = text.encode(encoding)
    oracle = io.TextIOWrapper(io.BytesIO(data), encoding=encoding, newline=None).read()
    assert decode(data, encoding) == oracle


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_line_ends_do_not_matter(end: str) -> None:
    data = TEXT.replace("\n", end).encode()
    assert decode(data) == TEXT


def test_only_line_ends_end_lines() -> None:
    text = "a\u2028b\x0bc\x0cd\x1ce\x85f\x00g"
    assert list(split_lines([decode(text.encode())])) == [text]


def test_byte_order_mark_is_dropped() -> None:
    assert decode(b"\xef\xbb\xbfharbour") == "harbour"
    assert decode("harbour".encode("utf-16"), "utf-16") == "harbour"


@pytest.mark.parametrize(("before", "line"), [(b"", 1), (b"ok\ncaf", 2), (b"a\rb\r\n\xc3\xa9\r", 4)])
def test_undecodable_byte_is_located(before: bytes, line: int) -> None:
    with pytest.raises(
        InputError, match=rf"a\.txt, line {line}, byte {len(before)}: 0xe9 .*encoding: latin-1"
    ):
        decode(before + b"\xe9 wall\nend")


@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_undecodable_byte_is_located_in_a_later_block(extra: int) -> None:
    before = b"ab\r" * ((2 * BLOCK_BYTES) // 3) + b"c" * (2 + extra)
    line = before.count(b"\r") + 1
    with pytest.raises(InputError, match=rf"line {line}, byte {len(before)}:"):
        decode(before + b"\xe9 wall")


@pytest.mark.parametrize(
    "text", ["the harbour\n" * 3, "le café du port\n" * 3000, "漁港 の 灯台 と 船\n" * 20]
)
@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
def test_two_bytes_a_character_are_noticed(encoding: str, text: str) -> None:
    data = text.encode(encoding)
    if encoding == "utf-16-le" and not text.isascii() and text[0] == "漁":
        return  # too few zeros to be sure of
    for other in ("utf-8", "latin-1"):
        with pytest.raises(
            InputError,
            match=rf"a\.txt, line 1, byte 0: this is {encoding} and not {other}.*encoding: {encoding}",
        ):
            decode(data, other)
    assert decode(data, encoding) == text


@pytest.mark.parametrize(
    "data", [b"a\0b", b"a\0b\n" * 3, b"\0" * 500, b"x\0\0y" * 20, b"plain " * 100 + b"\0"]
)
def test_zeros_alone_are_no_encoding(data: bytes) -> None:
    assert decode(data) == data.decode()


def test_unknown_encoding_is_refused() -> None:
    with pytest.raises(InputError, match="encoding=klingon is unknown"):
        decode(b"x", "klingon")


@pytest.mark.parametrize("size", [1, 2, 3, 1000])
def test_lines_do_not_depend_on_blocks(size: int) -> None:
    text = "one\n\ntwo three\n\n\nfour"
    blocks = [text[i : i + size] for i in range(0, len(text), size)]
    assert list(split_lines(blocks)) == text.split("\n")


def test_rules_cut_text() -> None:
    assert cut(TEXT, "line") == ["first line", "second line", "another", "paragraph"]
    assert cut(TEXT, "paragraph") == ["first line second line", "another paragraph"]
    assert cut(TEXT, "file") == ["first line second line\nanother paragraph"]
    assert cut(TEXT, "auto") == cut(TEXT, "paragraph")
    assert cut("one\ntwo\n", "auto") == ["one", "two"]


def test_wrapped_lines_keep_hyphens_and_inner_spaces() -> None:
    assert cut("a well-\n  known  thing \n", "paragraph") == ["a well- known  thing"]


@pytest.mark.parametrize("blank", ["", "   ", "\t"])
@pytest.mark.parametrize("rule", ["line", "paragraph", "auto"])
def test_blank_lines_make_no_documents(rule: DocumentRule, blank: str) -> None:
    report = ReadReport("a.txt")
    lines = [blank, blank, "quiet harbour", blank, "old wall", blank, blank, "two boats", blank]
    assert cut("\n".join(lines) + "\n", rule, report) == ["quiet harbour", "old wall", "two boats"]
    assert report.blank_lines == 6


@pytest.mark.parametrize("text", ["", "\n\n", " \n\t\n"])
@pytest.mark.parametrize("rule", ["line", "paragraph", "file", "auto"])
def test_text_without_words_has_no_document(rule: DocumentRule, text: str) -> None:
    assert cut(text, rule) == []


def test_blank_lines_around_the_text_do_not_make_paragraphs() -> None:
    report = ReadReport("a.txt")
    assert cut("\n\none\ntwo\n\n\n", "auto", report) == ["one", "two"]
    assert list(report.rules) == ["line (no blank lines)"]


def test_wrapped_text_without_blank_lines_is_noticed() -> None:
    report = ReadReport("a.txt")
    cut("It was late\nand the boats were in\n" * 20, "auto", report)
    assert "consider document=file" in report.summary()


def test_documents_are_yielded_before_the_text_ends() -> None:
    def blocks() -> Iterator[str]:
        yield "one\n\ntwo\n\nthree"
        raise AssertionError("read too far")

    documents = cut_text(blocks(), "auto", ReadReport("a.txt"))
    assert [next(documents), next(documents)] == ["one", "two"]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("a.TXT", "text"),
        ("a.b.text.gz", "text"),
        ("a.md", "text"),
        ("corpus", "text"),
        ("plain.gz", "text"),
        ("a.ndjson", "jsonl"),
        ("a.JSONL.ZST", "jsonl"),
        ("a.jsonlines", "jsonl"),
        ("a.json", "json"),
        ("a.csv.bz2", "csv"),
        ("a.tsv.xz", "tsv"),
        ("a.parquet", "parquet"),
        ("a.data", None),
        ("a.pdf.gz", None),
    ],
)
def test_format_follows_the_name(name: str, kind: str | None) -> None:
    assert format_of(name) == kind


def test_report_median_is_exact_to_one_percent() -> None:
    lengths = [int(1.3**power) for power in range(1, 45)]
    report = ReadReport("books")
    for length in lengths:
        report.add("x" * length)
    median = statistics.median_low(lengths)
    assert median * 0.98 <= report.median_length() <= median
    assert len(report.lengths) <= len(lengths)


def test_report_summary() -> None:
    report = ReadReport("shelf/british_fiction", files=15)
    report.rules["paragraph (blank lines found)"] = 15
    report.documents = report.lengths[310] = 31204
    assert report.summary() == (
        "british_fiction: 15 files, paragraph (blank lines found), 31,204 documents, median 310 characters"
    )
    report = ReadReport("x.jsonl", files=2, documents=1, rows=5, rows_without_text=4, blank_lines=1)
    report.rules.update({"rows (column text)": 1, "line": 1})
    assert report.summary() == (
        "x.jsonl: 2 files, 1 as rows (column text), 1 as line, 1 document, median 0 characters, "
        "4 of 5 rows had no text, 1 blank line skipped"
    )


@pytest.mark.parametrize("suffix", ["txt", "txt.gz", "jsonl", "tar", "tar.gz", "tgz"])
def test_a_tar_archive_is_called_one(tmp_path, suffix):
    (tmp_path / "a.txt").write_text("the harbour")
    path = tmp_path / f"b.{suffix}"
    with tarfile.open(path, "w:gz" if suffix.endswith("gz") else "w") as archive:
        archive.add(tmp_path / "a.txt", "a.txt")
    with pytest.raises(InputError, match="is a tar archive; unpack it with tar -xf"):
        list(read_documents(SourceConfig(str(path)), "auto"))
