"""Configuration dataclasses checked by pydantic: a mistake is one InputError of one line.

`@schema(group)` makes a dataclass whose annotations say what its fields take; the ranges are named here once.
Values may be typed, or text as on the command line and in YAML, which is split by the annotation:

- whole numbers take `1e6`, `1_000` and `10.0`
- `null` and `none` are None where a field may be
- lists take `a,b`, `[a,b]` and YAML lists; a comma inside braces, or of an existing file, does not split
- an entry that is a dataclass takes a mapping of its fields; plain text is its first field

Everything else (true and yes, `1e-4`) pydantic reads by itself.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, Field, field, fields, is_dataclass
from decimal import Decimal
from difflib import get_close_matches
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    TypeVar,
    Union,
    cast,
    dataclass_transform,
    get_args,
    get_origin,
    get_type_hints,
)

from pydantic import AfterValidator, ConfigDict, ValidationError, ValidationInfo, field_validator
from pydantic.dataclasses import dataclass
from pydantic_core import PydanticCustomError

from mlm.config.errors import InputError, WrongType
from mlm.config.files import Tree, parse_yaml, read_tree

C = TypeVar("C")

SETTINGS = ConfigDict(extra="forbid", allow_inf_nan=False, defer_build=True)
NULLS = ("null", "none")
TRUTHS = ("true", "yes", "on", "1", "false", "no", "off", "0")


def rule(words: str, holds: Callable[[Any], object]) -> AfterValidator:
    """Return the constraint of an annotation: a message and what a value has to fulfil."""

    def check(value: Any) -> Any:
        if not holds(value):
            raise ValueError(words)
        return value

    return AfterValidator(check)


def _is_encoding(name: str) -> bool:
    """Return whether Python decodes bytes to text by it: base64, hex and rot13 are codecs too."""
    try:
        return "a".encode(name).decode(name) == "a"
    except (LookupError, ValueError):
        return False


Positive = Annotated[int, rule("must be at least 1", lambda value: value >= 1)]
NonNegative = Annotated[int, rule("must be at least 0", lambda value: value >= 0)]
RowLength = Annotated[int, rule("must be at least 8", lambda value: value >= 8)]
AboveZero = Annotated[float, rule("must be above 0", lambda value: value > 0)]
ZeroOrMore = Annotated[float, rule("must be at least 0", lambda value: value >= 0)]
Unit = Annotated[float, rule("must be in [0, 1]", lambda value: 0 <= value <= 1)]
BelowOne = Annotated[float, rule("must be in [0, 1)", lambda value: 0 <= value < 1)]
UpToOne = Annotated[float, rule("must be in (0, 1]", lambda value: 0 < value <= 1)]
InsideUnit = Annotated[float, rule("must be in (0, 1)", lambda value: 0 < value < 1)]
UserPath = Annotated[str, AfterValidator(os.path.expanduser)]
Encoding = Annotated[
    str, rule("is not a text encoding that Python knows; try utf-8 or latin-1", _is_encoding)
]
Separator = Annotated[str, rule("must be a character other than a space, such as |", str.strip)]


@dataclass_transform(field_specifiers=(field,))
def schema(group: str = "") -> Callable[[type[C]], type[C]]:
    """Make a class a pydantic dataclass that raises InputError.

    `group` is where its fields are in messages if it is built by itself, such as `optimizer.`.
    """

    def decorate(cls: type[C]) -> type[C]:
        def read_text(owner: type, value: Any, info: ValidationInfo) -> Any:
            return from_text(value, hints(owner)[str(info.field_name)])

        cls._read_text = field_validator("*", mode="before")(classmethod(read_text))  # type: ignore[attr-defined]
        made: Any = dataclass(cls, config=SETTINGS)
        build = made.__init__

        @functools.wraps(build)
        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            try:
                build(self, *args, **kwargs)
            except ValidationError as error:
                raise _explain(error, made, group) from None
            finally:  # pydantic puts its own back when it completes a deferred class
                made.__init__ = init

        made.__init__ = init
        return cast(type[C], made)

    return decorate


@functools.cache
def hints(cls: Any) -> dict[str, Any]:
    """Return the annotations of a dataclass with their constraints."""
    return get_type_hints(cls, include_extras=True)


def walk(cls: Any, prefix: str = "") -> Iterator[tuple[str, Field[Any], Any]]:
    """Yield dotted key, field and annotation of all keys and groups; a group comes before its keys."""
    for one in fields(cls):
        key, annotation = f"{prefix}{one.name}", hints(cls)[one.name]
        yield key, one, annotation
        if is_dataclass(annotation):
            yield from walk(annotation, f"{key}.")


def default_of(one: Field[Any]) -> Any:
    """Return the default of a field; MISSING if it is required."""
    return one.default if one.default_factory is MISSING else one.default_factory()


def options(annotation: Any) -> tuple[Any, ...]:
    """Return the types that an annotation allows, without constraints."""
    if get_origin(annotation) is Annotated:
        return options(annotation.__origin__)
    if get_origin(annotation) in (Union, UnionType):
        return tuple(one for option in get_args(annotation) for one in options(option))
    return (annotation,)


def from_text(value: Any, annotation: Any) -> Any:
    """Return `value` with text split as `annotation` asks for; pydantic reads and checks the rest."""
    allowed = options(annotation)
    is_text = isinstance(value, str)
    if is_text and NoneType in allowed and value.lower() in NULLS:
        return None
    for option in allowed:
        origin, args = get_origin(option) or option, get_args(option)
        if origin is Literal and value in args:
            return value
        if origin in (list, tuple):
            return _entries(value, origin, args)
        if is_text and option is int:
            return _whole(value)
        if is_text and is_dataclass(option):
            return {fields(option)[0].name: value}
    return value


def _entries(value: Any, origin: Any, args: tuple[Any, ...]) -> Any:
    """Return the entries of a list or pair; a value that cannot be one stays as it is."""
    entries = _split(value) if isinstance(value, str) and not _is_path(value, args[0]) else value
    if isinstance(value, str | dict) and not isinstance(entries, list):
        entries = [value]
    if not isinstance(entries, list | tuple) or (origin is tuple and len(entries) != len(args)):
        return value
    types = args if origin is tuple else args * len(entries)
    return [from_text(entry, one) for entry, one in zip(entries, types, strict=True)]


def _split(text: str) -> Tree:
    if re.fullmatch(r"\[[^\[\]]*\]", text):
        if re.search("[{\"']", text):
            return _yaml(text)
        text = text[1:-1]
    parts = (part.strip() for part in re.findall(r"(?:\{[^}]*\}|[^,])+", text))
    return [_yaml(part) if part[0] == "{" else part for part in parts if part]


def _yaml(text: str) -> Tree:
    try:
        return read_tree(parse_yaml(text, ""), "")
    except InputError as error:
        raise PydanticCustomError("yaml", "{error}", {"error": str(error)}) from None


def _is_path(text: str, entry: Any) -> bool:
    """Return whether the text of a list of places is the path of one, commas and all."""
    is_place = entry == UserPath or (is_dataclass(entry) and fields(entry)[0].name == "path")
    return is_place and os.path.exists(os.path.expanduser(text))


def _whole(text: str) -> int | str:
    """Return the whole number that a text such as 1e6 is, or the text."""
    try:
        number = Decimal(text)
    except ArithmeticError:
        return text
    # The bound keeps 1e999999999 from filling the memory with digits.
    is_whole = number.is_finite() and number.adjusted() <= 18 and number == number.to_integral_value()
    return int(number) if is_whole else text


def alternatives(annotation: Any) -> list[str]:
    """Return in words what a field takes, one entry for each choice."""
    words = {int: "a whole number", float: "a number", str: "text", NoneType: "null", list: "a list"}
    found: list[str] = []
    for option in options(annotation):
        origin, args = get_origin(option) or option, get_args(option)
        if origin is Literal:
            found += args
        elif origin is bool:
            found += ["true", "false"]
        else:
            found.append(f"{len(args)} numbers" if origin is tuple else words.get(origin, "a mapping"))
    return found


def either(words: Sequence[str]) -> str:
    """Return `a, b or c`."""
    *first, last = words
    return f"{', '.join(first)} or {last}" if first else last


def nearest(name: str, names: Sequence[str], dashes: str = "") -> str:
    """Return the end of a message that asks which of `names` was meant; empty if none is similar."""
    wanted = name.replace("-", "_")
    same_end = [known for known in names if known.rpartition(".")[2] == wanted.rpartition(".")[2]]
    by_end = {known.rpartition(".")[2]: known for known in names}
    close = get_close_matches(wanted, names, 1) or [
        by_end[end] for end in get_close_matches(wanted, by_end, 1)
    ]
    meant = [f"{dashes}{known}" for known in same_end or close]
    return f"; did you mean {either(meant)}?" if meant else ""


_UNKNOWN, _RULES = "unexpected_keyword_argument", ("finite_number", "value_error")


def _explain(error: ValidationError, cls: Any, group: str) -> InputError:
    """Return the first mistake that pydantic found in `cls` as one line: key, value and rule."""
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


def _describe_problem(problem: Any, key: str, where: str, annotation: Any) -> InputError:
    kind, value = problem["type"], problem["input"]
    last = problem["loc"][-1] if problem["loc"] else ""
    names = [one.name for one in fields(annotation)] if is_dataclass(annotation) else []
    if kind == _UNKNOWN:
        fix = nearest(last, names) or f"; there are {', '.join(names)}"
        place = where.rstrip(".: ")
        return WrongType(f"{place}{': ' if place else ''}unknown key {last}{fix}", key)
    if kind == "missing" and isinstance(last, str):
        if key != where:
            return WrongType(f"{key}: an entry needs the key {last}", key)
        return InputError(f"--{where} is missing; --help says what it takes", key)
    if kind == "yaml":
        return WrongType(f"{where}: {problem['msg']}", key)
    if kind in _RULES:
        broken = problem["ctx"]["error"] if kind == "value_error" else "must be finite"
        types = [one for one in options(annotation) if one is NoneType or get_origin(one) is Literal]
        others = [word for one in types for word in alternatives(one)]
        also = f", {'or ' if len(others) == 1 else ''}{either(others)}" if others else ""
        return InputError(f"{where}={value if str(value).strip() else repr(value)} {broken}{also}", key)
    words: dict[type, str] = {list: "a list", tuple: "a list", dict: "a mapping", NoneType: "null"}
    shown = words.get(type(value), repr(value))
    if names and kind == "dataclass_type":
        return WrongType(f"{where}: an entry is text or a mapping of {', '.join(names)}, not {shown}", key)
    return WrongType(f"{where}: expected {either(alternatives(annotation))}, got {shown}", key)


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
