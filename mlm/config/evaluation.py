"""A model at work on a file: what measuring it and labelling with it can be told."""

from __future__ import annotations

import glob
import os
from dataclasses import dataclass, field
from typing import Literal

from mlm.config.data import CorpusConfig, MaskingConfig, check_sources
from mlm.config.errors import require, require_defaults
from mlm.config.experiment import check_model_folder
from mlm.config.files import check_output
from mlm.config.finetune import check_encoding, check_separator, check_text_file
from mlm.config.launch import launched

Devices = int | Literal["auto"]


@dataclass
class EvaluateConfig:
    """Measure a masked language model on any text, or a fine-tuned model on a labelled file.

    Examples: mlm evaluate --model runs/first/model --data.sources book.txt
              mlm evaluate --model runs/reviews/model --input held-out.csv --label_column stars
    """

    model: str
    """Model folder, or OWNER/NAME on the Hugging Face hub."""
    input: str | None = None
    """Labelled file for a fine-tuned model, which then has to have one label in every row; null: data."""
    text_column: str = "text"
    """Column of the text in input."""
    text_pair_column: str | None = None
    """Column of a second text; null: single texts."""
    label_column: str = "label"
    """Column of the label; classes are matched by name."""
    label_separator: str = "|"
    """Stands between the labels of a text that may have several."""
    encoding: str = "utf-8"
    """Text encoding of input."""
    max_length: int | None = None
    """Most tokens of an example, special ones included; null: the longest, as far as the model reads."""
    data: CorpusConfig = field(default_factory=CorpusConfig)
    """The text without input; the whole of it is evaluated, nothing is held out."""
    masking: MaskingConfig = field(default_factory=MaskingConfig)
    """Masks are frozen, at validation_mask_rate."""
    batch_size: int = 32
    """Rows per pass."""
    output: str | None = None
    """Write the figures to this JSON file too; null: print only."""

    def __post_init__(self) -> None:
        self.model = os.path.expanduser(self.model)
        for name in ("input", "output"):
            setattr(self, name, getattr(self, name) and os.path.expanduser(getattr(self, name)))
        _check_reading(self)
        hint = "is about training; leave it out"
        unused = ("validation_fraction", "max_validation_tokens", "num_workers")
        require_defaults(self.data, unused, hint, "data.")
        require_defaults(self.masking, ("mask_rate", "final_mask_rate"), hint, "masking.")
        both = self.input is not None and self.data != CorpusConfig()
        require(not both, "input", self.input, "and data.* are two texts; give one of them")

    def check_files(self) -> None:
        """Check that the model and the text are there, and a place for the figures."""
        check_model_folder("model", self.model)
        if self.input is None:
            check_sources(self.data.sources)
            names = [source.path for source in self.data.sources]
            inputs = names + [file for name in names for file in glob.glob(name, recursive=True)]
        else:
            check_text_file("input", self.input)
            inputs = [self.input]
        if self.output is not None:
            check_output("output", self.output, *inputs)


@dataclass
class PredictConfig:
    """Label the texts of a file with a fine-tuned model.

    Example: mlm predict --model runs/reviews/model --input new.csv --output labels.csv
    """

    model: str
    """Model folder that `mlm finetune` wrote."""
    input: str
    """csv, tsv, jsonl, json or parquet file; labels in it are not looked at."""
    output: str
    """CSV file to write: row, label, and a column of probabilities for each class."""
    text_column: str = "text"
    """Column of the text."""
    text_pair_column: str | None = None
    """Column of the second text; null: single texts."""
    id_column: str | None = None
    """Column copied to the output as row; null: the number of the row, from 1."""
    label_separator: str = "|"
    """Written between the labels of a text, if it may have several."""
    encoding: str = "utf-8"
    """Text encoding of the input."""
    max_length: int | None = None
    """Most tokens of an example, special ones included; null: the longest, as far as the model reads."""
    batch_size: int = 64
    """Examples per pass."""
    devices: Devices = "auto"
    """Processes, each with a GPU or a share of the CPU; auto: as torchrun started, else all GPUs or one."""

    def __post_init__(self) -> None:
        self.model, self.input, self.output = map(os.path.expanduser, (self.model, self.input, self.output))
        _check_reading(self)
        require(self.devices == "auto" or self.devices > 0, "devices", self.devices, "must be at least 1")

    def check_files(self) -> None:
        """Check that model and input are there, and a folder for the output."""
        check_model_folder("model", self.model)
        check_text_file("input", self.input)
        check_output("output", self.output, self.input)
        launch = launched()
        if launch is not None:
            hint = "does not divide a file; start the processes with torchrun, or give --devices"
            require(launch.launcher == "torchrun" or launch.world_size == 1, "srun", launch.world_size, hint)
            hint = f"stands beside torchrun, which started {launch.devices}; leave it out"
            require(self.devices in ("auto", launch.devices), "devices", self.devices, hint)


def _check_reading(config: EvaluateConfig | PredictConfig) -> None:
    check_encoding("encoding", config.encoding)
    check_separator("label_separator", config.label_separator)
    longest = config.max_length
    require(longest is None or longest >= 8, "max_length", longest, "must be at least 8, or null")
    require(config.batch_size > 0, "batch_size", config.batch_size, "must be at least 1")
