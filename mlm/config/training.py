"""How a model is trained: optimizer, schedule, budget, devices, tracking."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar, Literal

from mlm.config.errors import InputError, require, require_finite
from mlm.config.launch import launched


@dataclass
class OptimizerConfig:
    """Optimizer and gradient clipping."""

    name: Literal["adamw", "muon"] = "muon"
    """AdamW, or Muon for the hidden matrices and AdamW for the rest."""
    lr: float = 4e-3
    """Peak learning rate."""
    muon_lr: float | None = None
    """The same for Muon's matrices, in AdamW's scale; null: lr."""
    momentum: float = 0.95
    """Momentum of Muon."""
    weight_decay: float = 0.01
    """Decoupled decay, on matrices only (no biases, no norms)."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of AdamW's first and second moment."""
    eps: float = 1e-8
    """Added to the root of AdamW's second moment."""
    clip_norm: float = 1.0
    """Largest norm of the whole gradient; 0: no clipping."""

    def __post_init__(self) -> None:
        require_finite("optimizer", self)
        require(self.lr > 0, "optimizer.lr", self.lr, "must be above 0")
        muon_lr = self.muon_lr
        require(muon_lr is None or muon_lr > 0, "optimizer.muon_lr", muon_lr, "must be above 0, or null")
        require(0 <= self.momentum < 1, "optimizer.momentum", self.momentum, "must lie in [0, 1)")
        require(self.weight_decay >= 0, "optimizer.weight_decay", self.weight_decay, "must be at least 0")
        in_range = all(0 <= beta < 1 for beta in self.betas)
        require(in_range, "optimizer.betas", self.betas, "must both lie in [0, 1)")
        require(self.eps > 0, "optimizer.eps", self.eps, "must be above 0")
        require(self.clip_norm >= 0, "optimizer.clip_norm", self.clip_norm, "must be at least 0")


@dataclass
class ScheduleConfig:
    """Learning rate over the optimizer steps."""

    name: Literal["linear", "cosine", "wsd", "constant", "decay"] = "wsd"
    """wsd: constant, then decay; decay: only that, no warm-up."""
    warmup_steps: int | None = None
    """Steps of linear warm-up; null: warmup_fraction of the run."""
    warmup_fraction: float = 0.05
    """Share of the run spent warming up, in [0, 1)."""
    decay_fraction: float = 0.4
    """Share of the run that wsd spends decaying, in (0, 1]."""

    def __post_init__(self) -> None:
        steps = self.warmup_steps
        require(steps is None or steps >= 0, "schedule.warmup_steps", steps, "must be at least 0, or null")
        hint = "does not go with schedule.name=decay, which starts at the peak; leave it out"
        require(self.name != "decay" or not steps, "schedule.warmup_steps", steps, hint)
        warmup, decay = self.warmup_fraction, self.decay_fraction
        require(0 <= warmup < 1, "schedule.warmup_fraction", warmup, "must lie in [0, 1)")
        require(0 < decay <= 1, "schedule.decay_fraction", decay, "must lie in (0, 1]")


DEFAULT_STEPS = 500
"""Length of a run that nobody bounded: some minutes of the default model on two CPU cores."""


@dataclass
class TrainerConfig:
    """Budget, batch and devices; names are Lightning's where it has one."""

    default_steps: ClassVar[int | None] = DEFAULT_STEPS
    """Length of a run without any bound."""

    max_steps: int | None = None
    """Optimizer steps; first bound wins. null: 500 if no other is set."""
    max_tokens: int | None = None
    """Tokens trained on (padding not counted); null: no bound."""
    max_time: str | None = None
    """Training time: 30s, 5m, 1h or DD:HH:MM:SS; null: no bound."""
    global_batch_size: int = 32
    """Rows per optimizer step, over all devices."""
    micro_batch_size: int | None = None
    """Rows per device and pass, the rest accumulates; null: all at once."""
    devices: int | Literal["auto"] = "auto"
    """Devices a node; auto: as launched, else all accelerators or one CPU process."""
    num_nodes: int | Literal["auto"] = "auto"
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
    val_every: int = 100
    """Optimizer steps between validations."""
    save_every: int = 100
    """Optimizer steps between checkpoints; the newest two are kept."""
    keep_best: int = 0
    """Checkpoints kept for their validation loss, the lowest."""
    keep_every: int | None = None
    """Optimizer steps between checkpoints kept for ever; null: none."""
    max_skipped_steps: int = 10
    """Steps in a row that end the run if their gradients are not finite."""

    def __post_init__(self) -> None:
        for name in ("global_batch_size", "val_every", "save_every", "max_skipped_steps"):
            value = getattr(self, name)
            require(value is None or value > 0, f"trainer.{name}", value, "must be at least 1")
        for name in ("max_steps", "max_tokens", "micro_batch_size", "keep_every"):
            value = getattr(self, name)
            require(value is None or value > 0, f"trainer.{name}", value, "must be at least 1, or null")
        require(self.keep_best >= 0, "trainer.keep_best", self.keep_best, "must be at least 0")
        devices, num_nodes = self.devices, self.num_nodes
        for name, count in (("devices", devices), ("num_nodes", num_nodes)):
            require(count == "auto" or count > 0, f"trainer.{name}", count, "must be at least 1, or auto")
        if self.max_steps is None and self.max_tokens is None and self.max_time is None:
            self.max_steps = self.default_steps
        if self.max_time is not None:
            parse_duration(self.max_time)
        # With auto the number of devices is not known yet: check what must hold for any number of them.
        self.accumulation(1 if devices == "auto" else devices * (1 if num_nodes == "auto" else num_nodes))

    def check_launch(self) -> None:
        """Check that the processes a launcher started are as many as asked for, and divide the batch.

        Raises:
            InputError: they are not.
        """
        launch = launched()
        if launch is None:
            return
        for name, wanted, words in (
            ("devices", self.devices, "process(es) a node"),
            ("num_nodes", self.num_nodes, "node(s)"),
        ):
            there = getattr(launch, name)
            hint = f"but {launch.launcher} started {there} {words}; leave it out, or start as many"
            require(wanted in ("auto", there), f"trainer.{name}", wanted, hint)
        self.accumulation(launch.world_size)

    def accumulation(self, world_size: int) -> int:
        """Return the passes per optimizer step on `world_size` devices.

        Raises:
            InputError: the global batch does not divide.
        """
        unit = (self.micro_batch_size or 1) * world_size
        if self.rows_per_step % unit:
            near = max(self.rows_per_step // unit, 1) * unit
            name = "global_batch_size" if self.global_batch_size else "batch_size"
            micro = f"trainer.micro_batch_size={self.micro_batch_size} x " if self.micro_batch_size else ""
            raise InputError(
                f"trainer.{name}={self.rows_per_step} must be a multiple of {micro}"
                f"{world_size} device(s); try {near} or {near + unit}"
            )
        return self.rows_per_step // unit if self.micro_batch_size else 1

    @property
    def rows_per_step(self) -> int:
        """Rows of an optimizer step over all devices."""
        return self.global_batch_size

    @property
    def bounds(self) -> tuple[int | str | None, ...]:
        """All that may end the run."""
        return self.max_steps, self.max_tokens, self.max_time

    @property
    def max_seconds(self) -> float | None:
        """`max_time` in seconds."""
        return None if self.max_time is None else parse_duration(self.max_time)


@dataclass
class FinetuneTrainerConfig(TrainerConfig):
    """Epochs, batch and devices; names are Lightning's where it has one."""

    default_steps: ClassVar[int | None] = None

    max_steps: int | None = None
    """Optimizer steps at most, if fewer than max_epochs has; null: no bound."""
    global_batch_size: int | None = None  # type: ignore[assignment]
    """Another spelling of batch_size; null: batch_size."""
    save_every: int | None = None  # type: ignore[assignment]
    """Optimizer steps between checkpoints; null: an epoch."""
    val_every: int | None = None  # type: ignore[assignment]
    """Not used: every epoch is scored."""
    compile: bool = False
    """Compile the model, for inputs of any length: pays off on a GPU."""
    max_epochs: int = 3
    """Times that every example is trained on."""
    batch_size: int = 32
    """Examples per optimizer step, over all devices."""
    keep: Literal["last", "best"] = "last"
    """The model kept: after the last epoch, or the best one by validation."""
    early_stopping: int | None = None
    """Epochs without a better score after which to stop, with keep=best; null: all epochs."""
    freeze: Literal["embeddings", "encoder"] | int | None = None
    """Not trained: embeddings, a number of lowest layers with them, or the whole encoder; null: nothing."""

    def __post_init__(self) -> None:
        require(self.batch_size > 0, "trainer.batch_size", self.batch_size, "must be at least 1")
        size, default = self.global_batch_size, FinetuneTrainerConfig.batch_size
        agrees = size is None or self.batch_size in (size, default)
        require(agrees, "trainer.global_batch_size", size, f"and trainer.batch_size={self.batch_size} differ")
        super().__post_init__()
        require(self.max_epochs > 0, "trainer.max_epochs", self.max_epochs, "must be at least 1")
        hint = "is not used: every epoch is scored; leave it out"
        require(self.val_every is None, "trainer.val_every", self.val_every, hint)
        patience, layers = self.early_stopping, self.freeze
        is_layers = not isinstance(layers, int) or layers > 0
        require(is_layers, "trainer.freeze", layers, "must be at least 1, embeddings, encoder or null")
        counts = patience is None or patience > 0
        require(counts, "trainer.early_stopping", patience, "must be at least 1, or null")
        keeps = patience is None or self.keep == "best"
        require(keeps, "trainer.early_stopping", patience, "keeps the best epoch: add --trainer.keep best")

    @property
    def rows_per_step(self) -> int:
        """Examples of an optimizer step over all devices."""
        return self.global_batch_size or self.batch_size

    @property
    def bounds(self) -> tuple[int | str | None, ...]:
        """The limits that may end the run."""
        return *super().bounds, self.max_epochs


@dataclass
class LoggingConfig:
    """Where metrics go beside metrics.csv and the plots."""

    wandb: Literal["auto", "online", "offline", "disabled"] = "auto"
    """Weights & Biases; auto: online when logged in, else offline in the run folder."""
    project: str = "mlm"
    """Weights & Biases project."""


_UNIT_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def parse_duration(text: str) -> float:
    """Return the seconds in `90s`, `5m`, `1.5h`, `2d`, `DD:HH:MM:SS` or a plain number of seconds.

    Raises:
        InputError: the text is none of these, or not above 0.
    """
    unit = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text.strip())
    clock = re.fullmatch(r"(\d+):(\d\d):(\d\d):(\d\d)", text.strip())
    if unit:
        seconds = float(unit[1]) * _UNIT_SECONDS[unit[2] or "s"]
    elif clock:
        days, hours, minutes, rest = map(int, clock.groups())
        seconds = float(((days * 24 + hours) * 60 + minutes) * 60 + rest)
    else:
        raise InputError(f"trainer.max_time={text} is not a duration; write 30s, 5m, 1h or DD:HH:MM:SS")
    require(seconds > 0, "trainer.max_time", text, "must be above 0")
    return seconds
