from __future__ import annotations

import ast
from pathlib import Path
from typing import Literal

import pytest

from mlm.config.errors import InputError
from mlm.config.parse import Given, build_config
from mlm.config.schema import nearest, schema


@schema()
class Entry:
    path: str
    column: str | None = None
    share: float = 1.0


def convert(value, annotation, where):
    """Read a value as the key k of a configuration whose annotation this is."""
    probe = schema()(type("Probe", (), {"__annotations__": {"k": annotation}}))
    return build_config(probe, {"k": Given(value, where.removesuffix("k"))}).k


@pytest.mark.parametrize("text", ["0", "7", "-3", "1_000", "12345678901234567", "+4"])
def test_whole_numbers_agree_with_python(text):
    assert convert(text, int, "k") == int(ast.literal_eval(text))


@pytest.mark.parametrize(("text", "value"), [("1e6", 1_000_000), ("10.0", 10), ("1.5e3", 1500), ("0010", 10)])
def test_whole_numbers_take_exact_floats(text, value):
    result = convert(text, int, "k")
    assert result == value
    assert type(result) is int


@pytest.mark.parametrize(
    "text", ["1.5", "fast", "", "1e999999999", "1e30", "inf", "nan", "0x10", "1:30", "true", "1e-4"]
)
def test_whole_numbers_refuse(text):
    with pytest.raises(InputError, match=r"^--k: expected a whole number, got "):
        convert(text, int, "--k")


@pytest.mark.parametrize("text", ["1e-4", "5e-5", "1E4", ".5", "3", "1_000.5", "-0.0"])
def test_numbers_agree_with_python(text):
    value = convert(text, float, "k")
    assert value == float(text)
    assert type(value) is float


@pytest.mark.parametrize("text", ["true", "True", "yes", "on", "1"])
def test_true(text):
    assert convert(text, bool, "k") is True
    assert convert({"true": "false", "yes": "no", "on": "off", "1": "0"}[text.lower()], bool, "k") is False


@pytest.mark.parametrize(
    "text", ["true", "no", "1e-4", "007", "[x]", "{a: b}", "a,b", "null", "#x", "&x", " x "]
)
def test_text_stays_as_written(text):
    assert convert(text, str, "k") == text


@pytest.mark.parametrize("text", ["null", "None", "none"])
def test_null_where_allowed(text):
    assert convert(text, int | None, "k") is None
    assert convert(None, str | None, "k") is None
    assert convert("none", Literal["none", "some"], "k") == "none"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("a,b", ["a", "b"]),
        ("[a,b]", ["a", "b"]),
        ("[a, b]", ["a", "b"]),
        (" a , b ,", ["a", "b"]),
        ("a", ["a"]),
        ("", []),
        (["a,b", "[c]"], ["a,b", "[c]"]),
        ('["a,b", c]', ["a,b", "c"]),
        ("[*.txt,b*]", ["*.txt", "b*"]),
        ("data/[ab]*.txt,c", ["data/[ab]*.txt", "c"]),
        ("C:\\my files\\x.txt", ["C:\\my files\\x.txt"]),
    ],
)
def test_lists(value, expected):
    assert convert(value, list[str], "k") == expected


def test_of_a_list_the_entry_is_named():
    for value, shown in (("1,x", "'x'"), (["1", ".nan"], "'.nan'"), (["1", ["2"]], "a list")):
        with pytest.raises(InputError, match=f"k: expected a number, got {shown}"):
            convert(value, list[float], "k")


def test_pairs():
    for value in ("0.9,0.95", "[0.9, 0.95]", ["0.9", ".95"]):
        assert convert(value, tuple[float, float], "k") == (0.9, 0.95)
    for value in ("0.9", "1,2,3", "0.9,x", None, {"a": "b"}):
        with pytest.raises(InputError, match="expected 2 numbers"):
            convert(value, tuple[float, float], "k")


@pytest.mark.parametrize(
    "value",
    [
        "x, {path: a b.txt, column: t}",
        "[x, {path: a b.txt, column: t}]",
        ["x", {"path": "a b.txt", "column": "t"}],
        "x,{'path': 'a b.txt', \"column\": t,}",
    ],
)
def test_mapping_becomes_an_entry_never_a_string(value):
    assert convert(value, list[Entry], "k") == [Entry("x"), Entry("a b.txt", "t")]


def test_comma_in_the_name_of_a_file_that_is_there_does_not_split(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a,b.txt").touch()
    assert convert("a,b.txt", list[Entry], "k") == [Entry("a,b.txt")]
    assert convert(str(tmp_path / "a,b.txt"), list[Entry], "k") == [Entry(str(tmp_path / "a,b.txt"))]
    assert convert("a,c.txt", list[Entry], "k") == [Entry("a"), Entry("c.txt")]
    assert convert("a,b.txt", list[str], "k") == ["a", "b.txt"]


def test_single_mapping_is_a_list_of_one():
    assert convert({"path": "x", "share": "0.5"}, list[Entry], "k") == [Entry("x", share=0.5)]
    assert convert("{path: 'a,b', share: 1e-1}", list[Entry], "k") == [Entry("a,b", share=0.1)]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"path": "x", "colum": "t"}, "--k: unknown key colum; did you mean column?"),
        ({"path": "x", "zzz": "t"}, "--k: unknown key zzz; there are path, column, share"),
        ({"column": "t"}, "--k: an entry needs the key path"),
        ({"path": "x", "share": "much"}, "--k: share: expected a number, got 'much'"),
        ("{path: x", "--k: not valid YAML"),
        ("{path: x, path: y}", "--k: path is given twice"),
        ([None], "--k: an entry is text or a mapping of path, "),
        ([["x"]], "--k: an entry is text or a mapping of path, "),
    ],
)
def test_wrong_entries(value, message):
    with pytest.raises(InputError) as error:
        convert(value, list[Entry], "--k")
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    ("value", "annotation", "message"),
    [
        ("fast", float, "--k: expected a number, got 'fast'"),
        (None, float, "--k: expected a number, got null"),
        (["1"], float, "--k: expected a number, got a list"),
        ({"a": "1"}, str, "--k: expected text, got a mapping"),
        ("maybe", bool, "--k: expected true or false, got 'maybe'"),
        ("x", Literal["a", "b", "c"], "--k: expected a, b or c, got 'x'"),
        ("x", int | Literal["auto"], "--k: expected a whole number or auto, got 'x'"),
        ("x", float | None, "--k: expected a number or null, got 'x'"),
        ("x", Literal["pre", "post"] | None, "--k: expected pre, post or null, got 'x'"),
    ],
)
def test_wrong_types_are_named(value, annotation, message):
    with pytest.raises(InputError) as error:
        convert(value, annotation, "--k")
    assert str(error.value) == message


def test_union_keeps_the_first_type_that_fits():
    assert convert("2", int | Literal["auto"], "k") == 2
    assert convert("auto", int | Literal["auto"], "k") == "auto"


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("model.hiden_size", "; did you mean --model.hidden_size?"),
        ("hidden-size", "; did you mean --model.hidden_size?"),
        ("hiden_size", "; did you mean --model.hidden_size?"),
        ("vocab_size", "; did you mean --model.vocab_size or --tokenizer.vocab_size?"),
        ("qqqqqqqq", ""),
    ],
)
def test_nearest(name, meant):
    assert (
        nearest(name, ["model.hidden_size", "model.vocab_size", "tokenizer.vocab_size", "seed"], "--")
        == meant
    )
