"""The one exception that means "the user's input is wrong": shown as a single line, exit code 2."""

from __future__ import annotations

import math
from collections.abc import Iterable


class InputError(ValueError):
    """Configuration or data the user has to change; it names what, where, which value and what to do."""


class DiskError(InputError):
    """Something cannot be written: a full disk, a quota, no permission."""


def require(holds: bool, field: str, value: object, rule: str) -> None:
    """Raise a one-line InputError naming field, value and rule unless the rule holds."""
    if not holds:
        raise InputError(f"{field}={value} {rule}")


def require_finite(group: str, config: object) -> None:
    """Raise InputError when a number of this group of the configuration is NaN or infinite."""
    for name, value in vars(config).items():
        for number in value if isinstance(value, tuple) else (value,):
            finite = not isinstance(number, float) or math.isfinite(number)
            require(finite, f"{group}.{name}", value, "must be finite")


def require_defaults(config: object, names: Iterable[str], rule: str, group: str = "") -> None:
    """Raise InputError when one of these fields has another value than its default."""
    for name in names:
        value, default = getattr(config, name), getattr(type(config), name)
        fix = f"{rule}, or set it to {in_words(default)}"
        require(value == default, f"{group}{name}", in_words(value), fix)


def in_words(value: object) -> str:
    """Return a value as one types it: null, true, `1,2` for a list."""
    if isinstance(value, list | tuple):
        return ",".join(map(in_words, value)) or "[]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
