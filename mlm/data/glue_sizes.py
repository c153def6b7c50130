"""How many rows the development and test sets of GLUE have: one of another size is not official."""

from __future__ import annotations

OFFICIAL_ROWS = {
    "cola": {"dev": 1043, "test": 1063},
    "sst2": {"dev": 872, "test": 1821},
    "mrpc": {"dev": 408, "test": 1725},
    "stsb": {"dev": 1500, "test": 1379},
    "qqp": {"dev": 40430, "test": 390965},
    "mnli": {
        "dev_matched": 9815,
        "dev_mismatched": 9832,
        "test_matched": 9796,
        "test_mismatched": 9847,
    },
    "qnli": {"dev": 5463, "test": 5463},
    "rte": {"dev": 277, "test": 3000},
    "wnli": {"dev": 71, "test": 146},
    "ax": {"diagnostic": 1104},
}
"""Of each part of a task, without a header (Wang et al. 2019, arXiv:1804.07461; the second QNLI)."""
OFFICIAL_DEV = "the official dev set"


def odd_size(task: str, part: str, rows: int) -> str | None:
    """Return in words that a part has not as many rows as the official one; None: it has.

    Args:
        task: the task.
        part: as in `read_part`, not train.
        rows: how many there are.
    """
    official = OFFICIAL_ROWS[task][part]
    return None if rows == official else f"{rows:,} of {official:,} rows of {part}"


def dev_in_words(task: str, rows: dict[str, int]) -> str:
    """Return what the development sets of a task are: the official ones, or how much of them.

    Args:
        task: the task.
        rows: how many rows there are of each part.
    """
    odd = (odd_size(task, part, number) for part, number in rows.items())
    return " and ".join(filter(None, odd)) or OFFICIAL_DEV
