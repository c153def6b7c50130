"""The options of labelled data: files, columns, and which part is held out."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

from mlm.config.data import HUB_PREFIX, HubName
from mlm.config.errors import in_words, require, require_defaults
from mlm.config.model import LabelType
from mlm.config.schema import Encoding, InsideUnit, Positive, RowLength, Separator, UserPath, rule, schema

Folds = Annotated[int, rule("must be at least 2", lambda value: value >= 2)]


@schema("data.")
class LabelledConfig:
    """Labelled texts."""

    train: list[UserPath] | None = None
    """Labelled csv, tsv, jsonl, json or parquet: files, globs, folders, hub:OWNER/NAME; null: docstrings."""
    validation: list[UserPath] | None = None
    """Labelled files to score every epoch, as train; null: a part held out of train."""
    test: list[UserPath] | None = None
    """Files to predict at the end, and to score if they have labels, as train."""
    text_column: str = "text"
    """Column of the text."""
    text_pair_column: str | None = None
    """Column of a second text; null: single texts."""
    label_column: str = "label"
    """Column of the label."""
    label_type: LabelType = "classification"
    """A label is a class, a number (regression), or any number of classes (multilabel)."""
    label_separator: Separator = "|"
    """Character between the labels of a multilabel row; a list in jsonl needs none."""
    encoding: Encoding = "utf-8"
    """Text encoding of the files."""
    validation_fraction: InsideUnit = 0.1
    """Share of train held out without a validation file."""
    split: Literal["hash", "order"] = "hash"
    """Hold out by a hash of the text, or (order) the last rows, for data in the order of time."""
    group_column: str | None = None
    """Column of a group, such as author: hash the group, so that none is on both sides; null: the text."""
    folds: Folds | None = None
    """Cross-validation: a run for each of k folds of train, held out in turn; null: one run."""
    fold: Positive | None = None
    """Run only this fold, from 1; null: all."""
    max_length: RowLength | None = None
    """Most tokens of an example, special ones included; null: the longest, as far as the model reads."""
    max_train_examples: Positive | None = None
    """Train on this many examples only, chosen by a hash of the text; null: all."""

    def __post_init__(self) -> None:
        for name in ("train", "validation", "test"):
            require(getattr(self, name) != [], f"data.{name}", "[]", "names no file; leave it out")
        if self.train is None:
            require_defaults(self, ("validation", "test"), "needs data.train beside it", "data.")
        if self.validation is not None:
            hint = "is about holding out a part of train, and data.validation is given; leave it out"
            require_defaults(self, ("split", "group_column", "folds"), hint, "data.")
        if self.folds is not None:
            hint = "has no effect with data.folds; leave it out"
            require_defaults(self, ("split", "validation_fraction"), hint, "data.")
        fits = self.group_column is None or self.split == "hash"
        require(fits, "data.group_column", self.group_column, "needs data.split=hash; leave out one of them")
        fits = self.fold is None or self.fold <= (self.folds or 0)
        require(fits, "data.fold", self.fold, f"is not one of the folds; data.folds={in_words(self.folds)}")

    @property
    def title(self) -> str:
        """Name of the training data: that of the first file, folder or data set, and how many follow."""
        first, *others = self.train or [""]
        place = re.split(r"[*?\[]", first)[0]
        if first.startswith(HUB_PREFIX):
            place = HubName.parse(first, "data.train").repository
        return (Path(place).name or "files") + (f" and {len(others)} more" if others else "")
