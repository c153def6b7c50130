"""One dataclass for each command that pretrains or looks at a pretrained model: all its options."""

from __future__ import annotations

import re
from dataclasses import field
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator

from mlm.config.data import CorpusConfig, MaskingConfig, TokenizerConfig
from mlm.config.errors import require
from mlm.config.model import ModelConfig
from mlm.config.schema import NonNegative, Positive, UserPath, schema
from mlm.config.training import (
    LoggingConfig,
    OptimizerConfig,
    ScheduleConfig,
    TrainerConfig,
    check_strategy,
)


def _check_name(name: str) -> str:
    if not re.fullmatch(r"(?![.~ ])[^/\\\0\n]{1,150}", name):
        raise ValueError("must be a plain folder name of at most 150 characters")
    return name


@schema()
class RunConfig:
    """The options that every training command has for its run."""

    own_group: ClassVar[str] = "masking"
    """A group of keys that only the configurations of this command have."""
    default_stem: ClassVar[str] = "default"
    """First part of the name of a run when no file is given with --config."""

    name: Annotated[str, AfterValidator(_check_name)] | None = None
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
    """Sub-folder of the shipped files that `--config` searches."""

    init: UserPath | None = None
    """Model folder or hub's OWNER/NAME to start from, with its tokenizer."""
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

    def __post_init__(self) -> None:
        positions, row = self.model.max_position_embeddings, self.data.seq_len
        hint = (
            f"is longer than model.max_position_embeddings={positions}; set data.seq_len to at most "
            f"{positions}, or model.max_position_embeddings to null"
        )
        require(positions is None or row <= positions, "data.seq_len", row, hint)
        check_strategy(self.trainer, self.optimizer)
        warmup, steps = self.schedule.warmup_steps, self.trainer.max_steps
        hint = f"is longer than the run of trainer.max_steps={steps}: it would never reach the peak rate"
        require(warmup is None or steps is None or warmup <= steps, "schedule.warmup_steps", warmup, hint)


@schema()
class PlanConfig(PretrainConfig):
    """Print what a pretraining run would cost: parameters, arithmetic, memory, budget.

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
class FillMaskConfig:
    """Print the most likely words at each [MASK]."""

    model: UserPath
    """Model folder, or OWNER/NAME on the Hugging Face hub."""
    text: list[str]
    """One or more sentences with a [MASK], given without a flag."""
    top_k: Positive = 5
    """How many words to print for each mask."""

    def __post_init__(self) -> None:
        require(bool(self.text), "text", "[]", "is empty; give a sentence with a [MASK]")
