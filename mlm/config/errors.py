"""The one exception that means "the user's input is wrong": shown as a single line, exit code 2."""

from __future__ import annotations

from collections.abc import Iterable


class InputError(ValueError):
    """Configuration or data the user has to change: one line that names place, value, rule and remedy.

    `key` is the dotted key at fault, by which its file and line are found; empty: none.
    """

    def __init__(self, message: str, key: str = "") -> None:
        super().__init__(message)
        self.key = key


class WrongType(InputError):
    """A value that is not of the type its key takes; on the command line it is named by its flag."""


class DiskError(InputError):
    """Something cannot be written: a full disk, a quota, no permission."""


def require(holds: bool, field: str, value: object, rule: str) -> None:
    """Raise a one-line InputError naming field, value and rule unless the rule holds."""
    if not holds:
        raise InputError(f"{field}={value} {rule}", field.partition(":")[0])


def require_defaults(config: object, names: Iterable[str], rule: str, group: str = "") -> None:
    """Raise InputError when one of these fields differs from its default."""
    for name in names:
        value, default = getattr(config, name), getattr(type(config), name)
        fix = f"{rule}, or set it to {in_words(default)}"
        require(value == default, f"{group}{name}", in_words(value), fix)


def in_words(value: object) -> str:
    """Return a value as one types it: null, true, `1,2` for a list."""
    if isinstance(value, list | tuple):
        return ",".join(map(in_words, value)) or "[]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
