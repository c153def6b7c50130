"""The options of fine-tuning on labelled texts.

Groups whose defaults differ from pretraining's are subclasses, so that `--help` and YAML show the right ones.
A configuration may mean several runs; `suite.py` lists them.
"""

from __future__ import annotations

import math
from dataclasses import field
from typing import ClassVar, Literal

from mlm.config.errors import require, require_defaults
from mlm.config.experiment import RunConfig
from mlm.config.glue import (
    FROM_MNLI,
    GLUE_TASKS,
    MNLI,
    SCORES,
    Selection,
    TaskRecipe,
    check_seeds,
    check_tasks,
)
from mlm.config.model import LabelType, Pooling
from mlm.config.schema import (
    AboveZero,
    BelowOne,
    Encoding,
    InsideUnit,
    NonNegative,
    Positive,
    RowLength,
    Separator,
    UpToOne,
    UserPath,
    schema,
)
from mlm.config.training import (
    BaseTrainerConfig,
    LoggingConfig,
    OptimizerConfig,
    ScheduleConfig,
    check_strategy,
)


@schema("data.")
class LabelledConfig:
    """Labelled texts."""

    train: UserPath | None = None
    """Labelled csv, tsv, jsonl, json or parquet file; null: which package a docstring is from."""
    validation: UserPath | None = None
    """Labelled file to score every epoch; null: a part held out of train."""
    test: UserPath | None = None
    """File to predict at the end, and to score if it has labels."""
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
    """Share of train held out without a validation file, chosen by a hash of the text."""
    max_length: RowLength | None = None
    """Most tokens of an example, special ones included; null: the longest, as far as the model reads."""
    max_train_examples: Positive | None = None
    """Train on this many examples only, chosen by a hash of the text; null: all."""

    def __post_init__(self) -> None:
        for name in ("validation", "test"):
            needless = self.train is None and getattr(self, name) is not None
            require(not needless, f"data.{name}", getattr(self, name), "needs data.train beside it")


OF_OWN_FILES = (
    *("text_column", "text_pair_column", "label_column"),
    *("label_type", "label_separator", "encoding"),
)
"""Keys that only labelled files of the user's own have."""


@schema("head.")
class HeadConfig:
    """Classifier on the encoder."""

    pooling: Pooling | None = None
    """The vector of a text, as model.pooling; null: as the model has it."""
    dropout: BelowOne = 0.1
    """Dropout before the classifier, in [0, 1)."""
    class_weights: Literal["balanced"] | list[str] | None = None
    """Weight of a class in the loss: balanced: rare ones more; or label=weight,...; null: all the same."""
    label_smoothing: BelowOne = 0.0
    """Share of the target spread evenly over all classes, in [0, 1)."""

    def __post_init__(self) -> None:
        for entry in self.class_weights if isinstance(self.class_weights, list) else []:
            require(is_weight(entry), "head.class_weights", entry, "must be label=weight, the weight above 0")
            same = [other for other in self.class_weights or [] if _label(other) == _label(entry)]
            require(len(same) == 1, "head.class_weights", ",".join(same), "weighs one class twice; keep one")

    def check_labels(self, label_type: LabelType) -> None:
        """Check that what is asked for has a meaning for labels of this kind.

        Raises:
            InputError: it has none.
        """
        number = label_type == "regression"
        weights, smoothing = self.class_weights, self.label_smoothing
        require(not number or weights is None, "head.class_weights", weights, "is about classes, not numbers")
        one = label_type == "classification"
        require(one or not smoothing, "head.label_smoothing", smoothing, "needs labels of which one holds")


def is_weight(entry: str) -> bool:
    """Return whether a text is a label, an equals sign, and a number above 0."""
    try:
        return bool(_label(entry)) and 0 < float(entry.rpartition("=")[2]) < math.inf
    except ValueError:
        return False


def _label(entry: str) -> str:
    return entry.rpartition("=")[0]


@schema("optimizer.")
class FinetuneOptimizerConfig(OptimizerConfig):
    """Optimizer and gradient clipping."""

    name: Literal["adamw", "muon"] = "adamw"
    """AdamW, or Muon for the hidden matrices and AdamW for the rest."""
    lr: AboveZero = 3e-4
    """Peak learning rate, for small encoders; a hundred million parameters take 2e-5 to 8e-5."""
    betas: tuple[BelowOne, BelowOne] = (0.9, 0.98)
    """Decay of AdamW's first and second moment."""
    eps: AboveZero = 1e-6
    """Added to the root of AdamW's second moment."""
    layer_decay: UpToOne = 1.0
    """Learning rate of each layer as a share of that above it: 1 for the head, least for the embeddings."""


@schema("schedule.")
class FinetuneScheduleConfig(ScheduleConfig):
    """Learning rate over the optimizer steps."""

    name: Literal["linear", "cosine", "wsd", "constant"] = "linear"
    """After the warm-up; wsd: constant, then decay."""
    warmup_fraction: BelowOne = 0.06
    """Share of the run spent warming up, in [0, 1)."""


@schema("trainer.")
class FinetuneTrainerConfig(BaseTrainerConfig):
    """Epochs, batch and devices; names are Lightning's where it has one."""

    batch_key: ClassVar[str] = "batch_size"
    aliases: ClassVar[dict[str, str]] = {"global_batch_size": "batch_size"}
    """Other spellings of keys on the command line and in files."""

    max_epochs: Positive = 3
    """Times that every example is trained on."""
    batch_size: Positive = 32
    """Examples per optimizer step, over all devices; also written global_batch_size."""
    freeze: Literal["embeddings", "encoder"] | Positive | None = None
    """Not trained: embeddings, a number of lowest layers with them, or the whole encoder; null: nothing."""
    devices: Positive | Literal["auto"] = "auto"
    """Devices a node; auto: as launched by torchrun or srun, else 1."""
    compile: bool = False
    """Compile the model, for inputs of any length: pays off on a GPU."""
    save_every: Positive | None = None
    """Optimizer steps between checkpoints; null: an epoch."""
    val_every: Positive | None = None
    """Not used: every epoch is scored."""

    def __post_init__(self) -> None:
        super().__post_init__()
        hint = "is not used: every epoch is scored; leave it out"
        require(self.val_every is None, "trainer.val_every", self.val_every, hint)

    @property
    def bounds(self) -> tuple[int | str | None, ...]:
        """All that may end the run."""
        return *super().bounds, self.max_epochs


SCRATCH = "scratch"
"""In place of a model: random weights."""


@schema()
class FinetuneConfig(RunConfig):
    """Fine-tune an encoder on labelled texts, or on tasks of GLUE.

    Examples: python finetune.py --model runs/first/model --data.train reviews.csv --data.label_column stars
              python finetune.py --model runs/first/model --task cola,mrpc --seeds 1,2,3 --glue_dir glue_data
    """

    default_stem: ClassVar[str] = "finetune"
    own_group: ClassVar[str] = "head"

    seed: NonNegative = 0
    """Decides the new head, order of examples and dropout."""
    model: UserPath | None = None
    """Model folder or hub's OWNER/NAME; scratch: random weights; null: the newest pretraining in runs_dir."""
    model_config: UserPath | None = None
    """Shape of scratch: name in configs/model, YAML file or model folder; null: the newest run's."""
    tokenizer: UserPath | None = None
    """Tokenizer of scratch: file or folder; null: that of model_config, or of the newest run."""
    task: list[str] = field(default_factory=list)
    """Tasks of GLUE: cola,sst2,mrpc,stsb,qqp,mnli,qnli,rte,wnli,ax, or all; empty: your own data."""
    glue_dir: UserPath | None = None
    """Folder of the official GLUE folders, or of a download of the hub's; null: the hub."""
    seeds: list[int] = field(default_factory=list)
    """A run of every task with each of these, and a table of all; empty: seed."""
    selection: Selection = "holdout"
    """GLUE: best epoch and grid point by a part held out of train, or by dev itself."""
    start_from_mnli: bool = False
    """RTE, MRPC and STS-B start from the model tuned on MNLI."""
    submit: bool = False
    """Write the zip file for the GLUE server; needs all tasks and their test files."""
    recipes: list[TaskRecipe] = field(default_factory=list)
    """Settings of single tasks, with the values of a grid; see configs/finetune."""
    data: LabelledConfig = field(default_factory=LabelledConfig)
    """Labelled texts."""
    head: HeadConfig = field(default_factory=HeadConfig)
    """Classifier on the encoder."""
    optimizer: FinetuneOptimizerConfig = field(default_factory=FinetuneOptimizerConfig)
    """Optimizer and gradient clipping."""
    schedule: FinetuneScheduleConfig = field(default_factory=FinetuneScheduleConfig)
    """Learning rate over the steps."""
    trainer: FinetuneTrainerConfig = field(default_factory=FinetuneTrainerConfig)
    """Epochs, batch and device."""
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    """Where metrics go."""

    def __post_init__(self) -> None:
        self.task = check_tasks(self.task)
        check_strategy(self.trainer, self.optimizer)
        tasks = ",".join(self.task)
        self.head.check_labels("regression" if SCORES in self.task else self.data.label_type)
        both = bool(self.task and self.data.train)
        require(not both, "task", tasks, f"and data.train={self.data.train} are two tasks; give one of them")
        self._check_needless()
        wanting = self.start_from_mnli and MNLI not in self.task and bool(set(FROM_MNLI) & set(self.task))
        require(
            not wanting, "start_from_mnli", "true", f"with task={tasks} needs mnli too; add it, or set false"
        )
        missing = ", ".join(task for task in GLUE_TASKS if task not in self.task)
        whole = not (self.submit and missing)
        require(whole, "submit", "true", f"is for the server, which wants all tasks; add {missing} to --task")
        check_seeds("seeds", self.seeds)
        entries = [recipe.task for recipe in self.recipes]
        for task in entries:
            require(entries.count(task) == 1, "recipes: task", task, "has two entries; make them one")

    def _check_needless(self) -> None:
        """Refuse what would be ignored."""
        if not self.task:
            hint = "is about GLUE; name its tasks with --task"
            require_defaults(self, ("glue_dir", "submit", "selection"), hint)
        if self.model != SCRATCH:
            hint = "is about random weights; give --model scratch"
            require_defaults(self, ("model_config", "tokenizer"), hint)
        if not self.data.train:
            fix = "GLUE's are known; leave it out" if self.task else "name them with --data.train"
            require_defaults(self.data, OF_OWN_FILES, f"is about files of your own; {fix}", "data.")

    def prefer_flags(self, flags: set[str]) -> None:
        """Let what stands on the command line win over the recipes of a file.

        Of a file `start_from_mnli` says how those tasks are trained that are asked for; typed, it wants one.
        """
        wanted = "start_from_mnli" in flags and self.start_from_mnli
        serves = not wanted or bool(set(FROM_MNLI) & set(self.task))
        hint = f"is about {', '.join(FROM_MNLI)}; name one of them with --task, or leave it out"
        require(serves, "start_from_mnli", "true", hint)
        for recipe in self.recipes:
            recipe.without(flags)
