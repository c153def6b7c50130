"""Whether everything a configuration names exists: models, texts, places for output, processes of a launcher.

`check_files` and `check_run` of a configuration are called once, before anything heavy is imported.
"""

from __future__ import annotations

import glob
import os
import re
from pathlib import Path
from typing import Any

from mlm.config import commands
from mlm.config.data import HUB_PREFIX, HubName, SourceConfig, TokenizerConfig
from mlm.config.errors import InputError, require
from mlm.config.files import find_config
from mlm.config.finetune import SCRATCH, FinetuneConfig
from mlm.config.training import BaseTrainerConfig
from mlm.launch import is_first_process, launched
from mlm.startup.suite import check_recipes, check_same, continues_by_itself, is_unbegun


def check_files(config: Any) -> None:
    """Raise InputError unless everything that a configuration names exists."""
    if isinstance(config, FinetuneConfig):
        _check_finetuning(config)
    elif isinstance(config, commands.PlanConfig):
        hint = "is not read by this command; give its shape with --model and leave it out"
        require(config.init is None, "init", config.init, hint)
        check_tokenizer(config.tokenizer)
    elif isinstance(config, commands.PretrainConfig):
        _check_pretraining(config)
    elif isinstance(config, commands.TokenizerInspectConfig):
        check_tokenizer(TokenizerConfig(path=config.path))
        check_sources(config.sources)
    elif isinstance(config, commands.TokenizerTrainConfig):
        check_sources(config.data.sources)
        there = Path(config.output, "tokenizer.json").exists()
        require(not there, "output", config.output, "holds a tokenizer.json already; name another folder")
        _check_folder("output", config.output)
    elif isinstance(config, commands.PrepareConfig):
        if not config.list and config.clean is None:
            check_sources(config.data.sources)
            check_sources(config.data.validation, "data.validation")
            check_tokenizer(config.tokenizer)
    elif isinstance(config, commands.ExportConfig):
        hint = "is not a checkpoint; name a file such as runs/NAME/checkpoints/step-00000100.ckpt"
        require(is_checkpoint(config.model), "model", config.model, hint)
        _check_folder("output", config.output)
    elif hasattr(config, "model"):
        _check_inference(config)


def _check_pretraining(config: commands.PretrainConfig) -> None:
    check_launch(config.trainer)
    if not config.resume:  # checkpoints hold the weights
        starts = not config.init_required or config.init is not None or config.branch is not None
        require(starts, "init_required", "true", "needs a model to adapt; give one with --init")
        if config.init is not None:
            check_model_folder("init", config.init)
    check_sources(config.data.sources)
    check_sources(config.data.validation, "data.validation")
    check_tokenizer(config.tokenizer)


def _check_finetuning(config: FinetuneConfig) -> None:
    check_launch(config.trainer)
    if config.model == SCRATCH:
        if not is_model(str(config.model_config)):
            find_config(str(config.model_config), "model")
        tokenizer = str(config.tokenizer)
        there = is_hub_name(tokenizer) or Path(tokenizer).exists()
        require(there, "tokenizer", tokenizer, f"is neither file nor folder; looked in {os.getcwd()}")
    elif config.model is not None:
        check_model_folder("model", config.model)
    for name in ("train", "validation", "test"):
        _check_text_files(f"data.{name}", getattr(config.data, name))
    is_there = config.glue_dir is None or Path(config.glue_dir).is_dir()
    require(is_there, "glue_dir", config.glue_dir, f"is not a folder; looked in {os.getcwd()}")
    check_recipes(config)


def _check_inference(
    config: commands.FillMaskConfig | commands.EvaluateConfig | commands.InferenceConfig,
) -> None:
    check_model_folder("model", config.model)
    if isinstance(config, commands.FillMaskConfig):
        return
    _check_text_files("input", config.input)
    inputs = config.input or []
    if isinstance(config, commands.EvaluateConfig) and config.input is None:
        check_sources(config.data.sources)
        inputs = [source.path for source in config.data.sources]
    inputs = [*inputs, *(file for name in inputs for file in glob.glob(name, recursive=True))]
    is_array = not isinstance(config, commands.EmbedConfig) or config.output.endswith(".npy")
    require(is_array, "output", config.output, "must end in .npy, the format it has")
    if config.output is not None:
        check_output(config.output, *inputs)
    launch = launched()
    if launch is not None and isinstance(config, commands.PredictConfig):
        hint = "does not divide a file; start the processes with torchrun, or give --devices"
        require(launch.launcher == "torchrun" or launch.world_size == 1, "srun", launch.world_size, hint)
        hint = f"conflicts with torchrun, which started {launch.devices}; leave it out"
        require(config.devices in ("auto", launch.devices), "devices", config.devices, hint)


def check_run(config: object) -> None:
    """Raise InputError if the run folder is another run's; a suite may continue its own."""
    looks_only = isinstance(config, commands.PlanConfig | commands.InspectConfig)
    if looks_only or not isinstance(config, commands.RunConfig):
        return
    folder = Path(config.runs_dir, config.name or "")
    if isinstance(config, FinetuneConfig) and continues_by_itself(config):
        if (folder / "config.yaml").exists():
            return check_same(config, folder)
        if is_unbegun(folder):
            return
    # When the other processes look, the first one may have made the folder already.
    if is_first_process() and not config.resume:
        if folder.exists():
            raise InputError(f"the run folder {folder} exists; take another --name, or use --resume")
        _check_folder("runs_dir", config.runs_dir)


def check_launch(trainer: BaseTrainerConfig) -> None:
    """Raise InputError unless as many processes were started as asked for, and they divide the batch."""
    launch = launched()
    if launch is None:
        return
    for name, words in (("devices", "process(es) a node"), ("num_nodes", "node(s)")):
        wanted, there = getattr(trainer, name), getattr(launch, name)
        hint = f"but {launch.launcher} started {there} {words}; leave it out, or start as many"
        require(wanted in ("auto", there), f"trainer.{name}", wanted, hint)
    trainer.accumulation(launch.world_size)


def is_hub_name(name: str) -> bool:
    """Return whether OWNER/NAME or OWNER/NAME@REVISION names a model of the hub: no OWNER exists here."""
    part = r"[A-Za-z0-9][\w.-]*"
    is_name = re.fullmatch(rf"{part}/{part}(@[\w./-]+)?", name) is not None
    return is_name and not Path(name.partition("/")[0]).exists()


def is_model(name: str) -> bool:
    """Return whether a name means a model folder or checkpoint, here or on the hub, rather than a shape."""
    return is_hub_name(name) or is_checkpoint(name) or Path(name, "config.json").is_file()


def is_checkpoint(name: str) -> bool:
    """Return whether a name is that of a checkpoint file."""
    return name.endswith(".ckpt") and Path(name).is_file()


def check_model_folder(key: str, folder: str) -> None:
    """Raise InputError unless `folder` holds a model, or may be the name of one on the hub."""
    path = Path(folder)
    if is_model(folder):
        return
    nested = path / "model"
    saved = sorted([*path.glob("step-*.ckpt"), *path.glob("checkpoints/step-*.ckpt")])
    meant = nested if (nested / "config.json").is_file() else saved[-1] if saved else None
    fix = f"did you mean {meant}?" if meant else f"looked in {path.absolute()}"
    raise InputError(f"{key}={folder} is not a model folder (no config.json): {fix}", key)


def check_sources(sources: list[SourceConfig], key: str = "data.sources") -> None:
    """Raise InputError unless, without reading them, files exist and hub names are well formed."""
    for source in sources:
        if source.path.startswith(HUB_PREFIX):
            HubName.parse(source.path, key)
        elif source.is_local and not (os.path.exists(source.path) or glob.glob(source.path, recursive=True)):
            raise InputError(
                f"{key}: no file, folder or glob match {source.path!r}; looked in {os.getcwd()}; "
                "a hub data set is written hub:OWNER/NAME, a name with a comma {path: 'a,b'}",
                key,
            )


def check_tokenizer(config: TokenizerConfig) -> None:
    """Raise InputError unless the tokenizer to reuse and the file of words to add exist."""
    for name in ("add_tokens", "path"):
        given = getattr(config, name)
        if given is not None:
            path = Path(given)
            is_folder = name == "path" and path.is_dir()
            files = [path / file for file in ("tokenizer.json", "vocab.txt")] if is_folder else [path]
            there = any(file.is_file() for file in files)
            require(there, f"tokenizer.{name}", f"{given}:", f"there is no file {files[0].absolute()}")


def _check_text_files(key: str, paths: list[str] | None) -> None:
    """Raise InputError unless local files, folders and globs exist and hub names are well formed."""
    for path in paths or ():
        if path.startswith(HUB_PREFIX):
            HubName.parse(path, key)
        elif "://" not in path:
            there = os.path.exists(path) or bool(glob.glob(path, recursive=True))
            require(there, key, path, f"is neither file, folder nor glob; looked in {os.getcwd()}")
            readable = os.access(path, os.R_OK) or not os.path.exists(path)
            require(readable, key, path, "cannot be read: no permission")


def _check_folder(key: str, path: str) -> None:
    """Raise InputError unless a folder can be created, or written into if it exists."""
    parents = (Path(path).absolute(), *Path(path).absolute().parents)
    existing = next(parent for parent in parents if os.path.lexists(parent))
    require(existing.is_dir(), key, path, f"cannot be a folder: {existing} is none; name another")
    writable = os.access(existing, os.W_OK)
    require(writable, key, path, f"cannot be written: no permission in {existing}; name another")


def check_output(path: str, *inputs: str) -> None:
    """Check, before any work, that a file can be written, and that nothing is lost by it.

    `inputs` are files that are read, or folders that contain them; links count as their targets.
    """
    file = Path(os.path.realpath(path))
    try:
        require(file.parent.is_dir(), "output", path, f"cannot be written: there is no folder {file.parent}")
        require(not file.is_dir(), "output", path, "is a folder; name a file")
        is_there = file.exists()
        require(not is_there or file.is_file(), "output", path, "is a device or a pipe; name a file")
        for name in filter(os.path.exists, inputs if is_there else ()):
            is_input = os.path.samefile(name, file) or Path(os.path.realpath(name)) in file.parents
            hint = f"is an input ({name}), which would be lost; name another"
            require(not is_input, "output", path, hint)
        trial = file.with_name(f".{file.name}.{os.getpid()}")
        trial.touch()
        trial.unlink()
    except OSError as error:
        fault = f"cannot be written: {error.strerror}; name another place"
        raise InputError(f"output={path} {fault}", "output") from None
