"""Read one file as text: open, decompress, decode, split into lines and documents.

    path or URL --fsspec--> stored bytes --decompress--> content --decode--> blocks of text --> documents

- memory is bounded by the longest document; the format follows the name, the compression the content
- LF, CRLF and a lone CR end a line, nothing else does; a byte-order mark is dropped
"""

import bz2
import codecs
import gzip
import io
import logging
import lzma
import os
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain, count
from pathlib import PurePath
from typing import IO, Any

import pyarrow as pa

from mlm.config.data import HUB_PREFIX, DocumentRule
from mlm.config.errors import InputError

FORMATS = {
    **dict.fromkeys((".txt", ".text", ".md"), "text"),
    **dict.fromkeys((".jsonl", ".jsonlines", ".ndjson"), "jsonl"),
    **{f".{name}": name for name in ("json", "csv", "tsv", "parquet", "arrow")},
}
COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")  # may follow any suffix of FORMATS
SUFFIXES = f"{' '.join(FORMATS)}, each also with {' '.join(COMPRESSIONS)}"
HTTP = ("http://", "https://")

BLOCK_BYTES = 1 << 20  # decoded at a time; also how far `auto` looks for a blank line
WIDE_BYTES, WIDE_ZEROS = 4096, 8  # bytes searched for zeros in every second place; so many mean UTF-16
IS_TAR = "is a tar archive; unpack it with tar -xf, and give its folder"
TAR_MARK = slice(257, 262)  # where a tar archive says that it is one
MANY_LINES = 20  # from so many lines `auto` may report that they look wrapped

READ_ERRORS = (OSError, EOFError, zlib.error, lzma.LZMAError, pa.ArrowException, UnicodeError)
"""Errors of reading a truncated or corrupt file."""

log = logging.getLogger(__name__)


@dataclass
class ReadReport:
    """Counts of one source, filled while its documents are read."""

    name: str
    files: int = 0
    documents: int = 0
    blank_lines: int = 0
    rows: int = 0  # of tables and data sets, those without text included
    rows_without_text: int = 0
    without_text: Counter[str] = field(default_factory=Counter)  # the same by the reason
    first_without_text: str = ""
    rules: Counter[str] = field(default_factory=Counter)  # files by how they were split, and why
    lengths: Counter[int] = field(default_factory=Counter)  # documents by characters, in 7 binary digits
    skip_bad_rows: bool = False  # count and leave out rows that cannot be read; else the first is an error
    bad_rows: int = 0
    first_bad_row: str = ""
    replaced_bytes: int = 0  # not in the encoding, now U+FFFD
    wrong_length: int = 0  # documents that are too short or too long

    def add(self, document: str) -> None:
        """Count one document."""
        excess = max(len(document).bit_length() - 7, 0)
        self.documents += 1
        self.lengths[len(document) >> excess << excess] += 1

    def bad_row(self, problem: str) -> None:
        """Count a row that cannot be read, or raise the problem as InputError."""
        if not self.skip_bad_rows:
            raise InputError(problem)
        self.bad_rows += 1
        self.first_bad_row = self.first_bad_row or problem

    def median_length(self) -> int:
        """Return the median length of the documents in characters, to 1 %; 0 without documents."""
        seen = 0
        for length, number in sorted(self.lengths.items()):
            seen += number
            if 2 * seen >= self.documents:
                return length
        return 0

    def summary(self) -> str:
        """Return one line for the user: files, rule, documents, median length, and losses."""
        parts = [_counted(self.files, "file")] if self.files else []
        for rule, files in self.rules.most_common():
            parts.append(rule if len(self.rules) == 1 else f"{files:,} as {rule}")
        parts += [_counted(self.documents, "document"), f"median {self.median_length():,} characters"]
        return f"{short_name(self.name)}: {', '.join(parts)}{self.losses(', ')}"

    def losses(self, before: str) -> str:
        """Return the counts of everything read that did not become a document, after `before`; or nothing."""
        between = any(rule.startswith(("paragraph", "file")) for rule in self.rules)
        no_text = f"{self.rows_without_text:,} of {_counted(self.rows, 'row')} had no text"
        if self.first_without_text:
            reasons = ", ".join(f"{number:,} {why}" for why, number in self.without_text.most_common())
            no_text += f" ({reasons}; the first: {self.first_without_text})"
        bad = f"{_counted(self.bad_rows, 'bad row')} skipped (the first: {self.first_bad_row})"
        losses = (
            (self.rows_without_text, no_text),
            (self.bad_rows, bad),
            (self.blank_lines and not between, f"{_counted(self.blank_lines, 'blank line')} skipped"),
            (self.replaced_bytes, f"{_counted(self.replaced_bytes, 'byte')} replaced"),
            (self.wrong_length, f"{_counted(self.wrong_length, 'document')} left out for their length"),
        )
        parts = [text for count, text in losses if count]
        return before + ", ".join(parts) if parts else ""


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def short_name(path: str) -> str:
    """Return the name of a source in a line about it."""
    return path if "://" in path or path.startswith(HUB_PREFIX) else PurePath(path).name


def format_of(name: str) -> str | None:
    """Return the format of a file or URL of this name, None when unknown; without a suffix it is text."""
    if "://" in name:
        name = re.split(r"[?#]", name.partition("::")[0])[0].rpartition("/")[2]
    path = PurePath(name.lower())
    if path.suffix in COMPRESSIONS:
        path = path.with_suffix("")
    return FORMATS.get(path.suffix) if path.suffix else "text"


def one_line(error: BaseException) -> str:
    """Return the text of another library's exception as one short line."""
    if isinstance(error, FileNotFoundError) and not error.strerror:
        return "no such file"  # fsspec repeats the name
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return " ".join(str(text).split())[:300]


def file_system(name: str) -> tuple[Any, str]:
    """Return the fsspec file system of a path or URL, and the path in it."""
    from fsspec.core import url_to_fs
    from fsspec.implementations.local import LocalFileSystem

    if "://" not in name:
        return LocalFileSystem(), os.path.abspath(name)
    options: dict[str, Any] = {}
    if name.startswith(HTTP):
        from aiohttp import ClientTimeout

        # The default ends every download after five minutes.
        options["client_kwargs"] = {"timeout": ClientTimeout(total=None, sock_connect=10, sock_read=60)}
    files, path = url_to_fs(name, **options)
    return files, path


@contextmanager
def readable(name: str, errors: Any = READ_ERRORS) -> Iterator[None]:
    """Turn the errors of reading a file or URL into an InputError of one line."""
    try:
        yield
    except InputError:
        raise
    except errors as error:
        raise InputError(f"{name}: cannot be read: {one_line(error.__cause__ or error)}") from error


def open_file(name: str, progress: Callable[[int], None] = lambda num_bytes: None) -> io.BufferedReader:
    """Open a path or a URL of any protocol of fsspec; `progress` gets the bytes of each read, as stored."""
    with readable(name, Exception):  # each protocol has its own exceptions
        files, path = file_system(name)
        in_order = {"block_size": 0} if name.startswith(HTTP) else {}  # not every web server can seek
        return io.BufferedReader(StoredBytes(files.open(path, "rb", **in_order), progress), BLOCK_BYTES)


class StoredBytes(io.RawIOBase):
    """The stored bytes of a binary file, read from start to end; `progress` gets the bytes of each read."""

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
        except Exception as error:  # each protocol has its own exceptions
            raise OSError(one_line(error)) from error
        buffer[: len(data)] = data
        self._advance(len(data))
        return len(data)

    def close(self) -> None:
        """Close the file."""
        self._file.close()
        super().close()

    def seekable_file(self) -> IO[bytes] | None:
        """Return the file itself, at its start, for a reader that seeks; None if it cannot seek."""
        try:
            self._size = self._file.seek(0, io.SEEK_END)
            self._file.seek(0)
        except (OSError, ValueError):
            return None
        return self._file

    def reach(self, share: float) -> None:
        """Report the share of the file that such a reader has read so far."""
        self._advance(int(share * self._size) - self._done)

    def _advance(self, size: int) -> None:
        if size > 0:
            self._done += size
            self._progress(size)


def decompressed(stored: Any) -> Any:
    """Return a readable stream of the content of a buffered file; its name does not matter."""
    head = stored.peek(10)[:10]
    if head.startswith(b"\x1f\x8b"):
        return gzip.GzipFile(fileobj=stored)
    if head.startswith(b"BZh") and head[4:] in (b"1AY&SY", b"\x17rE8P\x90"):  # a first block, or none
        return bz2.BZ2File(stored)
    if head.startswith(b"\xfd7zXZ\0"):
        return lzma.LZMAFile(stored)
    if head.startswith(b"\x28\xb5\x2f\xfd"):
        return pa.CompressedInputStream(pa.PythonFile(stored, "r"), "zstd")
    return stored


def text_blocks(
    stored: Any,
    name: str,
    encoding: str,
    errors: str = "strict",
    report: ReadReport | None = None,
    advice: str = "give this source its encoding, encoding: {}",
) -> Iterator[str]:
    """Decompress and decode a buffered file block by block; in the blocks every line ends with LF.

    `report` counts the bytes replaced; if bad rows may be left out, bytes that are not in the encoding are
    decoded to lone surrogates, which `good_lines` detects. `errors` is strict or replace. `advice` says how
    to set another encoding, which replaces {}.
    """
    report = report or ReadReport(name)
    try:
        codec = codecs.lookup(encoding)
    except LookupError:
        raise InputError(f"{name}: encoding={encoding} is unknown; try utf-8, latin-1 or utf-16") from None
    assert codec.incrementaldecoder, "the configuration allows text encodings only"
    escape = errors == "replace" or report.skip_bad_rows
    decoder = codec.incrementaldecoder("surrogateescape" if escape else "strict")
    newlines, content = io.IncrementalNewlineDecoder(None, translate=True), decompressed(stored)
    position, line, at_start, warned = 0, 1, True, False
    while True:
        block = content.read(BLOCK_BYTES)
        if not position:
            _check_first(block, name, encoding, advice)
        try:
            text = decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            before, bad = error.object[: error.start], error.object[error.start]
            offset = position + len(block) - len(error.object) + error.start
            line += newlines.decode(before.decode(encoding, "replace"), final=True).count("\n")
            # Windows has letters where latin-1 has control characters.
            rest = error.object[error.start :]
            likely = "cp1252" if any(0x80 <= byte <= 0x9F for byte in rest) else "latin-1"
            problem = f"0x{bad:02x} is not valid {encoding}; if it is {likely}, {advice.format(likely)}"
            raise InputError(f"{name}, line {line}, byte {offset}: {problem}") from None
        if codec.name == "iso8859-1" and not warned and (found := _CONTROLS.search(text)):
            warned = True
            problem = f"{found[0]!r} is a control character in {encoding}; {advice.format('cp1252')}?"
            log.warning("%s: %s", name, problem)
        if errors == "replace" and not text.isascii():
            text, replaced = _UNDECODED.subn("\ufffd", text)
            report.replaced_bytes += replaced
        text = newlines.decode(text, final=not block)
        if at_start and text:
            text, at_start = text.removeprefix("\ufeff"), False
        if text:
            yield text
        if not block:
            return
        position += len(block)
        line += text.count("\n")


def _check_first(block: bytes, name: str, encoding: str, advice: str) -> None:
    """Refuse a file whose first block is that of a tar archive, or of another, wide encoding."""
    if block[TAR_MARK] == b"ustar":
        raise InputError(f"{name}: {IS_TAR}")
    wide = _wide_encoding(block)
    if wide and not codecs.lookup(encoding).name.startswith(("utf-16", "utf-32")):
        problem = f"this is {wide} and not {encoding}; {advice.format(wide)}"
        raise InputError(f"{name}, line 1, byte 0: {problem}")


def _wide_encoding(block: bytes) -> str | None:
    """Return the likely UTF-16 or UTF-32 encoding of a text, from its byte-order mark or its zeros."""
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
_CONTROLS = re.compile("[\x80-\x84\x86-\x9f]")


def good_lines(blocks: Iterable[str], name: str, report: ReadReport) -> Iterator[str]:
    """Return the lines as `split_lines` does; a bad row that is not in the encoding becomes a blank line."""
    lines = split_lines(blocks)
    if not report.skip_bad_rows:
        return lines

    def checked(number: int, line: str) -> str:
        if not line.isascii() and (found := _UNDECODED.search(line)):
            report.bad_row(f"{name}, line {number}: 0x{ord(found[0]) - 0xDC00:02x} is not in the encoding")
            return ""
        return line

    return map(checked, count(1), lines)


def split_lines(blocks: Iterable[str]) -> Iterator[str]:
    """Yield the lines of a text given in blocks, without their line ends."""
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
    """Yield the documents of a plain text; `report` counts blank lines and the rule chosen.

    Rules: `paragraph`: the lines between blank lines, joined with a space; `line`: each line that is not
    blank; `file`: the whole text, paragraphs joined with a line break; `auto`: one of the first two.
    """
    why = ""
    if rule == "auto":
        head = next(blocks, "")
        blocks = chain([head], blocks)
        rule, why = _choose_rule(head)
    report.rules[rule + why] += 1
    documents = _join_lines(good_lines(blocks, name, report), rule == "line", report)
    if rule != "file":
        yield from documents
    elif text := "\n".join(documents):
        yield text


def _choose_rule(head: str) -> tuple[DocumentRule, str]:
    lines = [line.strip() for line in head.split("\n")]
    filled = [number for number, line in enumerate(lines) if line]
    if filled and filled[-1] - filled[0] >= len(filled):
        return "paragraph", " (blank lines found)"
    begin_small = sum(lines[number][0].islower() for number in filled)
    if len(filled) >= MANY_LINES and begin_small > len(filled) / 3:
        return "line", " (no blank lines, but the lines look wrapped: consider document=file)"
    return "line", " (no blank lines)"


def _join_lines(lines: Iterator[str], single: bool, report: ReadReport) -> Iterator[str]:
    """Yield every line that is not blank, or the lines between blank ones joined with a space."""
    wrapped: list[str] = []
    for text in map(str.strip, lines):
        if text and single:
            yield text
        elif text:
            wrapped.append(text)
        else:
            report.blank_lines += 1
            if wrapped:
                yield " ".join(wrapped)
                wrapped = []
    if wrapped:
        yield " ".join(wrapped)
