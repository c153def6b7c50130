"""`mlm COMMAND ...`, the same as `python -m mlm COMMAND ...`: one table of all commands."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version
from typing import Any, NamedTuple

from mlm.config import commands
from mlm.config.errors import InputError
from mlm.config.finetune import FinetuneConfig
from mlm.config.schema import nearest
from mlm.startup.command import check_platform, log_to_stderr, one_line_errors, parse_config


class Command(NamedTuple):
    """A command; its function is not imported before the configuration is checked."""

    config: Any
    """Its dataclass, whose docstring describes it."""
    function: str
    """Takes the configuration and returns the exit status (or None), as module:name."""

    @property
    def help(self) -> str:
        """First line of the docstring of the configuration, without the full stop."""
        return (inspect.getdoc(self.config) or "").partition("\n")[0].rstrip(".")


COMMANDS = {
    "prepare": Command(commands.PrepareConfig, "mlm.data.commands:prepare"),
    "tokenizer train": Command(commands.TokenizerTrainConfig, "mlm.data.commands:train"),
    "tokenizer inspect": Command(commands.TokenizerInspectConfig, "mlm.data.commands:inspect"),
    "inspect": Command(commands.InspectConfig, "mlm.evaluation.batch_view:inspect"),
    "pretrain": Command(commands.PretrainConfig, "mlm.training.pretraining:pretrain"),
    "plan": Command(commands.PlanConfig, "mlm.plan:print_plan"),
    "finetune": Command(FinetuneConfig, "mlm.training.suite:finetune_all"),
    "predict": Command(commands.PredictConfig, "mlm.evaluation.commands:predict"),
    "embed": Command(commands.EmbedConfig, "mlm.evaluation.commands:embed"),
    "export": Command(commands.ExportConfig, "mlm.hub.checkpoint:export"),
    "evaluate": Command(commands.EvaluateConfig, "mlm.evaluation.commands:evaluate"),
    "fill-mask": Command(commands.FillMaskConfig, "mlm.evaluation.commands:fill_mask"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status; a user's mistake is one line and SystemExit(2)."""
    words = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    name, rest = split_command(words)
    with one_line_errors("mlm"):
        check_platform()
        if name in ("-h", "--help"):
            print(_overview())
            return 0
        if name == "--version":
            print(f"mlm {version('mlm')}")
            return 0
        if name not in COMMANDS:
            fix = nearest(name, list(COMMANDS)) or f"; there are {', '.join(COMMANDS)}"
            raise InputError(f"unknown command {name}{fix}")
    return run(name, rest, prog=f"mlm {name}")


def run(name: str, words: Sequence[str] | None = None, *, prog: str) -> int:
    """Run a command of COMMANDS as `main` does; `words`: its command line, None: the one of this process."""
    command = COMMANDS[name]
    config = parse_config(command.config, words, prog=prog)
    log_to_stderr()
    with one_line_errors(prog, config):
        if name in ("pretrain", "finetune"):
            _load("mlm.training.tracking:import_tracker")(config.logging)  # before other heavy imports
        status = _load(command.function)(config)
    return status or 0


def split_command(words: list[str]) -> tuple[str, list[str]]:
    """Return the name of a command, of one word or two, and the words after it."""
    size = 2 if any(name.startswith(f"{words[0]} ") for name in COMMANDS) else 1
    return " ".join(words[:size]), words[size:]


def _overview() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {command.help}" for name, command in COMMANDS.items()]
    usage = "usage: mlm COMMAND [--config FILE] [--KEY VALUE ...]"
    return "\n".join([usage, "", *lines, "", "mlm COMMAND --help lists the keys of a command; mlm --version"])


def _load(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


if __name__ == "__main__":
    sys.exit(main())
