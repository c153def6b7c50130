"""The options of fine-tuning on labelled texts or on tasks of GLUE.

- groups whose defaults differ from pretraining's are subclasses, so that `--help` shows the right ones
- a recipe is a file of `configs/finetune/` for `--config`: keys of fine-tuning, and under `recipes` an entry
  for each task that needs other values; several values of a key make a grid
- a configuration may mean several runs: `mlm/startup/suite.py` lists them
"""

from __future__ import annotations

import math
from dataclasses import field
from itertools import product
from typing import ClassVar, Literal

from mlm.config.commands import RunConfig
from mlm.config.errors import in_words, require, require_defaults
from mlm.config.labelled import LabelledConfig
from mlm.config.model import Pooling
from mlm.config.schema import (
    AboveZero,
    BelowOne,
    Positive,
    UpToOne,
    UserPath,
    nearest,
    schema,
)
from mlm.config.training import (
    BaseTrainerConfig,
    CardConfig,
    LoggingConfig,
    OptimizerConfig,
    ScheduleConfig,
    check_strategy,
)

SCRATCH = "scratch"
"""In place of a model: random weights."""
GLUE_TASKS = ("cola", "sst2", "mrpc", "stsb", "qqp", "mnli", "qnli", "rte", "wnli", "ax")
"""Names as on the Hugging Face hub; the last is the diagnostic set, which MNLI's model answers."""
DIAGNOSTIC = "ax"
MNLI = "mnli"
SCORES = "stsb"
"""The task whose labels are numbers."""
FROM_MNLI = ("rte", "mrpc", "stsb")
"""The small tasks that gain most from starting at the model of MNLI (Liu et al. 2019, arXiv:1907.11692)."""

Point = dict[str, float]
"""One combination of the values of a grid, by dotted key."""


@schema("recipes: ")
class TaskRecipe:
    """Settings of one task; several values of a key make a grid, none leave the key as it is."""

    task: str
    """Name of the task, or `all`: the entry for those without one of their own."""
    lr: list[float] = field(default_factory=list)
    """optimizer.lr"""
    weight_decay: list[float] = field(default_factory=list)
    """optimizer.weight_decay"""
    step_decay: list[float] = field(default_factory=list)
    """The same as a share lost at each step at the peak rate, whatever that is: weight_decay = this / lr."""
    batch_size: list[int] = field(default_factory=list)
    """trainer.batch_size"""
    max_epochs: list[int] = field(default_factory=list)
    """trainer.max_epochs"""
    seeds: list[int] = field(default_factory=list)
    """The seeds of this task."""

    def __post_init__(self) -> None:
        known = self.task in (*GLUE_TASKS, "all")
        require(known, "recipes: task", self.task, f"is none of {', '.join(GLUE_TASKS)} or all")
        if self.step_decay:
            key, value = "recipes: step_decay", self.step_decay
            require(not self.weight_decay, key, value, "conflicts with weight_decay; keep one")
            require(bool(self.lr), key, value, "needs lr in the same entry")
            divides = all(rate > 0 for rate in self.lr)
            require(divides, "recipes: lr", self.lr, "must be above 0: step_decay is divided by it")
        _check_seeds(f"recipes: task={self.task}: seeds", self.seeds)

    def without(self, keys: set[str]) -> None:
        """Forget the values of these dotted keys, which the command line gives."""
        for name, key in _KEYS.items():
            if key in keys:
                setattr(self, name, [])
        if keys & {"seed", "seeds"}:
            self.seeds = []
        if keys & {"optimizer.weight_decay", "optimizer.lr"}:
            self.step_decay = []

    def points(self) -> list[Point]:
        """Return every combination of the values, [{}] if none is given."""
        given = {key: getattr(self, name) for name, key in _KEYS.items() if getattr(self, name)}
        if self.step_decay:
            given["step_decay"] = self.step_decay
        points = [dict(zip(given, values, strict=True)) for values in product(*given.values())]
        for point in points:
            if "step_decay" in point:
                # Rounded, so that 5e-6 / 5e-5 is 0.1 in the files too.
                decay = point.pop("step_decay") / point["optimizer.lr"]
                point["optimizer.weight_decay"] = float(f"{decay:.6g}")
        return points


_KEYS = {
    "lr": "optimizer.lr",
    "weight_decay": "optimizer.weight_decay",
    "batch_size": "trainer.batch_size",
    "max_epochs": "trainer.max_epochs",
}


def _check_seeds(key: str, seeds: list[int]) -> None:
    """Raise InputError unless every seed is a run of its own: a repeated run would narrow the spread."""
    require(len(set(seeds)) == len(seeds), key, seeds, "names one twice")
    require(min(seeds, default=0) >= 0, key, seeds, "must be at least 0")


def plain_name(name: str) -> str:
    """Return the name of a task without the marks of its other spellings: SST-2 is sst2."""
    return name.lower().replace("-", "").replace("_", "")


def _plain_tasks(tasks: list[str]) -> list[str]:
    """Return the plain names of tasks, those of GLUE for `all`; raise InputError if they make no sense."""
    tasks = [plain_name(name) for name in tasks]
    words = ",".join(tasks)
    if "all" in tasks:
        require(len(tasks) == 1, "task", words, "names all tasks and one of them; keep all")
        return list(GLUE_TASKS)
    for name in tasks:
        fix = nearest(name, GLUE_TASKS) or f"; there are {', '.join(GLUE_TASKS)} and all"
        require(name in GLUE_TASKS, "task", name, f"is not a task of GLUE{fix}")
    require(len(set(tasks)) == len(tasks), "task", words, "names a task twice")
    alone = DIAGNOSTIC in tasks and MNLI not in tasks
    require(not alone, "task", DIAGNOSTIC, "has nothing to train on: MNLI's model answers it; add mnli")
    return tasks


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
        weights = self.class_weights if isinstance(self.class_weights, list) else []
        labels = [entry.rpartition("=")[0] for entry in weights]
        for entry, label in zip(weights, labels, strict=True):
            right = bool(label) and _is_weight(entry.rpartition("=")[2])
            require(right, "head.class_weights", entry, "must be label=weight, the weight above 0")
            same = ",".join(other for other in weights if other.rpartition("=")[0] == label)
            require(labels.count(label) == 1, "head.class_weights", same, "weighs one class twice; keep one")


def _is_weight(text: str) -> bool:
    try:
        return 0 < float(text) < math.inf
    except ValueError:
        return False


@schema("optimizer.")
class FinetuneOptimizerConfig(OptimizerConfig):
    """Optimizer and gradient clipping."""

    name: Literal["adamw", "muon"] = "adamw"
    lr: AboveZero | None = None  # type: ignore[assignment]
    """Peak learning rate; null: chosen for the encoder, see docs/finetuning.md."""
    betas: tuple[BelowOne, BelowOne] = (0.9, 0.98)
    eps: AboveZero = 1e-6
    layer_decay: UpToOne = 1.0
    """Learning rate of each layer as a share of that above it: 1 for the head, least for the embeddings."""


@schema("schedule.")
class FinetuneScheduleConfig(ScheduleConfig):
    """Learning rate over the optimizer steps."""

    name: Literal["linear", "cosine", "wsd", "constant"] = "linear"
    """After the warm-up; wsd: constant, then decay."""
    warmup_fraction: BelowOne = 0.06


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


@schema()
class FinetuneConfig(RunConfig):
    """Fine-tune an encoder on labelled texts, or on tasks of GLUE.

    Examples: python finetune.py --model runs/first/model --data.train reviews.csv --data.label_column stars
              python finetune.py --model runs/first/model --task cola,mrpc --seeds 1,2,3 --glue_dir glue_data
    """

    default_stem: ClassVar[str] = "finetune"
    own_group: ClassVar[str] = "head"

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
    selection: Literal["holdout", "dev"] = "holdout"
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
    card: CardConfig = field(default_factory=CardConfig)
    """Model card."""

    def __post_init__(self) -> None:
        self.task = _plain_tasks(self.task)
        check_strategy(self.trainer, self.optimizer)
        tasks = ",".join(self.task)
        label_type = "regression" if SCORES in self.task else self.data.label_type
        weights, smoothing = self.head.class_weights, self.head.label_smoothing
        fits = label_type != "regression" or weights is None
        require(fits, "head.class_weights", weights, "is about classes, not numbers")
        fits = label_type == "classification" or not smoothing
        require(fits, "head.label_smoothing", smoothing, "needs labels of which one holds")
        both, files = bool(self.task and self.data.train), in_words(self.data.train)
        require(not both, "task", tasks, f"and data.train={files} are two tasks; give one of them")
        self._check_unused()
        wanting = self.start_from_mnli and MNLI not in self.task and self._has_from_mnli
        rule = f"with task={tasks} needs mnli too; add it, or set false"
        require(not wanting, "start_from_mnli", "true", rule)
        missing = ", ".join(task for task in GLUE_TASKS if task not in self.task)
        whole = not (self.submit and missing)
        require(whole, "submit", "true", f"is for the server, which wants all tasks; add {missing} to --task")
        _check_seeds("seeds", self.seeds)
        both = bool(self.seeds and self.data.folds and not self.data.fold)
        hint = f"conflicts with data.folds={self.data.folds}, which has one seed; leave out one of them"
        require(not both, "seeds", in_words(self.seeds), hint)
        entries = [recipe.task for recipe in self.recipes]
        for task in entries:
            require(entries.count(task) == 1, "recipes: task", task, "has two entries; make them one")

    @property
    def _has_from_mnli(self) -> bool:
        return bool(set(FROM_MNLI) & set(self.task))

    def _check_unused(self) -> None:
        """Refuse settings that would be ignored."""
        if not self.task:
            hint = "is about GLUE; name its tasks with --task"
            require_defaults(self, ("glue_dir", "submit", "selection"), hint)
        if self.model != SCRATCH:
            hint = "is about random weights; give --model scratch"
            require_defaults(self, ("model_config", "tokenizer"), hint)
        if not self.data.train:
            fix = "GLUE's are known; leave it out" if self.task else "name them with --data.train"
            own = (
                "text_column",
                "text_pair_column",
                "label_column",
                "label_type",
                "label_separator",
                "encoding",
                *("split", "group_column", "folds"),
            )
            require_defaults(self.data, own, f"is about files of your own; {fix}", "data.")

    def prefer_flags(self, flags: set[str]) -> None:
        """Let flags win over the recipes of a file.

        In a file `start_from_mnli` may serve other tasks; as a flag it needs one that it affects.
        """
        wanted = "start_from_mnli" in flags and self.start_from_mnli
        hint = f"is about {', '.join(FROM_MNLI)}; name one of them with --task, or leave it out"
        require(not wanted or self._has_from_mnli, "start_from_mnli", "true", hint)
        for recipe in self.recipes:
            recipe.without(flags)
