"""Decode a file that is one JSON array, item by item: memory is bounded by the longest item."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from mlm.config.errors import InputError
from mlm.data.formats import one_line

TAIL = 32
"""Characters at the end of a block that may belong to an incomplete number or word."""
NOT_SPACE = re.compile(r"[^ \t\n\r]")


def array_items(blocks: Iterator[str], name: str) -> Iterator[Any]:
    """Yield the items of an array.

    Args:
        blocks: the text; its first character that is not white space is the opening bracket.
        name: the file's name in errors.

    Raises:
        InputError: the text is not valid JSON; names line and column.
    """
    text = _Text(blocks, name)
    text.skip("[")
    if not text.skip("]"):
        yield text.value()
        while text.skip(","):
            yield text.value()
        if not text.skip("]"):
            raise text.error("Expecting ',' delimiter")
    if text.next():
        raise text.error("Extra data")


def json_problem(error: Exception, name: str, line: int, column: int = 0) -> str:
    """Return place and cause of an error in a text that begins after `column` characters of `line`."""
    if not isinstance(error, json.JSONDecodeError):  # a number of thousands of digits, brackets as deep
        return f"{name}, line {line}: not readable JSON: {one_line(error)}"
    column = error.colno + (column if error.lineno == 1 else 0)
    return f"{name}, line {line + error.lineno - 1}, column {column}: not valid JSON: {error.msg}"


class _Text:
    """A JSON text given in blocks, of which only the part not yet decoded is kept."""

    def __init__(self, blocks: Iterator[str], name: str):
        self._blocks, self._name = blocks, name
        self._text, self._at = "", 0
        self._line, self._column = 1, 0  # place of the kept text in the file
        self._decode = json.JSONDecoder().raw_decode

    def next(self) -> str:
        """Move to the next character that is not white space and return it; empty at the end."""
        while True:
            found = NOT_SPACE.search(self._text, self._at)
            if found:
                self._at = found.start()
                return found[0]
            self._at = len(self._text)
            if not self._read():
                return ""

    def skip(self, character: str) -> bool:
        """Skip the next character that is not white space if it is this one; return whether it was."""
        found = self.next() == character
        self._at += found
        return found

    def value(self) -> Any:
        """Decode the next value."""
        self.next()
        while True:
            try:
                value, end = self._decode(self._text, self._at)
            except json.JSONDecodeError as error:
                if not self._may_be_cut(error.pos) or not self._read():
                    raise self.error(error.msg, error.pos) from None
            except (ValueError, RecursionError) as error:
                raise InputError(json_problem(error, self._name, self._line)) from None
            else:
                if end + TAIL <= len(self._text) or not self._read():
                    self._at = end
                    return value

    def _may_be_cut(self, position: int) -> bool:
        """Return whether more text may cure an error: it is near the end, or at a string without an end."""
        if position + TAIL > len(self._text) or self._text[position] != '"':
            return position + TAIL > len(self._text)
        try:
            self._decode(self._text, position)
        except json.JSONDecodeError as error:
            return error.pos == position
        return False

    def _read(self) -> bool:
        """Drop the decoded text and at least double the rest; at the end change nothing and return False."""
        blocks, size = [], 0
        while size <= len(self._text) - self._at and (block := next(self._blocks, "")):
            blocks.append(block)
            size += len(block)
        if not blocks:
            return False
        done, rest = self._text[: self._at], self._text[self._at :]
        self._line += done.count("\n")
        self._column = len(done) - done.rfind("\n") - 1 if "\n" in done else self._column + len(done)
        self._text, self._at = "".join([rest, *blocks]), 0
        return True

    def error(self, problem: str, position: int | None = None) -> InputError:
        """Return the error of a problem here, or at a position of the kept text."""
        error = json.JSONDecodeError(problem, self._text, self._at if position is None else position)
        return InputError(json_problem(error, self._name, self._line, self._column))
