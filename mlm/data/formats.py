"""One file as text: which format, decompressed, decoded, cut into documents.

    stored bytes --magic bytes--> content --encoding--> blocks of text --> lines --> documents

- memory is bounded by the longest document, whatever the size of the file
- the format follows the name (`FORMATS`, any case), the compression the content, since names lie about it
- plain text is cut by a rule; files of rows are the subject of `tables.py`
- line ends are LF, CRLF and a lone CR, nothing else; a byte-order mark is dropped
"""

from __future__ import annotations

import bz2
import codecs
import gzip
import io
import lzma
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import PurePath
from typing import IO, Any

import pyarrow as pa

from mlm.config.data import HUB_PREFIX, DocumentRule
from mlm.config.errors import InputError

FORMATS = {
    ".txt": "text",
    ".text": "text",
    ".md": "text",
    ".jsonl": "jsonl",
    ".jsonlines": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
"""Format of each known suffix; any of them may be followed by one of `COMPRESSIONS`."""
COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")

BLOCK_BYTES = 1 << 20
"""Bytes decoded at a time; also how far `auto` looks for a blank line."""
WIDE_BYTES, WIDE_ZEROS = 4096, 8
"""So far is looked for zeros in every second place, and so many of them say that the text is UTF-16."""
MANY_LINES = 20
"""From this many lines on, `auto` dares to say that they look wrapped."""

READ_ERRORS = (OSError, EOFError, zlib.error, lzma.LZMAError, pa.ArrowException, UnicodeError)
"""What reading a truncated or corrupt file raises."""


@dataclass
class ReadReport:
    """What was read from one source; filled while the documents are drawn."""

    name: str
    """The source's path."""
    files: int = 0
    documents: int = 0
    bytes_read: int = 0
    """Bytes of the files as they are stored, compressed ones included."""
    blank_lines: int = 0
    rows: int = 0
    """Rows of jsonl, csv, parquet and hub sources, those without text included."""
    rows_without_text: int = 0
    rules: Counter[str] = field(default_factory=Counter)
    """How the files were cut, and why: number of files of each kind."""
    lengths: Counter[int] = field(default_factory=Counter)
    """Documents by length in characters, kept to 7 binary digits: bounded in memory, exact to 1 %."""
    skip_bad_rows: bool = False
    """Whether rows that cannot be read are counted and left out; else the first one is an error."""
    bad_rows: int = 0
    first_bad_row: str = ""
    """What is wrong with the first of them, and where."""
    replaced_bytes: int = 0
    """Bytes that were not in the encoding and became U+FFFD."""
    wrong_length: int = 0
    """Documents left out because they are too short or too long."""

    def add(self, document: str) -> None:
        """Count one document."""
        length = len(document)
        excess = length.bit_length() - 7
        if excess > 0:
            length = length >> excess << excess
        self.documents += 1
        self.lengths[length] += 1

    def bad_row(self, problem: str) -> None:
        """Count a row that cannot be read.

        Raises:
            InputError: such rows may not be left out; the error is the problem.
        """
        if not self.skip_bad_rows:
            raise InputError(problem)
        self.bad_rows += 1
        self.first_bad_row = self.first_bad_row or problem

    def median_length(self) -> int:
        """Return the median length of the documents in characters; 0 without documents."""
        seen = 0
        for length, number in sorted(self.lengths.items()):
            seen += number
            if 2 * seen >= self.documents:
                return length
        return 0

    def summary(self) -> str:
        """Return one line for the user: files, rule, documents, median length, and what was left out."""
        parts = [_counted(self.files, "file")] if self.files else []
        for rule, files in self.rules.most_common():
            parts.append(rule if len(self.rules) == 1 else f"{files:,} as {rule}")
        parts += [_counted(self.documents, "document"), f"median {self.median_length():,} characters"]
        return f"{short_name(self.name)}: {', '.join(parts)}{self.losses(', ')}"

    def losses(self, before: str) -> str:
        """Return what was read and is no document, or nothing."""
        parts = []
        if self.rows_without_text:
            parts.append(f"{self.rows_without_text:,} of {_counted(self.rows, 'row')} had no text")
        if self.bad_rows:
            parts.append(f"{_counted(self.bad_rows, 'bad row')} skipped (the first: {self.first_bad_row})")
        if self.blank_lines and not any(rule.startswith(("paragraph", "file")) for rule in self.rules):
            parts.append(f"{_counted(self.blank_lines, 'blank line')} skipped")
        if self.replaced_bytes:
            parts.append(f"{_counted(self.replaced_bytes, 'byte')} replaced")
        if self.wrong_length:
            parts.append(f"{_counted(self.wrong_length, 'document')} left out for their length")
        return before + ", ".join(parts) if parts else ""


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def short_name(path: str) -> str:
    """Return what a source is called in a line about it."""
    return path if "://" in path or path.startswith(HUB_PREFIX) else PurePath(path).name


def format_of(name: str) -> str | None:
    """Return the format of a file of this name, None when unknown; without a suffix it is text."""
    path = PurePath(name.lower())
    if path.suffix in COMPRESSIONS:
        path = path.with_suffix("")
    return FORMATS.get(path.suffix) if path.suffix else "text"


def supported_suffixes() -> str:
    """Return the known suffixes for an error message."""
    return f"{' '.join(FORMATS)}, each also with {' '.join(COMPRESSIONS)}"


def one_line(error: BaseException) -> str:
    """Return the text of a foreign exception as one short line."""
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return " ".join(str(text).split())[:300]


class StoredBytes(io.RawIOBase):
    """The stored bytes of a file, read from start to end, with progress.

    Args:
        file: an open binary file; only `read` is used.
        progress: called with the number of bytes after each read.
    """

    def __init__(self, file: IO[bytes], progress: Callable[[int], None]):
        self._file, self._progress = file, progress
        self._done = self._size = 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer and return the bytes read."""
        try:
            data = self._file.read(len(buffer))
        except Exception as error:  # network file systems raise what they like
            raise OSError(one_line(error)) from error
        buffer[: len(data)] = data
        self._advance(len(data))
        return len(data)

    def seekable_file(self) -> IO[bytes] | None:
        """Return the file itself, at its start, for a reader that jumps about; None where it cannot jump."""
        try:
            self._size = self._file.seek(0, io.SEEK_END)
            self._file.seek(0)
        except (OSError, ValueError):
            return None
        return self._file

    def reach(self, share: float) -> None:
        """Report that such a reader has got so far."""
        self._advance(int(share * self._size) - self._done)

    def _advance(self, size: int) -> None:
        if size > 0:
            self._done += size
            self._progress(size)


def decompressed(stored: Any) -> Any:
    """Return a readable stream of the content of a buffered file, whatever the file is called."""
    head = stored.peek(10)[:10]
    if head.startswith(b"\x1f\x8b"):
        return gzip.GzipFile(fileobj=stored)
    if head.startswith(b"BZh") and head[4:] in (
        b"1AY&SY",
        b"\x17rE8P\x90",
    ):  # a block, or the end of no block
        return bz2.BZ2File(stored)
    if head.startswith(b"\xfd7zXZ\0"):
        return lzma.LZMAFile(stored)
    if head.startswith(b"\x28\xb5\x2f\xfd"):
        return pa.CompressedInputStream(pa.PythonFile(stored, "r"), "zstd")
    return stored


def text_blocks(
    stream: Any,
    name: str,
    encoding: str,
    errors: str = "strict",
    report: ReadReport | None = None,
    advice: str = "give this source its encoding, encoding: {}",
) -> Iterator[str]:
    """Decode a stream block by block; in what is yielded every line ends with LF.

    Args:
        stream: the content.
        name: what it is called in errors.
        encoding: its encoding.
        errors: strict or replace.
        report: counts the bytes replaced; where bad rows may be left out, bytes that are not in the encoding
            come as half surrogate pairs, for `good_lines` to see.
        advice: how to say that it has another encoding, which is put in for {}.

    Raises:
        InputError: the encoding is unknown, or the bytes are not in it.
    """
    report = report or ReadReport(name)
    escape = errors == "replace" or report.skip_bad_rows
    try:
        decoder = codecs.getincrementaldecoder(encoding)("surrogateescape" if escape else "strict")
    except LookupError:
        raise InputError(
            f"{name}: encoding={encoding} is unknown; try utf-8, latin-1, cp1252 or utf-16"
        ) from None
    codec = codecs.lookup(encoding).name
    newlines = io.IncrementalNewlineDecoder(None, translate=True)
    position, line, at_start = 0, 1, True
    while True:
        block = stream.read(BLOCK_BYTES)
        if not position and (wide := _wide_encoding(block)) and not codec.startswith(("utf-16", "utf-32")):
            raise InputError(
                f"{name}, line 1, byte 0: this is {wide} and not {encoding}; {advice.format(wide)}"
            )
        try:
            decoded = decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            before, bad = error.object[: error.start], error.object[error.start]
            offset = position + len(block) - len(error.object) + error.start
            line += newlines.decode(before.decode(encoding, "replace"), final=True).count("\n")
            raise InputError(
                f"{name}, line {line}, byte {offset}: 0x{bad:02x} is not valid {encoding}; "
                f"if it is latin-1, {advice.format('latin-1')}"
            ) from None
        if errors == "replace" and not decoded.isascii():
            decoded, replaced = _UNDECODED.subn("\ufffd", decoded)
            report.replaced_bytes += replaced
        text = newlines.decode(decoded, final=not block)
        if at_start and text:
            text, at_start = text.removeprefix("\ufeff"), False
        if text:
            yield text
        if not block:
            return
        position += len(block)
        line += text.count("\n")


def _wide_encoding(block: bytes) -> str | None:
    """Return the encoding of two or four bytes a character that a text seems to be in, by mark or zeros."""
    head = block[:WIDE_BYTES]
    if head.startswith((codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)):
        return "utf-32"
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    even, odd = head[::2].count(0), head[1::2].count(0)
    if max(even, odd) >= max(WIDE_ZEROS, len(head) / 16) and min(even, odd) <= max(even, odd) / 50:
        return "utf-16-le" if odd > even else "utf-16-be"
    return None


_UNDECODED = re.compile("[\udc80-\udcff]")


def good_lines(blocks: Iterable[str], name: str, report: ReadReport) -> Iterator[str]:
    """Yield the lines of a text as `split_lines` does, a blank one for each that is not in the encoding."""
    if not report.skip_bad_rows:
        yield from split_lines(blocks)
        return
    for number, line in enumerate(split_lines(blocks), 1):
        if not line.isascii() and (found := _UNDECODED.search(line)):
            report.bad_row(f"{name}, line {number}: 0x{ord(found[0]) - 0xDC00:02x} is not in the encoding")
            line = ""
        yield line


def split_lines(blocks: Iterable[str]) -> Iterator[str]:
    """Yield the lines of a text that comes in blocks, without their line ends."""
    rest = ""
    for block in blocks:
        first, *others = block.split("\n")
        rest += first  # in place, so that a line of many blocks costs no more than its length
        if others:
            yield rest
            rest = others.pop()
            yield from others
    if rest:
        yield rest


def cut_text(blocks: Iterator[str], rule: DocumentRule, report: ReadReport, name: str = "") -> Iterator[str]:
    """Yield the documents of a plain text.

    Args:
        blocks: the text.
        rule: `paragraph`: what blank lines enclose, its lines joined with a space; `line`: each line that is
            not blank; `file`: all of it, paragraphs joined with a line break; `auto`: one of the first two.
        report: counts blank lines and the rule taken.
        name: what the text is called in errors.
    """
    why = ""
    if rule == "auto":
        head = next(blocks, "")
        blocks = chain([head], blocks)
        rule, why = _choose_rule(head)
    report.rules[rule + why] += 1
    lines = good_lines(blocks, name, report)
    if rule == "line":
        yield from _filled_lines(lines, report)
    elif rule == "paragraph":
        yield from _paragraphs(lines, report)
    elif text := "\n".join(_paragraphs(lines, report)):
        yield text


def _choose_rule(head: str) -> tuple[DocumentRule, str]:
    """Return the rule for a text that begins with `head`, and the reason."""
    lines = [line.strip() for line in head.split("\n")]
    filled = [number for number, line in enumerate(lines) if line]
    if filled and filled[-1] - filled[0] >= len(filled):
        return "paragraph", " (blank lines found)"
    begin_small = sum(lines[number][0].islower() for number in filled)
    if len(filled) >= MANY_LINES and begin_small > len(filled) / 3:
        return "line", " (no blank lines, but the lines look wrapped: consider document=file)"
    return "line", " (no blank lines)"


def _filled_lines(lines: Iterator[str], report: ReadReport) -> Iterator[str]:
    for line in lines:
        text = line.strip()
        if text:
            yield text
        else:
            report.blank_lines += 1


def _paragraphs(lines: Iterator[str], report: ReadReport) -> Iterator[str]:
    wrapped: list[str] = []
    for line in lines:
        text = line.strip()
        if text:
            wrapped.append(text)
            continue
        report.blank_lines += 1
        if wrapped:
            yield " ".join(wrapped)
            wrapped = []
    if wrapped:
        yield " ".join(wrapped)
