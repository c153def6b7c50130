"""Embedding texts: what the command can be told."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

from mlm.config.errors import require
from mlm.config.experiment import check_model_folder
from mlm.config.files import check_output
from mlm.config.finetune import check_encoding, check_text_file


@dataclass
class EmbedConfig:
    """Turn each text of a file into a vector.

    Example: mlm embed --model runs/first/model --input sentences.txt --output vectors.npy
    """

    model: str
    """Model folder, or OWNER/NAME on the Hugging Face hub."""
    input: str
    """Text file with one text a line, or csv, tsv, jsonl, json or parquet file."""
    output: str
    """NumPy file to write: float32, one row for each text, in their order."""
    text_column: str = "text"
    """Column of the text, where there are columns."""
    encoding: str = "utf-8"
    """Text encoding of the input."""
    pooling: Literal["mean", "cls"] = "mean"
    """A text is the mean over its tokens, or the vector of its first."""
    normalize: bool = True
    """Scale every vector to length 1, so that a product is a cosine."""
    max_length: int | None = None
    """Most tokens of a text, special ones included; null: as many as the model reads."""
    batch_size: int = 64
    """Texts per pass."""

    def __post_init__(self) -> None:
        self.model, self.input, self.output = map(os.path.expanduser, (self.model, self.input, self.output))
        check_encoding("encoding", self.encoding)
        longest = self.max_length
        require(longest is None or longest >= 8, "max_length", longest, "must be at least 8, or null")
        require(self.batch_size > 0, "batch_size", self.batch_size, "must be at least 1")

    def check_files(self) -> None:
        """Check that model and input are there, and a folder for the output."""
        check_model_folder("model", self.model)
        check_text_file("input", self.input)
        require(self.output.endswith(".npy"), "output", self.output, "must end in .npy, the format it has")
        check_output("output", self.output, self.input)
