"""Training: optimizer, schedule, budget, devices, tracking."""

from __future__ import annotations

import re
from dataclasses import field
from typing import Annotated, ClassVar, Literal

from mlm.config.errors import require
from mlm.config.schema import AboveZero, BelowOne, NonNegative, Positive, UpToOne, ZeroOrMore, rule, schema


@schema("optimizer.")
class OptimizerConfig:
    """Optimizer and gradient clipping."""

    name: Literal["adamw", "muon"] = "muon"
    """AdamW, or Muon for the hidden matrices and AdamW for the rest."""
    lr: AboveZero = 4e-3
    """Peak learning rate."""
    muon_lr: AboveZero | None = None
    """The same for Muon's matrices, in AdamW's scale; null: lr."""
    momentum: BelowOne = 0.95
    """Momentum of Muon."""
    weight_decay: ZeroOrMore = 0.01
    """Decoupled decay, on matrices only (no biases, no norms)."""
    betas: tuple[BelowOne, BelowOne] = (0.9, 0.95)
    """Decay of AdamW's first and second moment."""
    eps: AboveZero = 1e-8
    """Added to the root of AdamW's second moment."""
    clip_norm: ZeroOrMore = 1.0
    """Largest norm of the whole gradient; 0: no clipping."""


@schema("schedule.")
class ScheduleConfig:
    """Learning rate over the optimizer steps."""

    name: Literal["linear", "cosine", "wsd", "constant", "decay"] = "wsd"
    """wsd: constant, then decay; decay: only that, no warm-up."""
    warmup_steps: NonNegative | None = None
    """Steps of linear warm-up; null: warmup_fraction of the run."""
    warmup_fraction: BelowOne = 0.05
    """Share of the run spent warming up, in [0, 1)."""
    decay_fraction: UpToOne = 0.4
    """Share of the run that wsd spends decaying, in (0, 1]."""

    def __post_init__(self) -> None:
        hint = "does not go with schedule.name=decay, which starts at the peak; leave it out"
        wanted = self.name != "decay" or not self.warmup_steps
        require(wanted, "schedule.warmup_steps", self.warmup_steps, hint)


DEFAULT_STEPS = 500
"""Length of a run without a bound: some minutes of the default model on two CPU cores."""


def _seconds(text: str) -> float | None:
    """Return the seconds in `90s`, `5m`, `1.5h`, `2d`, `DD:HH:MM:SS` or a number of seconds; else None."""
    unit = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text.strip())
    clock = re.fullmatch(r"(\d+):(\d\d):(\d\d):(\d\d)", text.strip())
    if unit:
        return float(unit[1]) * {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}[unit[2]]
    if clock:
        days, hours, minutes, seconds = map(int, clock.groups())
        return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)
    return None


Duration = Annotated[
    str,
    rule("is not a duration; write 30s, 5m, 1h or DD:HH:MM:SS", lambda text: _seconds(text) is not None),
    rule("must be above 0", lambda text: _seconds(text) != 0),
]


@schema("trainer.")
class BaseTrainerConfig:
    """Bounds, batch and devices of both trainings; names are Lightning's where it has one."""

    max_steps: Positive | None = None
    """Optimizer steps; first bound wins. null: no bound."""
    max_tokens: Positive | None = None
    """Tokens trained on (padding not counted); null: no bound."""
    max_time: Duration | None = None
    """Training time: 30s, 5m, 1h or DD:HH:MM:SS; null: no bound."""
    micro_batch_size: Positive | None = None
    """Rows per device and pass, the rest accumulates; null: all at once."""
    devices: Positive | Literal["auto"] = "auto"
    """Devices a node; auto: as launched, else all accelerators or one CPU process."""
    num_nodes: Positive | Literal["auto"] = "auto"
    """Machines; auto: as launched by torchrun or srun, else 1."""
    strategy: Literal["auto", "ddp", "fsdp2"] = "auto"
    """ddp: all hold the model; fsdp2: each a share (AdamW only); auto: ddp if several."""
    precision: Literal["auto", "32-true", "bf16-mixed", "16-mixed"] = "auto"
    """Arithmetic; auto: bf16-mixed where the hardware has it, else 32-true."""
    accelerator: Literal["auto", "cpu", "gpu", "mps"] = "auto"
    """Kind of device; auto: the best one there is."""
    compile: bool = False
    """Compile the model: pays off on a GPU; on a CPU up to 5 %, after half a minute."""
    gradient_checkpointing: bool = False
    """Keep less for the backward pass and compute it again: less memory, more time."""
    save_every: Positive | None = None
    """Optimizer steps between checkpoints; the newest two are kept."""
    keep_best: NonNegative = 0
    """Checkpoints kept for their validation loss, the lowest."""
    keep_every: Positive | None = None
    """Optimizer steps between checkpoints kept for ever; null: none."""
    keep: Literal["last", "best"] = "last"
    """The model that is saved: the last one, or the best one by validation."""
    early_stopping: Positive | None = None
    """Validations (fine-tuning: epochs) without a better one that end it, with keep=best; null: never."""
    max_skipped_steps: Positive = 10
    """Steps in a row that end the run if their gradients are not finite."""

    batch_key: ClassVar[str] = "global_batch_size"
    """The key of the rows per optimizer step."""

    def __post_init__(self) -> None:
        keeps = self.early_stopping is None or self.keep == "best"
        hint = "keeps the best model: add --trainer.keep best"
        require(keeps, "trainer.early_stopping", self.early_stopping, hint)
        # With auto the number of devices is not known yet: check what must hold for any number of them.
        nodes = 1 if self.num_nodes == "auto" else self.num_nodes
        self.accumulation(1 if self.devices == "auto" else self.devices * nodes)

    def accumulation(self, world_size: int) -> int:
        """Return the passes per optimizer step; raise InputError if the global batch does not divide."""
        rows, unit = self.rows_per_step, (self.micro_batch_size or 1) * world_size
        near = max(rows // unit, 1) * unit
        micro = f"trainer.micro_batch_size={self.micro_batch_size} x " if self.micro_batch_size else ""
        rule = f"must be a multiple of {micro}{world_size} device(s); try {near} or {near + unit}"
        require(rows % unit == 0, f"trainer.{self.batch_key}", rows, rule)
        return rows // unit if self.micro_batch_size else 1

    @property
    def rows_per_step(self) -> int:
        """Rows of an optimizer step over all devices."""
        return int(getattr(self, self.batch_key))

    @property
    def bounds(self) -> tuple[int | str | None, ...]:
        """All that may end the run."""
        return self.max_steps, self.max_tokens, self.max_time

    @property
    def max_seconds(self) -> float | None:
        """`max_time` in seconds."""
        return None if self.max_time is None else _seconds(self.max_time)


@schema("trainer.")
class TrainerConfig(BaseTrainerConfig):
    """Budget, batch and devices; names are Lightning's where it has one."""

    max_steps: Positive | None = None
    """Optimizer steps; first bound wins. null: 500 if no other is set."""
    global_batch_size: Positive = 32
    """Rows per optimizer step, over all devices."""
    val_every: Positive = 100
    """Optimizer steps between validations."""
    save_every: Positive = 100

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bounds == (None, None, None):
            self.max_steps = DEFAULT_STEPS


def check_strategy(trainer: BaseTrainerConfig, optimizer: OptimizerConfig) -> None:
    """Raise InputError for Muon with divided matrices."""
    divided = trainer.strategy == "fsdp2" and optimizer.name == "muon"
    hint = "needs whole matrices, which trainer.strategy=fsdp2 divides; use adamw, or trainer.strategy=ddp"
    require(not divided, "optimizer.name", optimizer.name, hint)


@schema("logging.")
class LoggingConfig:
    """Where metrics go beside metrics.csv and the plots."""

    wandb: Literal["auto", "online", "offline", "disabled"] = "auto"
    """Weights & Biases; auto: $WANDB_MODE, else online when logged in, else offline in the run folder."""
    project: str | None = None
    """Weights & Biases project; null: $WANDB_PROJECT, else mlm."""


@schema("card.")
class CardConfig:
    """Model card."""

    license: str | None = None
    """Licence of the model by its SPDX name, such as apache-2.0; null: not stated."""
    language: list[str] = field(default_factory=list)
    """Languages of the text by their codes: en,de."""
    datasets: list[str] = field(default_factory=list)
    """Data sets by their names on the Hugging Face hub."""
