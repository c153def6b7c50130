"""Read files of rows: JSON lines, JSON arrays, CSV, TSV, parquet and Arrow; a row is a document.

- one reader serves pretraining, which wants one column, and labelled tables, which want all
- every cell of a text file is text: `NA` is a word, never a missing value
- a row that cannot be read, or whose cell is not text, is an error, or counted if the user allows bad rows
"""

import csv
import io
import math
import shlex
import shutil
import tempfile
from collections import Counter, deque
from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import Any, Self, cast

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from mlm.config.errors import InputError
from mlm.data.formats import BLOCK_BYTES, ReadReport, StoredBytes, decompressed, good_lines, one_line
from mlm.data.json_rows import Row, json_rows, shortened
from mlm.files import shorten

ARROW_FORMATS = ("parquet", "arrow")  # their columns have types; all other tables are text
HEAD_ROWS = 32  # rows searched for the column that holds the text
PARQUET_BYTES = 1 << 24  # about the bytes of a parquet file decoded at a time
MAX_QUOTED = 1 << 24  # characters of a CSV row of several lines beyond which its quote counts as unclosed
RETRIED_LINES = 100  # the same in lines after an unclosed quote: else an open quote in each row is quadratic
ARROW_FILE = b"ARROW1\0\0"
TURN = {"role", "content"}  # keys of one turn of a chat

Choose = Callable[[pa.Schema], list[str] | None]  # the columns of a file to read; None: all


def row_documents(
    rows: Iterator[Row], name: str, column: str | None, report: ReadReport, open_ended: bool = False
) -> Iterator[str]:
    """Yield the text of each row that has one.

    The text is in `column`, else in a column called text, else in the only one that holds words. A column may
    be a path in nested values, such as doc.body; a list of texts or of chat turns is one document. With
    `open_ended` later rows may have further columns, as in JSON.
    """
    head = list(islice(rows, HEAD_ROWS))
    if not head:
        return
    columns = list(dict.fromkeys(path for _, row in head for path in paths_of(row)))
    worded = [path for path in columns if any(_is_words(joined(value_at(row, path))) for _, row in head)]
    wanted, found = column, not open_ended
    if column is None or not open_ended:
        column = _choose_column(name, columns, worded, column)
    report.rules[f"rows (column {column})"] += 1
    for place, row in chain(head, rows):
        value = joined(value_at(row, column))
        found = found or value is not None or column in row
        text = _cell_text(value, row, name, place, column, report)
        if text is not None:
            yield text
    if not found:
        _choose_column(name, columns, worded, wanted)


def paths_of(row: dict[str, Any], depth: int = 3) -> Iterator[str]:
    """Yield the keys of a row, and those of the mappings in it as dotted paths."""
    for key, value in row.items():
        yield key
        inner = value[0] if isinstance(value, list) and value else value
        if isinstance(inner, dict) and depth and not inner.keys() >= TURN:
            yield from (f"{key}.{path}" for path in paths_of(inner, depth - 1))


def value_at(row: dict[str, Any], path: str | None) -> Any:
    """Return the value at a dotted path of a row; through a list, the values of all its entries."""
    if path in row:
        return row[path]
    first, dot, rest = str(path).partition(".")
    inner = row.get(first) if dot else None
    if isinstance(inner, list) and inner:
        return [value_at(one, rest) for one in inner if isinstance(one, dict)]
    return value_at(inner, rest) if isinstance(inner, dict) else None


def joined(value: Any) -> Any:
    """Return the texts of a list, or the contents of chat turns, as paragraphs of one text."""
    if isinstance(value, dict) and value.keys() >= TURN:
        return joined(value["content"])
    if not isinstance(value, list):
        return value
    parts = [joined(one.get("text") if isinstance(one, dict) and "text" in one else one) for one in value]
    whole = all(isinstance(part, str) for part in parts)
    return "\n".join(part for part in parts if part.strip()) if whole and parts else value


def _choose_column(name: str, columns: list[str], worded: list[str], column: str | None) -> str:
    if not columns:
        raise InputError(f"{name}: has no columns")
    if column is None:
        column = "text" if "text" in columns else worded[0] if len(worded) == 1 else None
    number = columns.count(str(column))
    if number > 1:
        raise InputError(f"{name}: has {number} columns called {column}; rename all but one")
    if column in columns or column in worded:
        return column
    wanted = f"has no column {column}" if column else "cannot tell which column holds the text"
    if not worded:
        columns = list(map(shortened, columns))
        raise InputError(f"{name}: {wanted}, and none of its columns holds words: {shorten(columns)}")
    choices = ", ".join(shortened(str(choice)) for choice in worded[:20])
    source = {"path": name, "text_column": str(worded[0])}
    in_one_line = {"default_flow_style": True, "width": math.inf}
    example = shlex.quote(yaml.safe_dump(source, **in_one_line, allow_unicode=True, sort_keys=False).strip())
    rule = f"set text_column of this source to one of: {choices}; as in --data.sources {example}"
    raise InputError(f"{name}: {wanted}; {rule}")


def _is_words(value: Any) -> bool:
    """Return whether a value is text, and not a number written as text."""
    if not isinstance(value, str) or not value.strip():
        return False
    try:
        float(value)
    except ValueError:
        return True
    return value.strip().lower() in ("nan", "inf", "infinity")


def _cell_text(
    value: Any, row: dict[str, Any], name: str, place: str, column: str | None, report: ReadReport
) -> str | None:
    """Return the text of a cell; None if it has none, or is counted as a bad row."""
    report.rows += 1
    if isinstance(value, str) and value.strip():
        # JSON can spell a lone surrogate, which no encoding can store.
        return value if value.isascii() else value.encode("utf-8", "replace").decode("utf-8")
    if value is None or isinstance(value, str):
        report.rows_without_text += 1
        why = (
            f"has no {column}" if column not in row else f"{column} is {'null' if value is None else 'empty'}"
        )
        report.without_text[why] += 1
        if not report.first_without_text:
            report.first_without_text = f"{place} {why}; its keys: {shorten(list(row), 5)}"
    else:
        report.bad_row(f"{name}, {place}: {column} is {shortened(repr(value))}, which is not text")
    return None


def text_rows(blocks: Iterator[str], kind: str, name: str, report: ReadReport) -> Iterator[Row]:
    """Yield the rows of a text in the format `kind`: jsonl, json, csv or tsv."""
    if kind in ("csv", "tsv"):
        return csv_rows(blocks, name, kind == "tsv", report)
    return json_rows(blocks, name, kind == "json", report)


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
        texts = [path for field in schema for path in _text_paths(field.name, field.type)]
        nested = (
            column is not None and column not in schema.names and column.partition(".")[0] in schema.names
        )
        chosen.append(str(column) if nested else _choose_column(name, schema.names, texts, column))
        return [chosen[0] if chosen[0] in schema.names else chosen[0].partition(".")[0]]

    rows = arrow_rows(kind, stored, choose)
    for first in rows:  # by now the column is chosen
        yield from row_documents(chain([first], rows), name, chosen[0], report, open_ended=True)


def _text_paths(name: str, kind: pa.DataType) -> Iterator[str]:
    """Yield the paths of texts in a column: the column itself, or those of its inner fields."""
    inner = kind.value_type if pa.types.is_list(kind) or pa.types.is_large_list(kind) else kind
    fields = {
        inner.field(place).name: inner.field(place).type for place in range(getattr(inner, "num_fields", 0))
    }
    if _is_string(inner) or fields.keys() >= TURN:
        yield name
        return
    for key, of in fields.items():
        yield from _text_paths(f"{name}.{key}", of)


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
