"""Weights & Biases: whether a run is tracked, the tracked run, and how far it got."""

from __future__ import annotations

import glob
import json
import logging
import netrc
import os
import secrets
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from mlm.config.commands import PretrainConfig
from mlm.config.errors import InputError, require
from mlm.config.finetune import FinetuneConfig
from mlm.config.parse import to_plain
from mlm.config.training import LoggingConfig
from mlm.files import write_text
from mlm.launch import is_first_process

if TYPE_CHECKING:  # loading Lightning takes seconds, and wandb is to be imported before torch
    import lightning.pytorch as pl

CONNECT_TIMEOUT_S = 3.0
"""How long the tracking server may take to answer."""
TIMEOUTS: dict[str, Any] = {"init_timeout": 20.0, "finish_timeout": 20.0}
"""Seconds for opening a run, and for the upload at its end; the rest stays in the run folder."""
FORBIDDEN = "/\\#?%:;,'"
"""Characters that names of projects and runs cannot have."""
NOT_LOGGED_IN = "not logged in (wandb login)"
RUN_ID, NAMES, NEWEST_STEP = "run-id.txt", "names.json", "newest-step.txt"
"""Files in the folder `wandb` of a run."""
NAMED_BY = {name: f"WANDB_{name.upper()}" for name in ("entity", "project", "name", "notes", "tags")}
NAMED_BY["group"] = "WANDB_RUN_GROUP"
"""Environment variables of wandb, by the argument of `wandb.init` that they stand for."""
NOT_USED = ("WANDB_LOG_MODEL", "WANDB_WATCH")

log = logging.getLogger(__name__)


def resolve_tracking(config: LoggingConfig) -> LoggingConfig:
    """Decide between online, offline and disabled, without a prompt and within seconds.

    InputError: online is configured and impossible, or $WANDB_MODE is not a mode.
    """
    wanted, place = _wanted_mode(config)
    names = {name: os.environ.get(name, "") for name in ("WANDB_PROJECT", "WANDB_RUN_ID")}
    names |= {"logging.project": config.project, "WANDB_PROJECT": ""} if config.project else {}
    for name, value in names.items() if wanted != "disabled" else ():
        rule = f"cannot contain any of {FORBIDDEN}, by the rules of Weights & Biases"
        require(not {*value} & {*FORBIDDEN}, name, value, rule)
    if wanted in ("auto", "online"):
        obstacle = _obstacle_to_tracking() if is_first_process() else "another process tracks"
        if obstacle and wanted == "online":
            raise InputError(f"{place}=online: {obstacle}; take offline, and upload with `wandb sync`")
        if obstacle and obstacle != NOT_LOGGED_IN:
            log.warning("Weights & Biases: %s; tracking offline", obstacle)
        wanted = "offline" if obstacle else "online"
    unused = [name for name in NOT_USED if os.environ.get(name)]
    if unused and wanted != "disabled" and is_first_process():
        log.warning("%s has no effect here: models and gradients are not uploaded", " and ".join(unused))
    return replace(config, wandb=wanted)  # type: ignore[arg-type]


def _wanted_mode(config: LoggingConfig) -> tuple[str, str]:
    """Return the mode and where it comes from: the configuration, else wandb's environment variables."""
    if config.wandb != "auto":
        return config.wandb, "logging.wandb"
    if os.environ.get("WANDB_DISABLED", "").lower() in ("1", "true", "yes", "on"):
        return "disabled", "WANDB_DISABLED"
    mode = os.environ.get("WANDB_MODE") or "auto"
    mode = "offline" if mode == "dryrun" else mode
    if mode not in ("auto", "online", "offline", "disabled"):
        raise InputError(f"WANDB_MODE={mode} is none of online, offline, disabled")
    return mode, "WANDB_MODE"


def _obstacle_to_tracking() -> str | None:
    import wandb

    os.environ.setdefault("WANDB_SILENT", "true")
    settings = wandb.setup().settings
    server = urlsplit(settings.base_url)
    known = bool(settings.api_key or os.environ.get("WANDB_API_KEY"))
    with suppress(OSError, netrc.NetrcParseError):
        known = known or bool(netrc.netrc().authenticators(server.hostname or ""))
    if not known:
        return NOT_LOGGED_IN
    try:
        port = server.port or (443 if server.scheme == "https" else 80)
        socket.create_connection((server.hostname or "", port), CONNECT_TIMEOUT_S).close()
        return None if wandb.login(prompt=False) else NOT_LOGGED_IN
    except OSError:
        return f"{server.hostname} cannot be reached"
    except Exception as error:  # an invalid key, for example, must not end the run
        return " ".join(str(error).split())[:120]


def import_tracker(config: LoggingConfig) -> None:
    """Import what a tracked run needs, if this process tracks; call it before torch is imported.

    wandb's classes search every imported module for documentation: a second less while these are few.
    """
    if is_first_process() and _wanted_mode(config)[0] != "disabled":
        with suppress(ImportError):  # an inner module that wandb.init imports anyway
            import wandb.sdk.launch.inputs.internal  # noqa: F401


def build_tracker(
    config: PretrainConfig | FinetuneConfig,
    folder: Path,
    facts: dict[str, Any] | None = None,
    group: str | None = None,
    title: str | None = None,
) -> Any:
    """Return a Weights & Biases logger, or False when this process does not track.

    Its id and names are kept in the run folder, so that a resumed run continues the same tracked run.
    Configuration and `facts` are stored with it; its name is `title`, by default that of the folder.
    """
    if config.logging.wandb == "disabled" or not is_first_process():
        return False
    os.environ.setdefault("WANDB_SILENT", "true")
    import wandb
    from lightning.pytorch.loggers import WandbLogger

    start = partial(
        wandb.init,
        **_run_names(folder, config.logging.project, group, title),
        dir=os.environ.get("WANDB_DIR") or folder,
        config={**to_plain(config), **(facts or {})},
        settings=wandb.Settings(**TIMEOUTS, silent=True, console="off"),
    )
    try:
        online = config.logging.wandb == "online"
        run = start(mode="online", resume="allow") if online else start(mode="offline")
    except (wandb.errors.CommError, wandb.errors.UsageError) as error:
        # The server answered before, so this is rare; training must not wait for it.
        log.warning("Weights & Biases: %s; tracking offline", " ".join(str(error).split())[:120])
        run = start(mode="offline")
    for axis in ("trainer/global_step", "tokens", "hours"):
        run.define_metric(axis)
    run.define_metric("*", step_metric="trainer/global_step", step_sync=True)
    return WandbLogger(experiment=run)


def _run_names(folder: Path, project: str | None, group: str | None, title: str | None) -> dict[str, Any]:
    """Return id, name, project and so on of the tracked run, and store them for the run that resumes it.

    The configuration wins over wandb's environment variables, these over what an earlier start stored.
    """
    run_id, stored = folder / "wandb" / RUN_ID, folder / "wandb" / NAMES
    known = json.loads(stored.read_text(encoding="utf-8")) if stored.exists() else {}
    known |= {name: os.environ[key] for name, key in NAMED_BY.items() if os.environ.get(key)}
    if not run_id.exists():
        given = os.environ.get("WANDB_RUN_ID") if title is None else None  # parts of a suite need their own
        write_text(run_id, given or secrets.token_hex(4))
    write_text(stored, json.dumps(known))
    if "tags" in known:
        known["tags"] = [tag.strip() for tag in known["tags"].split(",")]
    known |= {name: value for name, value in (("project", project), ("name", title)) if value}
    names = {"name": folder.name, "project": "mlm", "group": group}
    return {"id": run_id.read_text(encoding="utf-8").strip(), **names, **known}


def tracked_folders(folder: Path) -> tuple[list[Path], list[Path]]:
    """Return the folders that wandb wrote for the run of a run folder: offline and online, oldest first."""
    run_id, place = folder / "wandb" / RUN_ID, Path(os.environ.get("WANDB_DIR") or folder, "wandb")
    if not run_id.exists():
        return [], []
    end = glob.escape(run_id.read_text(encoding="utf-8").strip())
    return sorted(place.glob(f"offline-run-*-{end}*")), sorted(place.glob(f"run-*-{end}*"))


def tracked_step(folder: Path) -> int:
    """Return the newest step that the tracked run of a run folder has, -1 if none."""
    try:
        return int((folder / "wandb" / NEWEST_STEP).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return -1


def track_rows(loggers: Sequence[Any], folder: Path, rows: list[dict[str, Any]], newest: int) -> int:
    """Give rows of the metrics table to the tracked run; return the newest step that it has.

    A tracked run cannot be cut: steps up to `newest`, which a resumed run repeats, are left out.
    """
    new = [row for row in rows if row["step"] > newest] if loggers else []
    for row in new:
        shown = {name: value for name, value in row.items() if name != "step"}
        shown |= {"trainer/global_step": row["step"], "hours": row["elapsed_s"] / 3600}
        loggers[0].experiment.log(shown, step=row["step"], commit=True)
    if not new:
        return newest
    with suppress(InputError):  # a full disk: the next row is tracked twice, which the tracker ignores
        write_text(folder / "wandb" / NEWEST_STEP, str(new[-1]["step"]))
    return int(new[-1]["step"])


def end_tracking(trainer: pl.Trainer) -> None:
    """Finish the tracked run, so that the next one of this process is separate."""
    if trainer.is_global_zero and trainer.loggers:
        import wandb

        wandb.finish()


def pretraining_run(model: str) -> str:
    """Return the name of the run that pretrained a model, or of the model itself if its run is unknown."""
    run = Path(model).parent
    try:
        summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return Path(model).name
    earlier = summary.get("init") if "task" in summary else None
    return pretraining_run(earlier) if earlier else run.name


def track_table(
    loggers: Sequence[Any], name: str, columns: Sequence[str], rows: list[list[Any]], picture: Path
) -> None:
    """Give a table and the picture of it to the tracked run, if there is one."""
    if loggers:
        import wandb

        table, image = wandb.Table(columns=list(columns), data=rows), wandb.Image(str(picture))
        loggers[0].experiment.log({name: table})
        loggers[0].experiment.log({f"plots/{name}": image})
