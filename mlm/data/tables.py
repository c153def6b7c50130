"""Read files of rows: JSON lines, JSON arrays, CSV, TSV, parquet and Arrow; a row is a document.

- one reader serves pretraining, which wants one column, and labelled tables, which want all
- every cell of a text file is text: `NA` is a word, never a missing value
- a row that cannot be read, or whose cell is not text, is an error, or counted if the user allows bad rows
"""

import csv
import io
import json
import re
import shutil
import tempfile
from collections import Counter, deque
from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import Any, Self, cast

import pyarrow as pa
import pyarrow.parquet as pq

from mlm.config.errors import InputError
from mlm.data.formats import BLOCK_BYTES, ReadReport, StoredBytes, decompressed, good_lines, one_line

ARROW_FORMATS = ("parquet", "arrow")  # their columns have types; all other tables are text
HEAD_ROWS = 32  # rows searched for the column that holds the text
PARQUET_BYTES = 1 << 24  # about the bytes of a parquet file decoded at a time
MAX_QUOTED = 1 << 24  # characters of a CSV row of several lines beyond which its quote counts as unclosed
RETRIED_LINES = 100  # the same in lines after an unclosed quote: else an open quote in each row is quadratic
ARROW_FILE = b"ARROW1\0\0"
TAIL = 32  # characters at the end of a block that may belong to an incomplete JSON number or word

Row = tuple[str, dict[str, Any]]  # place of a row ("line 3"), and its cells
Choose = Callable[[pa.Schema], list[str] | None]  # the columns of a file to read; None: all


def row_documents(
    rows: Iterator[Row], name: str, column: str | None, report: ReadReport, open_ended: bool = False
) -> Iterator[str]:
    """Yield the text of each row that has one.

    The text is in `column`, else in a column called text, else in the only one that holds words. With
    `open_ended` later rows may have further columns, as in JSON.
    """
    head = list(islice(rows, HEAD_ROWS))
    if not head:
        return
    columns = list(dict.fromkeys(key for _, row in head for key in row))
    worded = [key for key in columns if any(_is_words(row.get(key)) for _, row in head)]
    wanted, found = column, not open_ended
    if column is None or not open_ended:
        column = _choose_column(name, columns, worded, column)
    report.rules[f"rows (column {column})"] += 1
    for place, row in chain(head, rows):
        found = found or column in row
        text = _cell_text(row.get(column), name, place, column, report)
        if text is not None:
            yield text
    if not found:
        _choose_column(name, columns, worded, wanted)


def _choose_column(name: str, columns: list[str], worded: list[str], column: str | None) -> str:
    if not columns:
        raise InputError(f"{name}: has no columns")
    if column is None:
        column = "text" if "text" in columns else worded[0] if len(worded) == 1 else None
    number = columns.count(str(column))
    if number > 1:
        raise InputError(f"{name}: has {number} columns called {column}; rename all but one")
    if column in columns:
        return column
    wanted = f"has no column {column}" if column else "cannot tell which column holds the text"
    choices = ", ".join(_shortened(str(choice)) for choice in columns[:20])
    example = f"--data.sources '{{path: {name}, text_column: {_shortened(str(columns[0]))}}}'"
    raise InputError(
        f"{name}: {wanted}; set text_column of this source to one of: {choices}; as in {example}"
    )


def _is_words(value: Any) -> bool:
    """Return whether a value is text, and not a number written as text."""
    if not isinstance(value, str) or not value.strip():
        return False
    try:
        float(value)
    except ValueError:
        return True
    return value.strip().lower() in ("nan", "inf", "infinity")


def _cell_text(value: Any, name: str, place: str, column: str | None, report: ReadReport) -> str | None:
    """Return the text of a cell; None if it has none, or is counted as a bad row."""
    report.rows += 1
    if isinstance(value, str) and value.strip():
        # JSON can spell a lone surrogate, which no encoding can store.
        return value if value.isascii() else value.encode("utf-8", "replace").decode("utf-8")
    if value is None or isinstance(value, str):
        report.rows_without_text += 1
    else:
        report.bad_row(f"{name}, {place}: {column} is {_shortened(repr(value))}, which is not text")
    return None


def _shortened(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."


def text_rows(blocks: Iterator[str], kind: str, name: str, report: ReadReport) -> Iterator[Row]:
    """Yield the rows of a text in the format `kind`: jsonl, json, csv or tsv."""
    if kind in ("csv", "tsv"):
        return csv_rows(blocks, name, kind == "tsv", report)
    return json_rows(blocks, name, kind == "json", report)


# ------------------------------------------------------------------------------------------------- JSON


def json_rows(blocks: Iterator[str], name: str, array_allowed: bool, report: ReadReport) -> Iterator[Row]:
    """Yield the objects of a JSON-lines file, or of a file that is one array; a string is its own text."""
    first = next(blocks, "")
    blocks = chain([first], blocks)
    values: Iterator[tuple[str, Any]] = _json_lines(blocks, name, report)
    if array_allowed and first.lstrip().startswith("["):
        values = ((f"item {number}", item) for number, item in enumerate(array_items(blocks, name), 1))
    for place, value in values:
        if isinstance(value, str):
            yield place, {"text": value}
        elif isinstance(value, dict):
            yield place, value
        else:
            report.bad_row(f"{name}, {place}: {_shortened(repr(value))} is not a JSON object")


def _json_lines(blocks: Iterator[str], name: str, report: ReadReport) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(good_lines(blocks, name, report), 1):
        if not line.strip():
            report.blank_lines += 1
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            problem = _json_problem(error, name, number)
            if number == 1 and line.rstrip().endswith(("{", "[", ",")):
                problem = f"{name}, line 1: a JSON value over several lines; write one object a line "
                problem += "(`jq -c . FILE > NEW.jsonl`), or a .json file that is one array of objects"
            report.bad_row(problem)
            continue
        yield f"line {number}", value


def _json_problem(error: Exception, name: str, line: int, column: int = 0) -> str:
    """Return place and cause of an error in a text that begins after `column` characters of `line`."""
    if not isinstance(error, json.JSONDecodeError):  # a number of thousands of digits, brackets as deep
        return f"{name}, line {line}: not readable JSON: {one_line(error)}"
    column = error.colno + (column if error.lineno == 1 else 0)
    return f"{name}, line {line + error.lineno - 1}, column {column}: not valid JSON: {error.msg}"


def array_items(blocks: Iterator[str], name: str) -> Iterator[Any]:
    """Yield the items of a text that is one JSON array; memory is bounded by the longest item."""
    text = _JsonText(blocks, name)
    text.skip("[")
    if not text.skip("]"):
        yield text.value()
        while text.skip(","):
            yield text.value()
        if not text.skip("]"):
            raise text.error("Expecting ',' delimiter", text.at)
    if text.next():
        raise text.error("Extra data", text.at)


class _JsonText:
    """A JSON text given in blocks, of which only the part not yet decoded is kept."""

    def __init__(self, blocks: Iterator[str], name: str):
        self.blocks, self.name = blocks, name
        self.text, self.at = "", 0
        self.line, self.column = 1, 0  # place of the kept text in the file
        self.decode = json.JSONDecoder().raw_decode

    def next(self) -> str:
        """Move to the next character that is not white space and return it; empty at the end."""
        while True:
            found = re.compile(r"[^ \t\n\r]").search(self.text, self.at)
            self.at = found.start() if found else len(self.text)
            if found or not self.read():
                return found[0] if found else ""

    def skip(self, character: str) -> bool:
        """Skip the next character that is not white space if it is this one; return whether it was."""
        found = self.next() == character
        self.at += found
        return found

    def value(self) -> Any:
        """Decode the next value."""
        self.next()
        while True:
            try:
                value, end = self.decode(self.text, self.at)
            except json.JSONDecodeError as error:
                if not self.may_be_cut(error.pos) or not self.read():
                    raise self.error(error.msg, error.pos) from None
            except (ValueError, RecursionError) as error:
                raise InputError(_json_problem(error, self.name, self.line)) from None
            else:
                if end + TAIL <= len(self.text) or not self.read():
                    self.at = end
                    return value

    def may_be_cut(self, position: int) -> bool:
        """Return whether more text may cure an error: it is near the end, or at a string without an end."""
        if position + TAIL > len(self.text) or self.text[position] != '"':
            return position + TAIL > len(self.text)
        try:
            self.decode(self.text, position)
        except json.JSONDecodeError as error:
            return error.pos == position
        return False

    def read(self) -> bool:
        """Drop the decoded text and at least double the rest; at the end change nothing and return False."""
        blocks, size = [], 0
        while size <= len(self.text) - self.at and (block := next(self.blocks, "")):
            blocks.append(block)
            size += len(block)
        if not blocks:
            return False
        done, rest = self.text[: self.at], self.text[self.at :]
        self.line += done.count("\n")
        self.column = len(done) - done.rfind("\n") - 1 if "\n" in done else self.column + len(done)
        self.text, self.at = "".join([rest, *blocks]), 0
        return True

    def error(self, problem: str, position: int) -> InputError:
        """Return the error of a problem at a position of the kept text."""
        error = json.JSONDecodeError(problem, self.text, position)
        return InputError(_json_problem(error, self.name, self.line, self.column))


# -------------------------------------------------------------------------------------------------- CSV


class _RowLines:
    """Lines for a CSV reader, which takes as many as a row needs; a bad row gives back all but its first."""

    def __init__(self, lines: Iterator[str]):
        self._lines = lines
        self._again: deque[str] = deque()
        self._is_retry, self._size = False, 0
        self.number = 0  # of the last line
        self.row: list[str] = []  # lines of the current row

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> str:
        if self._size > MAX_QUOTED or (self._is_retry and len(self.row) >= RETRIED_LINES):
            raise csv.Error(f"a quoted cell does not end within {self._size:,} characters")
        line = self._again.popleft() if self._again else next(self._lines) + "\n"
        self.number += 1
        self._size += len(line)
        self.row.append(line)
        return line

    def begin_row(self) -> None:
        """Forget the lines of the row before."""
        self.row.clear()
        self._is_retry, self._size = bool(self._again), 0

    def put_back(self) -> None:
        """Repeat all lines of the row but the first: an open quote loses its own row only."""
        self._again.extendleft(reversed(self.row[1:]))
        self.number -= len(self.row) - 1


def csv_rows(blocks: Iterator[str], name: str, tabs: bool, report: ReadReport | None = None) -> Iterator[Row]:
    """Yield the rows of a comma- or tab-separated file, whose first row names the columns.

    Quoted cells may contain line breaks. In a tab-separated file that needs no quoting a stray quote is part
    of the text, as in most data sets of that form.
    """
    report = report or ReadReport(name)
    head = next(blocks, "")
    # If every line has the header's number of tabs, nothing needs quoting.
    unquoted = tabs and len({line.count("\t") for line in head.split("\n")[:-1] or [head] if line}) <= 1
    first = next((line for line in head.split("\n") if line.strip()), "")
    delimiter = "\t" if tabs else max(",;\t", key=first.count)
    csv.field_size_limit(2**31 - 1)  # the default refuses a cell above 128 KiB
    lines = _RowLines(good_lines(chain([head], blocks), name, report))
    quotes: dict[str, Any] = {"quoting": csv.QUOTE_NONE} if unquoted else {}
    reader = csv.reader(lines, delimiter=delimiter, strict=True, **quotes)
    header: list[str] | None = None
    while True:
        lines.begin_row()
        try:
            cells = next(reader, None)
        except csv.Error as error:
            begin, end = lines.number - len(lines.row) + 1, lines.number
            opened = f" in the row that begins in line {begin}" if begin < end else ""
            remedy = "in a quoted cell, write a double quote twice"
            report.bad_row(f"{name}, line {end}: {one_line(error)}{opened}; {remedy}")
            lines.put_back()
            continue
        if cells is None:
            return
        if unquoted:
            cells = list(map(without_quotes, cells))
        if header is None:
            header = _distinct_names(cells) if any(map(str.strip, cells)) else None
        elif len(cells) > len(header):
            problem = f"{name}, line {lines.number}: {len(cells)} cells under {len(header)} columns"
            report.bad_row(f"{problem}; put a text with {delimiter!r} or a line break in double quotes")
        elif cells:
            yield f"line {lines.number}", dict(zip(header, cells, strict=False))


def _distinct_names(header: list[str]) -> list[str]:
    """Number the columns that share a name, so that none hides another: `text` becomes `text (column 2)`."""
    times = Counter(header)
    return [f"{name} (column {number})" if times[name] > 1 else name for number, name in enumerate(header, 1)]


def without_quotes(cell: str) -> str:
    """Undo quoting where the whole cell is quoted; a stray quote is kept."""
    inner = cell[1:-1]
    whole = len(cell) > 1 and cell[0] == cell[-1] == '"' and '"' not in inner.replace('""', "")
    return inner.replace('""', '"') if whole else cell


# ------------------------------------------------------------------------------------ parquet and Arrow


def arrow_documents(
    kind: str, stored: io.BufferedReader, name: str, column: str | None, report: ReadReport
) -> Iterator[str]:
    """Yield the texts of a parquet or Arrow file of `open_file`; see `row_documents`."""
    chosen: list[str] = []

    def choose(schema: pa.Schema) -> list[str]:
        texts = [field.name for field in schema if _is_string(field.type)]
        chosen.append(_choose_column(name, schema.names, texts, column))
        return chosen

    rows = arrow_rows(kind, stored, choose)
    for first in rows:  # by now the column is chosen
        yield from row_documents(chain([first], rows), name, chosen[0], report)


def arrow_rows(kind: str, stored: io.BufferedReader, choose: Choose = lambda schema: None) -> Iterator[Row]:
    """Yield the rows of a parquet or Arrow file of `open_file`."""
    batches = (_parquet_batches if kind == "parquet" else _arrow_batches)(stored, choose)
    rows = chain.from_iterable(batch.to_pylist() for batch in batches)
    return ((f"row {number}", row) for number, row in enumerate(rows, 1))


def _parquet_batches(stored: io.BufferedReader, choose: Choose) -> Iterator[pa.RecordBatch]:
    content, stored_bytes = decompressed(stored), cast(StoredBytes, stored.raw)
    # The index is at the end: a file that can only be read in order is copied first.
    direct = stored_bytes.seekable_file() if content is stored else None
    with direct or tempfile.TemporaryFile() as file:
        if not direct:
            shutil.copyfileobj(content, file, BLOCK_BYTES)
            file.seek(0)
        table = pq.ParquetFile(file, buffer_size=BLOCK_BYTES)  # page by page, not a whole row group
        columns = choose(table.schema_arrow)
        row, num_rows = 0, table.metadata.num_rows
        size = sum(table.metadata.row_group(group).total_byte_size for group in range(table.num_row_groups))
        batch_rows = min(max(PARQUET_BYTES * num_rows // max(size, 1), 1), 1000)
        for batch in table.iter_batches(batch_size=batch_rows, columns=columns):
            yield batch
            row += len(batch)
            stored_bytes.reach(row / num_rows)


def _arrow_batches(stored: io.BufferedReader, choose: Choose) -> Iterator[pa.RecordBatch]:
    """Read the stream format, or the file format: a stream with a mark before and an index after it."""
    content = io.BufferedReader(decompressed(stored))
    if content.peek(len(ARROW_FILE))[: len(ARROW_FILE)] == ARROW_FILE:
        content.read(len(ARROW_FILE))
    batches = pa.ipc.open_stream(content)
    columns = choose(batches.schema) or batches.schema.names
    for batch in batches:
        for start in range(0, len(batch), HEAD_ROWS):  # few at a time: a batch may be the whole file
            yield batch.slice(start, HEAD_ROWS).select(columns)


def _is_string(kind: pa.DataType) -> bool:
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return kind in (pa.string(), pa.large_string(), pa.string_view())
