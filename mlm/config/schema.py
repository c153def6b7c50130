"""Configuration dataclasses checked by pydantic: a mistake is one InputError of one line.

`@schema(group)` makes a dataclass whose annotations say what its fields take; the ranges are named here once.
Values may be typed, or text as on the command line and in YAML (`values.py`).
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import field, fields, is_dataclass
from types import NoneType
from typing import Annotated, Any, TypeVar, cast, dataclass_transform, get_args, get_origin, get_type_hints

from pydantic import AfterValidator, ConfigDict, Field, ValidationError, ValidationInfo, field_validator
from pydantic.dataclasses import dataclass

from mlm.config.errors import InputError, WrongType
from mlm.config.values import alternatives, describe, from_text, nearest, options

C = TypeVar("C")

SETTINGS = ConfigDict(extra="forbid", allow_inf_nan=False, defer_build=True)


def is_encoding(name: str) -> bool:
    """Return whether Python can decode bytes to text by it: base64, hex or rot13 are codecs without text."""
    try:
        return "a".encode(name).decode(name) == "a"
    except (LookupError, ValueError):
        return False


def _check_encoding(name: str) -> str:
    if not is_encoding(name):
        raise ValueError("is not a text encoding that Python knows; try utf-8 or latin-1")
    return name


def _check_separator(text: str) -> str:
    if not text.strip():
        raise ValueError("must be a character other than a space, such as |")
    return text


Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
RowLength = Annotated[int, Field(ge=8)]
AboveZero = Annotated[float, Field(gt=0)]
ZeroOrMore = Annotated[float, Field(ge=0)]
Unit = Annotated[float, Field(ge=0, le=1)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]
UpToOne = Annotated[float, Field(gt=0, le=1)]
InsideUnit = Annotated[float, Field(gt=0, lt=1)]
UserPath = Annotated[str, AfterValidator(os.path.expanduser)]
Encoding = Annotated[str, AfterValidator(_check_encoding)]
Separator = Annotated[str, AfterValidator(_check_separator)]


@dataclass_transform(field_specifiers=(field,))
def schema(group: str = "", *, frozen: bool = False) -> Callable[[type[C]], type[C]]:
    """Make a class a pydantic dataclass that raises InputError.

    Args:
        group: where its fields are in messages if it is built by itself, such as `optimizer.`.
        frozen: its fields cannot be assigned.
    """

    def decorate(cls: type[C]) -> type[C]:
        def read_text(owner: type, value: Any, info: ValidationInfo) -> Any:
            return from_text(value, hints(owner)[str(info.field_name)])

        cls._read_text = field_validator("*", mode="before")(classmethod(read_text))  # type: ignore[attr-defined]
        made: Any = dataclass(cls, config=SETTINGS, frozen=frozen)
        build = made.__init__

        @functools.wraps(build)
        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            try:
                build(self, *args, **kwargs)
            except ValidationError as error:
                raise explain(error, made, group) from None
            finally:  # pydantic puts its own back when it completes a deferred class
                made.__init__ = init

        made.__init__ = init
        return cast(type[C], made)

    return decorate


@functools.cache
def hints(cls: Any) -> dict[str, Any]:
    """Return the annotations of a dataclass with their constraints."""
    return get_type_hints(cls, include_extras=True)


def explain(error: ValidationError, cls: Any, group: str = "") -> InputError:
    """Return the first mistake that pydantic found as one line: key, value and rule.

    Args:
        error: what validating `cls` raised.
        cls: a dataclass of this module.
        group: see `schema`.
    """
    problems = error.errors(include_url=False)
    problems.sort(key=lambda problem: problem["type"] != _UNKNOWN)  # a misspelt key explains a missing one
    cause = problems[0].get("ctx", {}).get("error")
    if isinstance(cause, InputError):
        return cause
    spots = [_spot(cls, problem["loc"], group) for problem in problems]
    same = [problem for problem, spot in zip(problems, spots, strict=True) if spot == spots[0]]
    # Each member of a union reports: a value of the right type tells most.
    problem = next((one for one in same if one["type"] in _RULES), same[0])
    return _describe_problem(problem, *spots[0])


_UNKNOWN = "unexpected_keyword_argument"
_RULES = (
    *("greater_than", "greater_than_equal", "less_than", "less_than_equal"),
    *("finite_number", "value_error"),
)


def _describe_problem(problem: Any, key: str, where: str, annotation: Any) -> InputError:
    kind, value = problem["type"], problem["input"]
    last = problem["loc"][-1] if problem["loc"] else ""
    is_entry = key != where
    names = [one.name for one in fields(annotation)] if is_dataclass(annotation) else []
    if kind == _UNKNOWN:
        fix = nearest(last, names) or f"; there are {', '.join(names)}"
        place = where.rstrip(".: ")
        return WrongType(f"{place}{': ' if place else ''}unknown key {last}{fix}", key)
    if kind == "missing" and isinstance(last, str):
        if is_entry:
            return WrongType(f"{key}: an entry needs the key {last}", key)
        return InputError(f"--{where} is missing; --help says what it takes", key)
    if kind == "yaml":
        return WrongType(f"{where}: {problem['msg']}", key)
    if kind in _RULES:
        rule = str(problem["ctx"]["error"]) if kind == "value_error" else _rule(kind, annotation)
        return InputError(f"{where}={value if str(value).strip() else repr(value)} {rule}", key)
    words: dict[type, str] = {list: "a list", tuple: "a list", dict: "a mapping", NoneType: "null"}
    shown = words.get(type(value), repr(value))
    if names and kind == "dataclass_type":
        return WrongType(f"{where}: an entry is text or a mapping of {', '.join(names)}, not {shown}", key)
    return WrongType(f"{where}: expected {describe(annotation)}, got {shown}", key)


def _spot(cls: Any, loc: tuple[int | str, ...], group: str) -> tuple[str, str, Any]:
    """Return the dotted key of a location, the same with the names in an entry, and the annotation."""
    key = where = ""
    annotation, in_entry = cls, False
    for part in loc:
        kind: Any = options(annotation)[0]
        if isinstance(part, int) and get_origin(kind) is list:
            annotation, in_entry = get_args(kind)[0], True
        elif is_dataclass(kind) and part in (names := hints(cast(Any, kind))):
            annotation = names[part]
            where = f"{where}{': ' if in_entry else '.' if where else ''}{part}"
            key = key if in_entry else where
        else:
            break  # a member of a union or of a pair: the field as a whole is named
    return f"{group}{key}".partition(":")[0], f"{group}{where}", annotation


def _rule(kind: str, annotation: Any) -> str:
    """Return the range of a field in words, and what else it takes."""
    if kind == "finite_number":
        return "must be finite"
    others = (one for one in options(annotation) if one not in (int, float) and get_origin(one) is not tuple)
    *first, last = [word for option in others for word in alternatives(option)] or [""]
    also = f", {', '.join(first)} or {last}" if first else f", or {last}" if last else ""
    bounds = _bounds(annotation)
    low, high = bounds.get("ge", bounds.get("gt")), bounds.get("le", bounds.get("lt"))
    least = f"must be {'at least' if 'ge' in bounds else 'above'} {low}"
    if high is None:
        return f"{least}{also}"
    if low is None or int in options(annotation):
        return f"{f'{least}, and ' if low is not None else 'must be '}at most {high}{also}"
    return f"must lie in {'[' if 'ge' in bounds else '('}{low}, {high}{']' if 'le' in bounds else ')'}{also}"


def _bounds(annotation: Any) -> dict[str, Any]:
    """Return the constraints of an annotation, wherever in it they are."""
    found: dict[str, Any] = {}
    for part in get_args(annotation):
        found |= _bounds(part)
    for constraint in getattr(annotation, "__metadata__", ()):
        for one in getattr(constraint, "metadata", ()):
            found |= {name: getattr(one, name) for name in ("ge", "gt", "le", "lt") if hasattr(one, name)}
    return found
