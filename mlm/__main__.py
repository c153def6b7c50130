"""`mlm COMMAND ...`, the same as `python -m mlm COMMAND ...`: one table of all commands."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version
from typing import Any, NamedTuple

from mlm.config.errors import InputError
from mlm.config.values import nearest
from mlm.startup.command import log_to_stderr, one_line_errors, parse_config


class Command(NamedTuple):
    """Where a command lives; nothing of it is imported before it is asked for."""

    help: str
    """What it does, in one line."""
    config: str
    """Its dataclass, as module:name."""
    function: str
    """What takes the configuration and returns the exit status (or None), as module:name."""
    positional: str | None = None
    """The key that is given without a flag."""


_CONFIGS = "mlm.config.experiment"
_PREPARATION = "mlm.config.preparation"

COMMANDS = {
    "prepare": Command(
        "read, tokenize and pack text ahead of training; list or clean what was prepared",
        f"{_PREPARATION}:PrepareConfig",
        "mlm.data.commands:prepare",
    ),
    "tokenizer train": Command(
        "learn a vocabulary and write it as tokenizer.json",
        f"{_PREPARATION}:TokenizerTrainConfig",
        "mlm.data.commands:train",
    ),
    "tokenizer inspect": Command(
        "show what a vocabulary is like, and how it cuts text",
        f"{_PREPARATION}:TokenizerInspectConfig",
        "mlm.data.commands:inspect",
        positional="text",
    ),
    "inspect": Command(
        "show a training batch as text, with the masked places marked",
        f"{_CONFIGS}:InspectConfig",
        "mlm.evaluation.batch_view:inspect",
    ),
    "pretrain": Command(
        "pretrain a masked language model on plain text (also: train.py)",
        f"{_CONFIGS}:PretrainConfig",
        "mlm.training.pretraining:pretrain",
    ),
    "plan": Command(
        "print what a run costs before it starts: parameters, arithmetic, memory, budget",
        f"{_CONFIGS}:PlanConfig",
        "mlm.plan:print_plan",
    ),
    "finetune": Command(
        "fine-tune a model on labelled texts or GLUE (also: finetune.py)",
        "mlm.config.finetune:FinetuneConfig",
        "mlm.training.suite:finetune_all",
    ),
    "predict": Command(
        "label the texts of a file with a fine-tuned model",
        "mlm.config.evaluation:PredictConfig",
        "mlm.evaluation.commands:predict",
    ),
    "embed": Command(
        "turn each text of a file into a vector",
        "mlm.config.evaluation:EmbedConfig",
        "mlm.evaluation.commands:embed",
    ),
    "evaluate": Command(
        "measure a model on any text, or a fine-tuned one on a labelled file",
        "mlm.config.evaluation:EvaluateConfig",
        "mlm.evaluation.commands:evaluate",
    ),
    "fill-mask": Command(
        "print the most likely words at each [MASK]",
        f"{_CONFIGS}:FillMaskConfig",
        "mlm.evaluation.commands:fill_mask",
        positional="text",
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status.

    Raises:
        SystemExit: 2 after a user's mistake, whose line is on stderr.
    """
    words = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    name, rest = split_command(words)
    if name in ("-h", "--help"):
        print(_overview())
        return 0
    if name == "--version":
        print(f"mlm {version('mlm')}")
        return 0
    with one_line_errors("mlm"):
        if name not in COMMANDS:
            fix = nearest(name, list(COMMANDS)) or f"; there are {', '.join(COMMANDS)}"
            raise InputError(f"unknown command {name}{fix}")
    command, prog = COMMANDS[name], f"mlm {name}"
    config = parse_config(_load(command.config), rest, prog=prog, positional=command.positional)
    log_to_stderr()
    with one_line_errors(prog, config):
        if name in ("pretrain", "finetune"):
            _load("mlm.training.tracking:import_tracker")(config.logging)  # first, as train.py does
        status = _load(command.function)(config)
    return status or 0


def split_command(words: list[str]) -> tuple[str, list[str]]:
    """Return the name of a command, which has one word or two, and the words after it."""
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
