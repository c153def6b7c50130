"""Fine-tuning on labelled texts: what the command can be told.

Groups whose defaults differ from pretraining's are subclasses, so that `--help` and YAML show the right ones.
A configuration may stand for several runs; `suite.py` tells which.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

from mlm.config.data import is_text_encoding
from mlm.config.errors import InputError, require, require_defaults
from mlm.config.experiment import RunConfig, check_model_folder, is_hub_name
from mlm.config.files import find_config
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
from mlm.config.launch import command_for
from mlm.config.model import LabelType, Pooling
from mlm.config.suite import check_data, check_recipes, check_same, goes_on, is_unbegun
from mlm.config.training import FinetuneTrainerConfig, LoggingConfig, OptimizerConfig, ScheduleConfig


def newest_pretrained_model(runs_dir: str, key: str = "model") -> str:
    """Return the model folder of the pretraining run that finished last.

    Args:
        runs_dir: the folder of the run folders.
        key: what it is for, which nobody gave.

    Raises:
        InputError: there is none; says what makes one.
    """
    finished = [path for path in Path(runs_dir).glob("*/summary.json") if _is_pretraining(path)]
    if not finished:
        raise InputError(
            f"{key}=null: {runs_dir} holds no finished pretraining run; run "
            f"{command_for('train.py')} first, or name a model folder with --{key}"
        )
    return str(max(finished, key=lambda path: path.stat().st_mtime_ns).parent / "model")


def _is_pretraining(summary: Path) -> bool:
    """Tell the run of an encoder, with a model to start from, from one that fine-tuned it."""
    try:
        facts = json.loads(summary.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    has_model = (summary.parent / "model" / "config.json").is_file()
    return has_model and isinstance(facts, dict) and "task" not in facts


def is_model(name: str) -> bool:
    """Tell whether a name means a model folder, here or on the hub, rather than a shape."""
    return is_hub_name(name) or Path(name, "config.json").is_file()


def check_text_file(key: str, path: str) -> None:
    """Check that a file is there.

    Raises:
        InputError: it is not; says where it was looked for.
    """
    require(Path(path).is_file(), key, path, f"is no file; looked in {os.getcwd()}")


def check_encoding(key: str, encoding: str) -> None:
    """Check that Python can decode it to text: base64, hex or rot13 are codecs, but no encodings of text.

    Raises:
        InputError: it cannot.
    """
    require(is_text_encoding(encoding), key, encoding, "is not a text encoding; try utf-8 or latin-1")


def check_separator(key: str, separator: str) -> None:
    """Check that something stands between labels.

    Raises:
        InputError: it is empty, or would be stripped.
    """
    require(bool(separator.strip()), key, repr(separator), "must be a character that is no space, such as |")


@dataclass
class LabelledConfig:
    """Labelled texts."""

    train: str | None = None
    """Labelled csv, tsv, jsonl, json or parquet file; null: which package a docstring is from."""
    validation: str | None = None
    """Labelled file to score every epoch; null: a part held out of train."""
    test: str | None = None
    """File to predict at the end, and to score if it has labels."""
    text_column: str = "text"
    """Column of the text."""
    text_pair_column: str | None = None
    """Column of a second text; null: single texts."""
    label_column: str = "label"
    """Column of the label."""
    label_type: LabelType = "classification"
    """A label is a class, a number to come close to, or any number of classes."""
    label_separator: str = "|"
    """Stands between the labels of a multilabel row; a list in jsonl needs none."""
    encoding: str = "utf-8"
    """Text encoding of the files."""
    validation_fraction: float = 0.1
    """Share of train held out without a validation file, chosen by a hash of the text."""
    max_length: int | None = None
    """Most tokens of an example, special ones included; null: the longest, as far as the model reads."""
    max_train_examples: int | None = None
    """Train on so many examples only, chosen by a hash of the text; null: all."""

    def __post_init__(self) -> None:
        for name in ("train", "validation", "test"):
            path = getattr(self, name)
            setattr(self, name, path and os.path.expanduser(path))
        for name in ("validation", "test"):
            needless = self.train is None and getattr(self, name) is not None
            require(not needless, f"data.{name}", getattr(self, name), "needs data.train beside it")
        check_encoding("data.encoding", self.encoding)
        check_separator("data.label_separator", self.label_separator)
        fraction, longest = self.validation_fraction, self.max_length
        require(0 < fraction < 1, "data.validation_fraction", fraction, "must lie in (0, 1)")
        require(longest is None or longest >= 8, "data.max_length", longest, "must be at least 8, or null")
        most = self.max_train_examples
        require(most is None or most > 0, "data.max_train_examples", most, "must be at least 1, or null")

    def check_files(self) -> None:
        """Check that the files named are there."""
        for name in ("train", "validation", "test"):
            if getattr(self, name) is not None:
                check_text_file(f"data.{name}", getattr(self, name))


OF_OWN_FILES = (
    *("text_column", "text_pair_column", "label_column"),
    *("label_type", "label_separator", "encoding"),
)
"""What is said of one's own files, and of no others."""


@dataclass
class HeadConfig:
    """What is put on the encoder."""

    pooling: Pooling | None = None
    """What stands for a text, as model.pooling; null: as the model has it."""
    dropout: float = 0.1
    """Dropout before the classifier, in [0, 1)."""
    class_weights: Literal["balanced"] | list[str] | None = None
    """What a class counts in training: balanced: rare ones more; or label=weight,...; null: all the same."""
    label_smoothing: float = 0.0
    """Share of the target that goes to all classes alike, in [0, 1)."""

    def __post_init__(self) -> None:
        for name in ("dropout", "label_smoothing"):
            value = getattr(self, name)
            require(0 <= value < 1, f"head.{name}", value, "must lie in [0, 1)")
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
    """Tell whether a text is a label, an equals sign, and a number above 0."""
    try:
        return bool(_label(entry)) and 0 < float(entry.rpartition("=")[2]) < math.inf
    except ValueError:
        return False


def _label(entry: str) -> str:
    return entry.rpartition("=")[0]


@dataclass
class FinetuneOptimizerConfig(OptimizerConfig):
    """Optimizer and gradient clipping."""

    name: Literal["adamw", "muon"] = "adamw"
    """AdamW, or Muon for the hidden matrices and AdamW for the rest."""
    lr: float = 3e-4
    """Peak learning rate, for small encoders; a hundred million parameters take 2e-5 to 8e-5."""
    betas: tuple[float, float] = (0.9, 0.98)
    """Decay of AdamW's first and second moment."""
    eps: float = 1e-6
    """Added to the root of AdamW's second moment."""
    layer_decay: float = 1.0
    """Learning rate of each layer as a share of that above it: 1 for the head, least for the embeddings."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 < self.layer_decay <= 1, "optimizer.layer_decay", self.layer_decay, "must lie in (0, 1]")


@dataclass
class FinetuneScheduleConfig(ScheduleConfig):
    """Learning rate over the optimizer steps."""

    name: Literal["linear", "cosine", "wsd", "constant"] = "linear"
    """After the warm-up; wsd: constant, then decay."""
    warmup_fraction: float = 0.06
    """Share of the run spent warming up, in [0, 1)."""


SCRATCH = "scratch"
"""In place of a model: random weights."""


@dataclass
class FinetuneConfig(RunConfig):
    """Fine-tune an encoder on labelled texts, or on tasks of GLUE.

    Examples: python finetune.py --model runs/first/model --data.train reviews.csv --data.label_column stars
              python finetune.py --model runs/first/model --task cola,mrpc --seeds 1,2,3 --glue_dir glue_data
    """

    default_stem: ClassVar[str] = "finetune"
    own_group: ClassVar[str] = "head"

    seed: int = 0
    """Decides the new head, order of examples and dropout."""
    model: str | None = None
    """Model folder or hub's OWNER/NAME; scratch: random weights; null: the newest pretraining in runs_dir."""
    model_config: str | None = None
    """Shape of scratch: name in configs/model, YAML file or model folder; null: the newest run's."""
    tokenizer: str | None = None
    """Tokenizer of scratch: file or folder; null: that of model_config, or of the newest run."""
    task: list[str] = field(default_factory=list)
    """Tasks of GLUE: cola,sst2,mrpc,stsb,qqp,mnli,qnli,rte,wnli,ax, or all; empty: your own data."""
    glue_dir: str | None = None
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
    """What single tasks are trained with, values of a grid among it; see configs/finetune."""
    data: LabelledConfig = field(default_factory=LabelledConfig)
    """Labelled texts."""
    head: HeadConfig = field(default_factory=HeadConfig)
    """What is put on the encoder."""
    optimizer: FinetuneOptimizerConfig = field(default_factory=FinetuneOptimizerConfig)
    """Optimizer and gradient clipping."""
    schedule: FinetuneScheduleConfig = field(default_factory=FinetuneScheduleConfig)
    """Learning rate over the steps."""
    trainer: FinetuneTrainerConfig = field(default_factory=FinetuneTrainerConfig)
    """Epochs, batch and device."""
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    """Where metrics go."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("model", "model_config", "tokenizer", "glue_dir"):
            setattr(self, name, getattr(self, name) and os.path.expanduser(getattr(self, name)))
        self.task = check_tasks(self.task)
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
        same = {"trainer.batch_size"} if "trainer.global_batch_size" in flags else set()
        for recipe in self.recipes:
            recipe.without(flags | same)

    def check_files(self) -> None:
        """Check that everything named is there and the run folder is not; choose a model if none is named."""
        if self.model == SCRATCH:
            self._check_scratch()
        else:
            self.model = self.model or newest_pretrained_model(self.runs_dir)
            check_model_folder("model", self.model)
        self.data.check_files()
        is_there = self.glue_dir is None or Path(self.glue_dir).is_dir()
        require(is_there, "glue_dir", self.glue_dir, f"is no folder; looked in {os.getcwd()}")
        check_recipes(self)
        folder = Path(self.runs_dir, self.name or "")
        if goes_on(self) and (folder / "config.yaml").exists():
            check_same(self, folder)
            check_data(self, folder)
        elif not goes_on(self) or not is_unbegun(folder):
            self.check_run()

    def _check_scratch(self) -> None:
        self.model_config = self.model_config or newest_pretrained_model(self.runs_dir, "model_config")
        if not is_model(self.model_config):
            find_config(self.model_config, "model")
        if self.tokenizer is None:
            shape, runs = self.model_config, self.runs_dir
            self.tokenizer = shape if is_model(shape) else newest_pretrained_model(runs, "tokenizer")
        there = is_hub_name(self.tokenizer) or Path(self.tokenizer).exists()
        require(there, "tokenizer", self.tokenizer, f"is neither file nor folder; looked in {os.getcwd()}")
