"""One dataclass for each command, with all its options; that of fine-tuning is in `finetune.py`.

Class variables that the parser knows: `shipped_kind`, the sub-folder of the shipped files that `--config`
searches; `files_of`, the command whose files it reads; `positional`, the key of words without a flag.
"""

from __future__ import annotations

import re
from dataclasses import field
from typing import Annotated, ClassVar, Literal

from mlm.config.data import CorpusConfig, MaskingConfig, SourceConfig, TokenizerConfig
from mlm.config.errors import in_words, require, require_defaults
from mlm.config.model import ModelConfig
from mlm.config.schema import Encoding, NonNegative, Positive, RowLength, Separator, UserPath, rule, schema
from mlm.config.training import (
    CardConfig,
    LoggingConfig,
    OptimizerConfig,
    ScheduleConfig,
    TrainerConfig,
    check_strategy,
)

Devices = Positive | Literal["auto"]
LongTexts = Literal["truncate", "windows"]


_FOLDER = re.compile(r"(?![.~ ])[^/\\\0\n]{1,150}")
FolderName = Annotated[str, rule("must be a plain folder name of at most 150 characters", _FOLDER.fullmatch)]


@schema()
class RunConfig:
    """The options that every training command has for its run."""

    own_group: ClassVar[str] = "masking"
    """A group of keys that only the configurations of this command have."""
    default_stem: ClassVar[str] = "default"
    """First part of the name of a run when no file is given with --config."""

    name: FolderName | None = None
    """Name of the run; null: <config>-<UTC time>."""
    runs_dir: UserPath = "runs"
    """Folder that holds the run folders."""
    seed: NonNegative = 0
    """Decides initial weights, order of rows, masks and dropout."""
    resume: bool | Literal["auto"] = False
    """Continue a stopped run: name, else the newest unfinished one; auto: start name if it is new."""


@schema()
class PretrainConfig(RunConfig):
    """Pretrain a masked language model on plain text.

    Example: python train.py --config bert-mini --data.sources my_texts/ --trainer.max_time 5m --name first
    """

    shipped_kind: ClassVar[str] = "pretrain"

    init: UserPath | None = None
    """Model folder, checkpoint or hub's OWNER/NAME to start from."""
    init_required: bool = False
    """Refuse random weights: for recipes that continue to train a model."""
    branch: str | None = None
    """Run or checkpoint to start from, with optimizer state and settings."""
    data: CorpusConfig = field(default_factory=CorpusConfig)
    """Documents, rows and the held-out part."""
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    """The vocabulary."""
    masking: MaskingConfig = field(default_factory=MaskingConfig)
    """Which tokens are predicted."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """Shape and switches of the encoder."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """Optimizer and gradient clipping."""
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    """Learning rate over the steps."""
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    """Budget, batch and devices."""
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    """Where metrics go."""
    card: CardConfig = field(default_factory=CardConfig)
    """Model card."""

    def __post_init__(self) -> None:
        self.model.check_fit(0, self.data.seq_len)
        own = "conflicts with init, whose model keeps its own tokenizer; leave out one of them"
        require(not (self.init and self.tokenizer.path), "tokenizer.path", self.tokenizer.path, own)
        check_strategy(self.trainer, self.optimizer)
        warmup, steps = self.schedule.warmup_steps, self.trainer.max_steps
        hint = f"is longer than the run of trainer.max_steps={steps}: it would never reach the peak rate"
        require(warmup is None or steps is None or warmup <= steps, "schedule.warmup_steps", warmup, hint)


@schema()
class PlanConfig(PretrainConfig):
    """Print the cost of a pretraining run: parameters, arithmetic, memory, budget.

    Example: mlm plan --config bert-mini --model bert-base --trainer.max_tokens 1e9
    """


@schema()
class InspectConfig(PretrainConfig):
    """Show a training batch as text, with the predicted tokens marked; nothing is trained.

    Example: mlm inspect --config bert-mini --data.sources my_texts/ --masking.strategy span --step 100
    """

    step: NonNegative = 0
    """The optimizer step whose batch is shown."""
    rows: NonNegative = 3
    """How many of its rows."""


@schema()
class PrepareConfig:
    """Prepare a corpus for pretraining, or list or clean prepared ones.

    Example: mlm prepare --data.sources my_texts/ --tokenizer.vocab_size 32768
    """

    shipped_kind: ClassVar[str] = "pretrain"
    files_of: ClassVar[type] = PretrainConfig

    data: CorpusConfig = field(default_factory=CorpusConfig)
    """The text, as for train.py."""
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    """The vocabulary, as for train.py."""
    shard: str | None = None
    """i/n: write only the share of machine i of n; the last one to end finishes the store."""
    list: bool = False
    """Print what the cache holds, and prepare nothing."""
    clean: int | Literal["all"] | None = None
    """Remove from the cache what was not used for so many days, or all of it, and prepare nothing."""

    def __post_init__(self) -> None:
        rule = "must be i/n with 1 <= i <= n, such as 2/8"
        require(1 <= self.machine[0] <= self.machine[1], "shard", self.shard, rule)
        days = self.clean if isinstance(self.clean, int) else 0
        require(days >= 0, "clean", self.clean, "must be a number of days, or all")

    @property
    def machine(self) -> tuple[int, int]:
        """Number of this machine, counted from 1, and of all; (0, 0) if `shard` cannot be read."""
        match = re.fullmatch(r"(\d+)/(\d+)", self.shard or "1/1")
        return (int(match[1]), int(match[2])) if match else (0, 0)


@schema()
class TokenizerTrainConfig:
    """Learn a vocabulary from text and write it as tokenizer.json.

    Example: mlm tokenizer train --data.sources my_texts/ --tokenizer.vocab_size 32768 --output my_tokenizer
    """

    output: UserPath
    """Folder to write tokenizer.json into."""
    data: CorpusConfig = field(default_factory=CorpusConfig)
    """The text."""
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    """Kind and size of the vocabulary."""

    def __post_init__(self) -> None:
        path = self.tokenizer.path
        require(path is None, "tokenizer.path", path, "is not to be trained; leave it out")


@schema()
class TokenizerInspectConfig:
    """Show statistics of a vocabulary, and how it splits text.

    Example: mlm tokenizer inspect --path my_tokenizer "Some words to cut."
    """

    positional: ClassVar[str] = "text"

    path: str
    """A tokenizer.json or model folder."""
    text: list[str] = field(default_factory=list)
    """Sentences to cut, given without a flag."""
    sources: list[SourceConfig] = field(default_factory=list)
    """Text to measure it on, as data.sources of train.py."""
    max_bytes: Positive = 16 * 2**20
    """Measure on at most this much of each source."""


@schema()
class FillMaskConfig:
    """Print the most likely words at each [MASK]."""

    positional: ClassVar[str] = "text"

    model: UserPath
    """Model folder, checkpoint, or OWNER/NAME on the Hugging Face hub."""
    text: list[str]
    """One or more sentences with a [MASK], given without a flag."""
    top_k: Positive = 5
    """How many words to print for each mask."""

    def __post_init__(self) -> None:
        require(bool(self.text), "text", "[]", "is empty; give a sentence with a [MASK]")


@schema()
class ExportConfig:
    """Write the model of a checkpoint as a model folder.

    Example: mlm export --model runs/first/checkpoints/step-00000400.ckpt --output first-400
    """

    model: UserPath
    """Checkpoint of a pretraining or fine-tuning run, in its run folder."""
    output: UserPath
    """Folder to write; an earlier model folder there is replaced."""


@schema()
class EvaluateConfig:
    """Measure a masked language model on any text, or a fine-tuned model on a labelled file.

    Examples: mlm evaluate --model runs/first/model --data.sources book.txt
              mlm evaluate --model runs/reviews/model --input held-out.csv --label_column stars
    """

    model: UserPath
    """Model folder, checkpoint, or OWNER/NAME on the Hugging Face hub."""
    input: list[UserPath] | None = None
    """Labelled files for a fine-tuned model, with a label in every row, as data.train; null: data."""
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
    long_texts: LongTexts = "truncate"
    """Of input: cut texts at max_length, or read them in windows of it and take the mean of their logits."""
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
        paths = [source.path for source in self.data.validation]
        require(not paths, "data.validation", paths, f"{hint}, and give the text as data.sources")
        require_defaults(self.masking, ("mask_rate", "final_mask_rate"), hint, "masking.")
        if self.input is None:
            require_defaults(self, ("long_texts",), "is about a labelled file; give it with --input")
        both = self.input is not None and self.data != CorpusConfig()
        require(not both, "input", in_words(self.input), "and data.* are two texts; give one of them")


@schema()
class InferenceConfig:
    """The options of commands that read a file of texts and write a file."""

    model: UserPath
    """Model folder, checkpoint, or OWNER/NAME on the Hugging Face hub."""
    input: list[UserPath]
    """csv, tsv, jsonl, json, parquet, or text with one text a line: files, globs, folders, hub:OWNER/NAME."""
    output: UserPath
    """File to write: for predict csv, for embed npy."""
    text_column: str = "text"
    """Column of the text, where there are columns."""
    encoding: Encoding = "utf-8"
    """Text encoding of the input."""
    max_length: RowLength | None = None
    """Most tokens of an example, special ones included; null: as many as it was trained with."""
    batch_size: Positive = 64
    """Texts per pass."""


@schema()
class PredictConfig(InferenceConfig):
    """Label the texts of a file with a fine-tuned model.

    Writes row, label, and a column of probabilities for each class. Labels in the input are ignored.
    Example: mlm predict --model runs/reviews/model --input new.csv --output labels.csv
    """

    text_pair_column: str | None = None
    """Column of the second text; null: single texts."""
    long_texts: LongTexts = "truncate"
    """Cut texts at max_length, or read them in windows of it and take the mean of their logits."""
    id_column: str | None = None
    """Column copied to the output as row; null: the number of the row, from 1."""
    label_separator: Separator = "|"
    """Written between the labels of a text, if it may have several."""
    devices: Devices = "auto"
    """Processes, each with a GPU or a share of the CPU; auto: as torchrun started, else all GPUs or one."""


@schema()
class EmbedConfig(InferenceConfig):
    """Turn each text of a file into a vector.

    Writes a NumPy file: float32, one row for each text, in their order.
    Example: mlm embed --model runs/first/model --input sentences.txt --output vectors.npy
    """

    pooling: Literal["mean", "cls"] = "mean"
    """A text is the mean over its tokens, or the vector of its first."""
    normalize: bool = True
    """Scale every vector to length 1, so that a product is a cosine."""
