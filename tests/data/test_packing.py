import numpy as np
import pytest

from mlm.data.packing import RowTable, Spans, pack_documents

SEQ_LEN = 16


def documents(lengths):
    lengths = np.array(lengths, np.int64)
    return Spans(np.cumsum(lengths) - lengths, lengths)


def rows_of(table):
    starts, lengths = table.pieces.starts.tolist(), table.pieces.lengths.tolist()
    return [
        list(zip(starts[a:b], lengths[a:b], strict=True))
        for a, b in zip(table.offsets[:-1], table.offsets[1:], strict=True)
    ]


LENGTHS = [
    [5, 7, 3],
    [7, 7, 7, 7, 7],
    [200],
    [1],
    [14, 14],
    [15],
    [28, 1, 13, 2],
    [0, 3, 0],
    list(np.random.default_rng(0).integers(0, 60, 300)),
    list(np.random.default_rng(0).integers(0, 600, 100)),
]


@pytest.mark.parametrize("mode", ["isolate", "concat", "none"])
@pytest.mark.parametrize("seq_len", [8, SEQ_LEN, 18, 33, 64, 128])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_no_token_is_lost_or_repeated_and_no_row_overflows(mode, seq_len, lengths):
    spans = documents(lengths)
    rows = rows_of(pack_documents(spans, seq_len, mode))
    tokens = [token for row in rows for start, length in row for token in range(start, start + length)]
    assert sorted(tokens) == list(range(sum(lengths)))
    bounds = set(np.cumsum(lengths).tolist())
    for row in rows:
        assert row
        used = sum(length for _, length in row)
        special = 2 * len(row) if mode != "concat" else len(row) + 1
        assert used + special <= seq_len
        for start, length in row:  # inside one document
            assert length > 0
            assert not any(start < bound < start + length for bound in bounds)


@pytest.mark.parametrize("lengths", LENGTHS)
def test_isolate_cuts_only_documents_longer_than_a_row(lengths):
    pieces = {
        piece for row in rows_of(pack_documents(documents(lengths), SEQ_LEN, "isolate")) for piece in row
    }
    spans = documents(lengths)
    for start, length in zip(spans.starts.tolist(), spans.lengths.tolist(), strict=True):
        if 0 < length <= SEQ_LEN - 2:
            assert (start, length) in pieces


def test_isolate_puts_a_piece_where_it_leaves_the_least_room():
    # After two pieces the rows have room 4 and 8; the third (2 tokens, CLS and SEP) fits the first exactly.
    rows = rows_of(pack_documents(documents([10, 6, 2]), SEQ_LEN, "isolate"))
    assert rows == [[(0, 10), (16, 2)], [(10, 6)]]


@pytest.mark.parametrize(("mean", "fill"), [(60, 0.995), (120, 0.995), (600, 0.985)])
def test_isolate_fills_rows_well(mean, fill):
    lengths = np.random.default_rng(0).geometric(1 / mean, 20_000)
    table = pack_documents(documents(lengths), 128, "isolate")
    real = table.pieces.num_tokens + 2 * len(table.pieces.lengths)
    assert real / (len(table) * 128) > fill


def test_isolate_fills_the_largest_room_with_the_end_of_a_long_document():
    # The first row has room for 18 tokens beside CLS and SEP; the end of the second document is 62 + 40.
    rows = rows_of(pack_documents(documents([44, 62 + 62 + 40]), 64, "isolate"))
    assert rows == [[(44, 62)], [(0, 44), (106, 16)], [(122, 62)], [(184, 24)]]
    # 16 tokens on both sides of the cut, if need be by leaving room.
    rows = rows_of(pack_documents(documents([20, 62 + 10]), 64, "isolate"))
    assert rows == [[(0, 20), (20, 40)], [(60, 32)]]
    rows = rows_of(pack_documents(documents([13, 62 + 1]), 64, "isolate"))
    assert rows == [[(0, 13), (13, 47)], [(60, 16)]]
    rows = rows_of(pack_documents(documents([45, 62 + 40]), 64, "isolate"))
    assert rows == [[(0, 45)], [(45, 62)], [(107, 40)]]
    # What fits stays whole, in the least room; documents that are not cut come first.
    rows = rows_of(pack_documents(documents([62 + 20, 36, 38]), 64, "isolate"))
    assert rows == [[(82, 36), (0, 24)], [(118, 38), (24, 22)], [(46, 36)]]


def test_concat_runs_on_in_order_and_fills_every_row():
    rows = rows_of(pack_documents(documents([7] * 5), SEQ_LEN, "concat"))
    # 14 places between CLS and the last SEP: 7 + SEP + 6 | 1 + SEP + 7 + SEP + 4 | 3 + SEP + 7
    assert rows == [[(0, 7), (7, 6)], [(13, 1), (14, 7), (21, 4)], [(25, 3), (28, 7)]]


def test_none_gives_every_document_its_own_rows():
    rows = rows_of(pack_documents(documents([3, 20]), SEQ_LEN, "none"))
    assert rows == [[(0, 3)], [(3, 14)], [(17, 6)]]


def test_a_document_of_2000_tokens_takes_16_rows_of_128():
    assert len(pack_documents(documents([2000]), 128, "isolate")) == 16


def test_joined_tables_hold_the_rows_of_all():
    tables = [pack_documents(documents(lengths), SEQ_LEN, "isolate") for lengths in ([3, 20], [], [7, 7])]
    assert rows_of(RowTable.joined(tables)) == [row for table in tables for row in rows_of(table)]
