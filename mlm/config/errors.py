"""The one exception that means "the user's input is wrong": shown as a single line, exit code 2."""

from __future__ import annotations

import math


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
