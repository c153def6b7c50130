"""The `--help` text: a line for most keys, in brackets what the key takes and its default.

jsonargparse collects keys, defaults and attribute docstrings from the dataclasses; here they are laid out.
"""

from __future__ import annotations

import inspect
import json
import shutil
import textwrap
from argparse import Action
from functools import partial
from typing import Any

from jsonargparse import ArgumentParser, DefaultHelpFormatter, set_parsing_settings

from mlm.config.files import shipped_names
from mlm.config.keys import Keys
from mlm.config.values import alternatives

RULES = """
Every key is a flag, and may stand in a YAML file too. Flags win over files, later ones over earlier ones;
--GROUP FILE reads a group from a file of its own. Lists: a,b. Numbers: 1e-4, 1_000. [what it takes = default]
"""

SHORT = {"a whole number": "int", "a number": "float", "a list": "list", "a mapping": "mapping"}


def format_help(cls: type, prog: str, keys: Keys, positional: str | None = None) -> str:
    """Return the help text of a command.

    Args:
        cls: dataclass of the command.
        prog: name of the program in messages.
        keys: the keys of `cls`.
        positional: the key that is given without a flag.
    """
    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    words = f" {positional.upper()} ..." if positional else ""
    parser = ArgumentParser(
        prog=prog,
        usage=f"%(prog)s [--config FILE] [--KEY VALUE ...]{words}",
        description=f"{inspect.getdoc(cls)}\n{RULES}",
        formatter_class=partial(_OneLine, types=keys.types),  # type: ignore[arg-type]
    )
    shipped = ", ".join(shipped_names(keys.kind))
    shipped = f" or the name of a shipped one ({shipped})" if shipped else ""
    parser.add_argument("-c", "--config", metavar="FILE", help=f"YAML file{shipped}; may be repeated")
    parser.add_class_arguments(cls, help="This command")
    return parser.format_help()


class _OneLine(DefaultHelpFormatter):
    """Puts a key and its help on one line where the terminal allows."""

    def __init__(self, prog: str, types: dict[str, Any]) -> None:
        columns = shutil.get_terminal_size((120, 50)).columns
        super().__init__(prog, indent_increment=1, max_help_position=34, width=min(columns, 120))
        self.types = types

    def add_argument(self, action: Action) -> None:
        """Leave out the flags that jsonargparse would add of its own."""
        if action.dest in self.types or action.dest in ("help", "config"):
            super().add_argument(action)

    def _format_action_invocation(self, action: Action) -> str:
        ours = action.dest in self.types
        return f"--{action.dest}" if ours else super()._format_action_invocation(action)

    def _expand_help(self, action: Action) -> str:
        if action.dest not in self.types:
            return action.help or ""
        default = ", required" if action.required else f" = {_shown(action.default)}"
        kind = "|".join(SHORT.get(word, word) for word in alternatives(self.types[action.dest]))
        kind = kind.replace("true|false", "bool")
        # A bracket stays on one line: its spaces are no places to break.
        return f"{action.help} " + f"[{kind}{default}]".replace(" ", "\xa0")

    def _split_lines(self, text: str, width: int) -> list[str]:
        lines = textwrap.wrap(text, width, break_on_hyphens=False, break_long_words=False)
        return [line.replace("\xa0", " ") for line in lines]

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text


def _shown(default: Any) -> str:
    if isinstance(default, list | tuple):
        return ",".join(map(_shown, default))
    if isinstance(default, dict):
        return _shown(next(iter(default.values())))
    return default if isinstance(default, str) else json.dumps(default)
