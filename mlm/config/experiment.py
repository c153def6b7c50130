"""One dataclass per command: the whole of what it can be told.

`check_files` of each is called once, after parsing and before anything heavy is imported.
"""

from __future__ import annotations

import difflib
import os
import re
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import ClassVar, Literal

import yaml

from mlm.config.data import CorpusConfig, MaskingConfig, TokenizerConfig, check_sources
from mlm.config.errors import InputError, require
from mlm.config.launch import is_first_process, launched
from mlm.config.model import ModelConfig
from mlm.config.training import LoggingConfig, OptimizerConfig, ScheduleConfig, TrainerConfig

RUN_NAME = "MLM_RUN_NAME"
"""Environment variable that hands the name of the run to the other ranks."""


def is_hub_name(name: str) -> bool:
    """Return whether OWNER/NAME or OWNER/NAME@REVISION names a model of the hub: no OWNER exists here."""
    part = r"[A-Za-z0-9][\w.-]*"
    is_name = re.fullmatch(rf"{part}/{part}(@[\w./-]+)?", name) is not None
    return is_name and not Path(name.partition("/")[0]).exists()


def check_model_folder(key: str, folder: str) -> None:
    """Check that `folder` holds a model, or may be the name of one on the hub.

    Raises:
        InputError: it does not; says where it was looked for, and where a run keeps its model.
    """
    path = Path(folder)
    if (path / "config.json").is_file() or is_hub_name(folder):
        return
    nested = path / "model"
    fix = f"did you mean {nested}?" if (nested / "config.json").is_file() else f"looked in {path.absolute()}"
    raise InputError(f"{key}={folder} is not a model folder (no config.json): {fix}")


def run_to_resume(runs_dir: Path, name: str | None, group: str) -> Path:
    """Return the run folder to resume: the one named, else the newest one that has no summary.

    Args:
        runs_dir: the folder of the run folders.
        name: of the run; None: the newest unfinished run whose configuration has `group`.
        group: a group of keys that only the configurations of this command have.

    Raises:
        InputError: none was named and none is unfinished.
    """
    if name is not None:
        if not (runs_dir / name).is_dir():
            close = difflib.get_close_matches(name, [path.name for path in runs_dir.glob("*/")], 3)
            fix = f"did you mean {' or '.join(close)}?" if close else "a new run needs no --resume"
            raise InputError(f"--resume: there is no run folder {runs_dir / name}; {fix}")
        return runs_dir / name
    configs = [
        path
        for path in runs_dir.glob("*/config.yaml")
        if not (path.parent / "summary.json").exists() and _has_group(path, group)
    ]
    if not configs:
        raise InputError(f"--resume: {runs_dir} holds no unfinished run; name one with --name")
    return max(configs, key=lambda path: path.stat().st_mtime_ns).parent


def find_branch(runs_dir: Path, branch: str) -> tuple[Path, Path]:
    """Return what `branch` names, a run folder or a checkpoint file, and the run folder it belongs to.

    Raises:
        InputError: it is neither; says where it was looked for.
    """
    places = (Path(branch).expanduser(), runs_dir / branch)
    for path in places:
        if (path / "checkpoints").is_dir():
            return path, path
        if path.is_file():
            return path, path.absolute().parent.parent
    close = difflib.get_close_matches(branch, [path.name for path in runs_dir.glob("*/")], 3)
    fix = f"did you mean {' or '.join(close)}?" if close else f"looked for {' and '.join(map(str, places))}"
    raise InputError(f"branch={branch} is neither a run nor a checkpoint: {fix}")


def _has_group(config: Path, group: str) -> bool:
    """Return whether a configuration file has a group of keys; a damaged file has none."""
    try:
        values = yaml.safe_load(config.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return False
    return isinstance(values, dict) and group in values


@dataclass
class RunConfig:
    """What every training command is told about its run."""

    own_group: ClassVar[str] = "masking"
    """A group of keys that only the configurations of this command have."""
    default_stem: ClassVar[str] = "default"
    """What the name of a run begins with when no file is given with --config."""

    name: str | None = None
    """Name of the run; null: <config>-<UTC time>."""
    runs_dir: str = "runs"
    """Folder that holds the run folders."""
    seed: int = 0
    """Decides initial weights, order of rows, masks and dropout."""
    resume: bool | Literal["auto"] = False
    """Go on with a stopped run: name, else the newest unfinished; auto: or start name."""

    def __post_init__(self) -> None:
        require(self.seed >= 0, "seed", self.seed, "must be at least 0")
        self._check_name()
        self.runs_dir = os.path.expanduser(self.runs_dir)

    def choose_name(self, stem: str) -> None:
        """Fix the name of the run, once for all ranks: as given, as handed over, or `stem` and UTC time.

        Raises:
            InputError: a launcher started several processes without a name, so each would make its own.
        """
        self.name = self.name or os.environ.get(RUN_NAME)
        if self.name is None and not self.resume:
            launch = launched()
            number = launch.world_size if launch else int(os.environ.get("WORLD_SIZE", 1))
            alone = is_first_process() and number == 1
            require(
                alone, "name", "null", f"cannot be agreed on by several processes; give --name or ${RUN_NAME}"
            )
            first = f"{stem}-{datetime.now(UTC):%Y%m%d-%H%M%S}"
            names = (first if number == 1 else f"{first}-{number}" for number in count(1))
            self.name = next(name for name in names if not Path(self.runs_dir, name).exists())
        self._check_name()

    def _check_name(self) -> None:
        plain = self.name is None or re.fullmatch(r"(?![.~ ])[^/\\\0\n]{1,150}", self.name)
        require(bool(plain), "name", self.name, "must be a plain folder name of at most 150 characters")

    def check_run(self) -> None:
        """Refuse to run into an existing folder.

        Raises:
            InputError: names the folder.
        """
        folder = Path(self.runs_dir, self.name or "")
        # When the other processes look, the first one may have made the folder already.
        if is_first_process() and not self.resume and folder.exists():
            raise InputError(f"the run folder {folder} exists; take another --name, or use --resume")


@dataclass
class PretrainConfig(RunConfig):
    """Pretrain a masked language model on plain text.

    Example: python train.py --config bert-mini --data.sources my_texts/ --trainer.max_time 5m --name first
    """

    init: str | None = None
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
        super().__post_init__()
        self.init = self.init and os.path.expanduser(self.init)
        positions = self.model.max_position_embeddings
        if positions is not None and self.data.seq_len > positions:
            raise InputError(
                f"data.seq_len={self.data.seq_len} is longer than model.max_position_embeddings={positions}; "
                f"set data.seq_len to at most {positions}, or model.max_position_embeddings to null"
            )
        if self.trainer.strategy == "fsdp2" and self.optimizer.name == "muon":
            raise InputError(
                "optimizer.name=muon needs whole matrices, which trainer.strategy=fsdp2 divides; "
                "take optimizer.name=adamw, or trainer.strategy=ddp"
            )
        warmup, steps = self.schedule.warmup_steps, self.trainer.max_steps
        if warmup is not None and steps is not None and warmup > steps:
            raise InputError(
                f"schedule.warmup_steps={warmup} is longer than the run of trainer.max_steps={steps}: "
                "the peak learning rate would never be reached"
            )

    def choose_name(self, stem: str) -> None:
        """Fix the name of the run; the recipe that goes on with a model needs one, see `RunConfig`."""
        starts = self.init or self.branch or self.resume or type(self) is not PretrainConfig
        require(
            stem != "adapt" or bool(starts), "init", "null", "leaves --config adapt without a model to adapt"
        )
        super().choose_name(stem)

    def check_files(self) -> None:
        """Check that everything named is there, and the run folder is not."""
        self.trainer.check_launch()
        self.check_run()
        if self.init is not None and not self.resume:  # checkpoints hold the weights
            check_model_folder("init", self.init)
        if self.branch is not None and not self.resume:
            find_branch(Path(self.runs_dir), self.branch)
        check_sources(self.data.sources)
        self.tokenizer.check_file()


@dataclass
class PlanConfig(PretrainConfig):
    """Print what a pretraining run would cost: parameters, arithmetic, memory, budget.

    Example: mlm plan --config bert-mini --model bert-base --trainer.max_tokens 1e9
    """

    shipped_kind: ClassVar[str] = "pretrain"
    """Sub-folder of the shipped files that `--config` searches."""

    def check_files(self) -> None:
        """Check that the tokenizer is there; the text need not be."""
        hint = "is not looked into by this command; give its shape with --model and leave it out"
        require(self.init is None, "init", self.init, hint)
        self.tokenizer.check_file()


@dataclass
class InspectConfig(PretrainConfig):
    """Show a training batch as text, with the predicted tokens marked; nothing is trained.

    Example: mlm inspect --config bert-mini --data.sources my_texts/ --masking.strategy span --step 100
    """

    shipped_kind: ClassVar[str] = "pretrain"
    """Sub-folder of the shipped files that `--config` searches."""

    step: int = 0
    """The optimizer step whose batch is shown."""
    rows: int = 3
    """How many of its rows."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("step", "rows"):
            require(getattr(self, name) >= 0, name, getattr(self, name), "must be at least 0")

    def check_run(self) -> None:
        """Accept any run folder: none is made."""


@dataclass
class FillMaskConfig:
    """Print the most likely words at each [MASK]."""

    model: str
    """Model folder, or OWNER/NAME on the Hugging Face hub."""
    text: list[str]
    """One or more sentences with a [MASK], given without a flag."""
    top_k: int = 5
    """How many words to print for each mask."""

    def __post_init__(self) -> None:
        self.model = os.path.expanduser(self.model)
        require(self.top_k > 0, "top_k", self.top_k, "must be at least 1")
        require(bool(self.text), "text", "[]", "is empty; give a sentence with a [MASK]")

    def check_files(self) -> None:
        """Check that the model is there."""
        check_model_folder("model", self.model)
