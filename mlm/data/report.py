"""Counts of a source while it is read, and the line about it that a user sees."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import PurePath

from mlm.config.data import HUB_PREFIX
from mlm.config.errors import InputError


@dataclass
class ReadReport:
    """Counts of one source, filled while its documents are read."""

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
    """How the files were split into documents, and why: number of files of each kind."""
    lengths: Counter[int] = field(default_factory=Counter)
    """Documents by length in characters, kept to 7 binary digits: bounded in memory, exact to 1 %."""
    skip_bad_rows: bool = False
    """Whether rows that cannot be read are counted and left out; else the first one is an error."""
    bad_rows: int = 0
    first_bad_row: str = ""
    """Place and problem of the first of them."""
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
        """Return one line for the user: files, rule, documents, median length, and losses."""
        parts = [_counted(self.files, "file")] if self.files else []
        for rule, files in self.rules.most_common():
            parts.append(rule if len(self.rules) == 1 else f"{files:,} as {rule}")
        parts += [_counted(self.documents, "document"), f"median {self.median_length():,} characters"]
        return f"{short_name(self.name)}: {', '.join(parts)}{self.losses(', ')}"

    def losses(self, before: str) -> str:
        """Return the counts of everything read that did not become a document, after `before`; or nothing."""
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
    """Return the name of a source in a line about it."""
    return path if "://" in path or path.startswith(HUB_PREFIX) else PurePath(path).name
