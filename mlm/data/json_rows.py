"""Read JSON lines, and files that are one JSON array."""

import json
import re
from collections.abc import Iterator
from itertools import chain
from typing import Any

from mlm.config.errors import InputError
from mlm.data.formats import ReadReport, good_lines, one_line

TAIL = 32  # characters at the end of a block that may belong to an incomplete JSON number or word
Row = tuple[str, dict[str, Any]]  # place of a row ("line 3"), and its cells


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
            report.bad_row(f"{name}, {place}: {shortened(repr(value))} is not a JSON object")


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


def shortened(text: str) -> str:
    """Return at most 60 characters of a text."""
    return text if len(text) <= 60 else f"{text[:57]}..."
