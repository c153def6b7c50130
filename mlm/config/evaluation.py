"""The options of the commands that measure a model, label texts with it, or turn them into vectors."""

from __future__ import annotations

from dataclasses import field
from typing import Literal

from mlm.config.data import CorpusConfig, MaskingConfig
from mlm.config.errors import require, require_defaults
from mlm.config.schema import Encoding, Positive, RowLength, Separator, UserPath, schema

Devices = Positive | Literal["auto"]


@schema()
class EvaluateConfig:
    """Measure a masked language model on any text, or a fine-tuned model on a labelled file.

    Examples: mlm evaluate --model runs/first/model --data.sources book.txt
              mlm evaluate --model runs/reviews/model --input held-out.csv --label_column stars
    """

    model: UserPath
    """Model folder, or OWNER/NAME on the Hugging Face hub."""
    input: UserPath | None = None
    """Labelled file for a fine-tuned model, which then has to have one label in every row; null: data."""
    text_column: str = "text"
    """Column of the text in input."""
    text_pair_column: str | None = None
    """Column of a second text; null: single texts."""
    label_column: str = "label"
    """Column of the label; classes are matched by name."""
    label_separator: Separator = "|"
    """Character between the labels of a text that may have several."""
    encoding: Encoding = "utf-8"
    """Text encoding of input."""
    max_length: RowLength | None = None
    """Most tokens of an example, special ones included; null: as many as it was trained with."""
    data: CorpusConfig = field(default_factory=CorpusConfig)
    """The text without input; the whole of it is evaluated, nothing is held out."""
    masking: MaskingConfig = field(default_factory=MaskingConfig)
    """Masks are frozen, at validation_mask_rate."""
    batch_size: Positive = 32
    """Rows per pass."""
    output: UserPath | None = None
    """Write the figures to this JSON file too; null: print only."""

    def __post_init__(self) -> None:
        hint = "is about training; leave it out"
        unused = ("validation_fraction", "max_validation_tokens", "num_workers")
        require_defaults(self.data, unused, hint, "data.")
        require_defaults(self.masking, ("mask_rate", "final_mask_rate"), hint, "masking.")
        both = self.input is not None and self.data != CorpusConfig()
        require(not both, "input", self.input, "and data.* are two texts; give one of them")


@schema()
class PredictConfig:
    """Label the texts of a file with a fine-tuned model.

    Example: mlm predict --model runs/reviews/model --input new.csv --output labels.csv
    """

    model: UserPath
    """Model folder that `mlm finetune` wrote."""
    input: UserPath
    """csv, tsv, jsonl, json or parquet file; labels in it are ignored."""
    output: UserPath
    """CSV file to write: row, label, and a column of probabilities for each class."""
    text_column: str = "text"
    """Column of the text."""
    text_pair_column: str | None = None
    """Column of the second text; null: single texts."""
    id_column: str | None = None
    """Column copied to the output as row; null: the number of the row, from 1."""
    label_separator: Separator = "|"
    """Written between the labels of a text, if it may have several."""
    encoding: Encoding = "utf-8"
    """Text encoding of the input."""
    max_length: RowLength | None = None
    """Most tokens of an example, special ones included; null: as many as it was trained with."""
    batch_size: Positive = 64
    """Examples per pass."""
    devices: Devices = "auto"
    """Processes, each with a GPU or a share of the CPU; auto: as torchrun started, else all GPUs or one."""


@schema()
class EmbedConfig:
    """Turn each text of a file into a vector.

    Example: mlm embed --model runs/first/model --input sentences.txt --output vectors.npy
    """

    model: UserPath
    """Model folder, or OWNER/NAME on the Hugging Face hub."""
    input: UserPath
    """Text file with one text a line, or csv, tsv, jsonl, json or parquet file."""
    output: UserPath
    """NumPy file to write: float32, one row for each text, in their order."""
    text_column: str = "text"
    """Column of the text, where there are columns."""
    encoding: Encoding = "utf-8"
    """Text encoding of the input."""
    pooling: Literal["mean", "cls"] = "mean"
    """A text is the mean over its tokens, or the vector of its first."""
    normalize: bool = True
    """Scale every vector to length 1, so that a product is a cosine."""
    max_length: RowLength | None = None
    """Most tokens of a text, special ones included; null: as many as it was trained with."""
    batch_size: Positive = 64
    """Texts per pass."""
