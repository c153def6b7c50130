"""From pieces of documents to rows of fixed length: which tokens share a row.

- isolate: every piece has its own CLS and SEP; a document is cut only if it is longer than a row, and its end
  (its last full row and the rest) fills the room left in other rows
- concat: documents follow one another with SEP between them; a row begins with CLS and ends with SEP
- none: one document a row, long ones continued in further rows

No token is lost or repeated in any mode. A row is a list of pieces, a piece a span of the token store; the
special tokens are added when a batch is rendered, so one store serves every `seq_len` and every mode.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

LEAST_CUT = 16  # a piece is cut to fill a row if both parts have as many tokens, and an eighth of a row

Ints = npt.NDArray[np.int64]
PackingMode = Literal["isolate", "concat", "none"]


@dataclass(frozen=True)
class Spans:
    """Spans of the token store, each inside one document."""

    starts: Ints  # (N,) first token of each span, counted over the whole store
    lengths: Ints  # (N,) tokens of each span

    @property
    def num_tokens(self) -> int:
        """Tokens in all spans."""
        return int(self.lengths.sum())

    @classmethod
    def joined(cls, parts: list["Spans"]) -> "Spans":
        """Return the spans of several, one after the other."""
        starts = np.concatenate([part.starts for part in parts])
        return cls(starts, np.concatenate([part.lengths for part in parts]))

    def take(self, chosen: npt.NDArray[np.bool_] | Ints) -> "Spans":
        """Return the spans where `chosen` (N,) is true, or those of these numbers, in order."""
        return Spans(self.starts[chosen], self.lengths[chosen])


@dataclass(frozen=True)
class RowTable:
    """Rows as lists of pieces: row r has the pieces `offsets[r]` to `offsets[r + 1]`."""

    offsets: Ints  # (R + 1,) first piece of each row, and the number of pieces
    pieces: Spans  # in the order of their rows

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @classmethod
    def joined(cls, tables: list["RowTable"]) -> "RowTable":
        """Return the rows of several tables, one after the other."""
        counts = np.concatenate([np.diff(table.offsets) for table in tables])
        pieces = Spans.joined([table.pieces for table in tables])
        return cls(np.concatenate([[0], np.cumsum(counts)]), pieces)


def pack_documents(documents: Spans, seq_len: int, mode: PackingMode) -> RowTable:
    """Cut and distribute documents over rows of `seq_len` tokens, special ones included; see the module."""
    documents = documents.take(documents.lengths > 0)
    if mode == "concat":
        row_of_piece, pieces = _run_on(documents, seq_len)
    elif mode == "none":
        pieces = cut_spans(documents, seq_len - 2)
        row_of_piece = np.arange(len(pieces.lengths))
    else:
        row_of_piece, pieces = _best_fit(documents, seq_len)
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.bincount(row_of_piece))])
    return RowTable(offsets, pieces.take(np.argsort(row_of_piece, kind="stable")))


def cut_spans(spans: Spans, size: int) -> Spans:
    """Cut every span into consecutive pieces of `size` tokens, the last one being the rest."""
    counts = -(-spans.lengths // size)
    number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = np.repeat(spans.starts, counts) + number * size
    return Spans(starts, np.minimum(np.repeat(spans.lengths, counts) - number * size, size))


class _OpenRows:
    """Rows with room left, after `num_rows` full ones; places a piece where it leaves the least room."""

    def __init__(self, seq_len: int, num_rows: int):
        self.seq_len = seq_len
        self._rows_with_room: list[list[int]] = [[] for _ in range(seq_len + 1)]
        self._rooms = 0  # bit r is set while some row has room r: the best fit is one bit trick away
        self._num_rows = num_rows

    def place(self, size: int) -> int:
        """Return the row for a piece of `size` tokens, special ones included; a new row if none has room."""
        fitting = self._rooms >> size
        if fitting:
            room = size + (fitting & -fitting).bit_length() - 1
            row = self._rows_with_room[room].pop()
            if not self._rows_with_room[room]:
                self._rooms &= ~(1 << room)
        else:
            room, row, self._num_rows = self.seq_len, self._num_rows, self._num_rows + 1
        left = room - size
        if left:
            self._rows_with_room[left].append(row)
            self._rooms |= 1 << left
        return row

    def largest_room(self) -> int:
        """Return the most tokens that fit into an existing row; -1 if all are full."""
        return self._rooms.bit_length() - 1


def _best_fit(documents: Spans, seq_len: int) -> tuple[Ints, Spans]:
    """Return rows and pieces: full rows and short documents first, then the ends of long documents."""
    size = seq_len - 2
    is_long = documents.lengths > size
    short, long = documents.take(~is_long), documents.take(is_long)
    end_lengths = long.lengths % size + size
    ends = Spans(long.starts + long.lengths - end_lengths, end_lengths)
    full = cut_spans(Spans(long.starts, long.lengths - end_lengths), size)
    least = max(LEAST_CUT, seq_len // 8)
    open_rows = _OpenRows(seq_len, len(full.lengths))
    rows = [*range(len(full.lengths)), *(open_rows.place(length + 2) for length in short.lengths.tolist())]
    placed = Spans.joined([full, short])
    starts, lengths = placed.starts.tolist(), placed.lengths.tolist()
    for start, left in zip(ends.starts.tolist(), ends.lengths.tolist(), strict=True):
        while left:
            room = open_rows.largest_room() - 2
            cut = min(room, left - least)
            if left <= room:
                length = left
            elif cut >= least:
                length = cut
            else:
                length = min(left, size)
            rows.append(open_rows.place(length + 2))
            starts.append(start)
            lengths.append(length)
            start, left = start + length, left - length
    return np.array(rows, np.int64), Spans(np.array(starts, np.int64), np.array(lengths, np.int64))


def _run_on(documents: Spans, seq_len: int) -> tuple[Ints, Spans]:
    """Return rows and pieces: documents one after the other, with a SEP between two pieces of a row."""
    rows, starts, lengths = [], [], []
    row, room = 0, seq_len - 2
    for start, left in zip(documents.starts.tolist(), documents.lengths.tolist(), strict=True):
        while left:
            if room <= 0:
                row, room = row + 1, seq_len - 2
            length = min(left, room)
            rows.append(row)
            starts.append(start)
            lengths.append(length)
            start, left, room = start + length, left - length, room - length
        room -= 1  # the SEP before the next document
    return np.array(rows, np.int64), Spans(np.array(starts, np.int64), np.array(lengths, np.int64))
