"""Checks that the default corpus is prose, comes in one order everywhere, and imports nothing."""

from __future__ import annotations

import importlib.metadata
import itertools
import logging
import os
import re
import subprocess
import sys
import sysconfig
import tomllib
import warnings
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from mlm.data import python_docs
from mlm.data.python_docs import (
    extract_prose,
    file_documents,
    package_files,
    python_docs_digest,
    python_files,
    read_python_docs,
)

NUMPYDOC = """Return the sum of the elements along the
given axis, as a new array of the same type.

Parameters
----------
a : array_like
    The elements of the array that are to be summed by this function.
axis : int, optional

Notes
-----
Arithmetic is modular when the elements are integers, and
no error is raised on overflow.

    sum_of = np.add.reduce(a, axis=0)

See Also
--------
ndarray.sum : The method that does the same for the array it belongs to.

Examples
--------
The sum of an empty list is the neutral element of the addition:

>>> np.sum([])
0.0
This line is output and must not be read as a sentence.
"""

GOOGLE = """Split the text into lines and return them in their order.

Args:
    text: The text that is to be split at the ends of its lines.

        It may hold a second paragraph which is also a part of the table.
    keepends (bool): Whether the line ends are kept in the result.

Returns:
    A list of the lines that were found in the text.

Note:
    The last line need not end with a newline to be part of the result.

Example::

    lines = split_the_text_into_lines(of, the, file)

.. code-block:: python

    print(that, is_not, a_sentence, of, the, language)

.. warning:: A text without any line end is returned as one line
    only, whatever its length may be.

:param text: the same once more, as a field of the docstring that is long.
:returns: a list of the lines that were found in the text of this call.
"""


def test_numpydoc_keeps_only_the_sentences() -> None:
    assert extract_prose(NUMPYDOC) == [
        "Return the sum of the elements along the given axis, as a new array of the same type.",
        "Arithmetic is modular when the elements are integers, and no error is raised on overflow.",
        "The sum of an empty list is the neutral element of the addition:",
    ]


def test_google_style_and_directives_keep_only_the_sentences() -> None:
    assert extract_prose(GOOGLE) == [
        "Split the text into lines and return them in their order.",
        "The last line need not end with a newline to be part of the result.",
        "A text without any line end is returned as one line only, whatever its length may be.",
    ]


@pytest.mark.parametrize(
    ("marked", "plain"),
    [
        ("Use ``len(x)`` to get the number of items.", "Use len(x) to get the number of items."),
        ("See :class:`~torch.nn.Linear` for the layer in use.", "See Linear for the layer in use."),
        ("See :func:`os.walk` for the way that it goes.", "See os.walk for the way that it goes."),
        ("The *first* item is **always** returned by it.", "The first item is always returned by it."),
        ("Read the `user guide <guide.html>`_ before you use it.", "Read the user guide before you use it."),
        (
            "See [`Trainer`] and [the page](x.md) for the rest of it.",
            "See Trainer and the page for the rest of it.",
        ),
        ("This is the method of the paper [1]_ on it.", "This is the method of the paper on it."),
        ("It is a * b in the first and c * d in the second of the two cases of the list.",) * 2,
    ],
)
def test_light_markup_is_removed(marked: str, plain: str) -> None:
    assert extract_prose(marked) == [plain]


@pytest.mark.parametrize(
    "text",
    [
        "os_path\nsys_argv\nmax_position_embeddings",
        "fit(X, y=None, sample_weight=None, *, copy=True) -> self",
        "open, close, read, write, seek, tell, flush, truncate.",
        "Too short a text.",
        "and this is the end of a sentence that was cut off.",
        "This is a sentence which ends in the middle of the",
        "name        the name of the item\nsize        the size of the item in bytes.",
        "| a | b |\n|---|---|\n| the | of |",
        "+------+------+\n| this is | a table of the kind |\n+------+------+",
        "If the value of x is $x_{ij}^2$ then this is the formula.",
        "See https://example.org/a for the text of it and for all of the rest.",
        "x = a + b; y = c[d] / e; z = f(g)(h) if i else j.",
        "Title of the page\n=================",
        "```\nThis is a line in the code that is fenced.\n```",
        "assert_stmt ::= 'assert' expression ['if' expression]",
        "Copyright 2020 by the authors of it. All of the rights are reserved.",
    ],
)
def test_what_is_not_prose_is_dropped(text: str) -> None:
    assert extract_prose(text) == []


def test_list_items_become_paragraphs() -> None:
    text = (
        "There are two ways to go:\n\n- The first is to read\n  all at once.\n- The second is to read lines."
    )
    assert extract_prose(text) == [
        "There are two ways to go:",
        "The first is to read all at once.",
        "The second is to read lines.",
    ]


def read_files(files: list[Path], *arguments: Any, **options: Any) -> list[str]:
    return list(itertools.chain.from_iterable(file_documents(files, *arguments, **options)))


def sentence(number: int, words: int = 12) -> str:
    return f"This is the sentence with the number {number} and " + "the word " * (words // 2) + "of the file."


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A package of 40 modules: enough for more than one worker process."""
    folder = tmp_path / "fake_package"
    for name in ("", "inner", "tests", "__pycache__"):
        (folder / name).mkdir()
    for number in reversed(range(40)):
        (folder / "inner" / f"m{number:02}.py").write_text(f'"""{sentence(number, 80)}"""\n')
    (folder / "__init__.py").write_text(f'"""{sentence(100, 80)}"""\nraise SystemExit("imported")\n')
    (folder / "tests" / "a.py").write_text(f'"""{sentence(101)}"""\n')
    (folder / "test_b.py").write_text(f'"""{sentence(102)}"""\n')
    return folder


def test_package_is_read_in_order_with_any_number_of_processes_and_not_imported(package: Path) -> None:
    serial = read_files(python_files(package), processes=1)
    assert [int(re.findall(r"\d+", document)[0]) for document in serial] == [100, *range(40)]
    assert [len(documents) for documents in file_documents(python_files(package), processes=1)] == [1] * 41
    assert read_files(python_files(package), processes=2) == serial
    assert "fake_package" not in sys.modules


def test_documents_are_complete_when_the_calling_script_has_no_main_guard(
    package: Path, tmp_path: Path
) -> None:
    """Worker processes then cannot start; the hash seed and the locale differ from ours as well."""
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\nfrom pathlib import Path\n"
        "from mlm.data.python_docs import file_documents, python_files\n"
        "documents = file_documents(python_files(Path(sys.argv[1])), processes=2)\n"
        "print('\\n\\n'.join(text for part in documents for text in part))\n"
        "assert not {'torch', 'numpy', 'datasets'} & set(sys.modules)\n"
    )
    environment = {
        **os.environ,
        "PYTHONHASHSEED": "7",
        "LC_ALL": "C",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    run = subprocess.run(
        [sys.executable, script, package], capture_output=True, encoding="utf-8", env=environment, check=True
    )
    assert "reading on in one process" in run.stderr
    assert run.stdout.strip() == "\n\n".join(read_files(python_files(package), processes=1))


def test_docstrings_of_all_kinds_are_found_in_source_order(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    file.write_text(
        f'"""{sentence(0)}"""\n'
        f'class A:\n    """{sentence(1)}"""\n    async def f(self):\n        """{sentence(2)}"""\n'
        f'if True:\n    def g():\n        """{sentence(3)}"""\n'
        f'add_docstr(g, r"""g(x)\n\n{sentence(4)}""" + """\n\n{sentence(5)}""")\n'
        f'text = """{sentence(6)}"""\n'
    )
    documents = read_files([file], processes=1)
    assert "\n".join(documents).split("\n") == [sentence(number) for number in range(6)]


def test_short_docstrings_of_a_file_are_joined_and_repeated_paragraphs_dropped(tmp_path: Path) -> None:
    files = []
    for name, numbers in (("a", range(10)), ("b", (3, 20, 4))):
        files.append(tmp_path / f"{name}.py")
        files[-1].write_text("\n".join(f'def f():\n    """{sentence(number)}"""' for number in numbers))
    *documents, last = read_files(files, processes=1)
    assert last == sentence(20)
    assert "\n".join(documents).split("\n") == [sentence(number) for number in range(10)]
    assert all(len(document.split()) >= 60 for document in documents[:-1])


def test_bad_files_are_skipped_and_counted_and_nothing_is_warned(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sources = {
        "a_broken.py": f'"""{sentence(1)}"""\ndef (:\n'.encode(),
        "b_nul.py": f'"""{sentence(2)}"""\n\0'.encode(),
        "c_latin.py": b'"""' + sentence(3).encode() + b'"""\nx = "\xe9"\n',
        "d_escape.py": f'"""{sentence(4)}"""\nx = "\\d"\n'.encode(),
        "e_cookie.py": b'# -*- coding: latin-1 -*-\n"""'
        + sentence(5).encode()
        + b' A caf\xe9 is a place to be in."""\n',
    }
    for name, source in sources.items():
        (tmp_path / name).write_bytes(source)
    with warnings.catch_warnings(), caplog.at_level(logging.INFO):
        warnings.simplefilter("error")
        documents = read_files([*python_files(tmp_path), tmp_path / "gone.py"], processes=1)
    assert documents == [sentence(4), f"{sentence(5)} A café is a place to be in."]
    assert "4 of 6 files could not be parsed" in caplog.text


def test_installation_is_read_topics_first_and_missing_packages_are_skipped(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "library"
    for folder in ("library/pydoc_data", "library/idlelib", "library/site-packages", "only_a_folder"):
        (tmp_path / folder).mkdir(parents=True)
    (library / "pydoc_data" / "topics.py").write_text(
        f"topics = {{'a': '{sentence(200)}\\n', 'b': '{sentence(201)}'}}"
    )
    for name in ("abc.py", "idlelib/a.py", "site-packages/a.py"):
        (library / name).write_text(f'"""{sentence(len(name) + 300)}"""\n')
    monkeypatch.setattr(sysconfig, "get_path", {"stdlib": str(library)}.__getitem__)
    monkeypatch.setattr(
        python_docs,
        "PACKAGES",
        ("no_package_of_this_name", "only_a_folder", "fake_package"),
    )
    monkeypatch.syspath_prepend(tmp_path)
    documents = list(read_python_docs(processes=1))
    assert documents[:2] == [f"{sentence(200)}\n{sentence(201)}", sentence(306)]
    assert documents[2:] == read_files(python_files(package), processes=1)
    assert list(package_files().values()) == ["python"] * 2 + ["fake_package"] * 41


def test_first_documents_of_this_installation_are_prose_about_python() -> None:
    documents = list(itertools.islice(read_python_docs(processes=1), 50))
    assert "debugging assertions" in documents[0]
    assert all(len(document.split()) >= 6 for document in documents)
    assert not any(">>>" in document or "::=" in document for document in documents)


def test_digest_is_stable_and_follows_the_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    digest = python_docs_digest()
    assert re.fullmatch("[0-9a-f]{64}", digest)
    assert python_docs_digest() == digest
    monkeypatch.setattr(python_docs, "PACKAGES", (*python_docs.PACKAGES[1:], "no-package-of-this-name"))
    assert python_docs_digest() != digest


def installed_closure(requirements: list[str]) -> set[str]:
    """Names of all installed distributions that the requirements bring, directly or not."""
    pending = [Requirement(text) for text in requirements]
    done: set[tuple[str, frozenset[str]]] = set()
    while pending:
        requirement = pending.pop()
        key = (canonicalize_name(requirement.name), frozenset(requirement.extras))
        if key in done:
            continue
        try:
            needed = [Requirement(text) for text in importlib.metadata.requires(key[0]) or ()]
        except importlib.metadata.PackageNotFoundError:
            continue
        done.add(key)
        extras = [{"extra": extra} for extra in (*key[1], "")]
        pending += [
            r for r in needed if r.marker is None or any(r.marker.evaluate(extra) for extra in extras)
        ]
    return {name for name, _ in done}


def test_no_listed_package_comes_with_the_test_extra_only() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    run_time = installed_closure(project["dependencies"])
    test_only = installed_closure(project["optional-dependencies"]["test"]) - run_time
    listed = {canonicalize_name(python_docs.DISTRIBUTIONS.get(name, name)) for name in python_docs.PACKAGES}
    assert {"torch", "numpy", "pandas"} <= listed & run_time
    assert {"pytest", "transformers", "scikit-learn"} <= test_only
    assert not listed & test_only
