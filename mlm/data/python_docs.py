"""The default corpus: English prose out of the documentation of the Python installation itself.

It exists on every machine that can run us, so pretraining needs no download. In fixed order:

- the topics of `pydoc` (the language reference), then the docstrings of the standard library,
- then those of `PACKAGES`, all of which our own run-time dependencies bring; a missing one is skipped.

Sources are parsed with `ast`, never imported, by one process a core; the documents come in the same order
whatever the number of processes. Of a docstring only paragraphs that read as sentences are kept: no code,
tables, parameter lists, fields or signatures. A paragraph met before is dropped. A document is the prose of
one docstring; short ones are joined with the next of the same file, because a masked word is guessed from the
words around it.

This module imports little more than the standard library: the worker processes import it too.
"""

from __future__ import annotations

import ast
import gc
import hashlib
import importlib.machinery
import importlib.metadata
import inspect
import logging
import multiprocessing
import os
import platform
import re
import sysconfig
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

from mlm.cores import available_cores

Progress = Callable[[int, int], None]

logger = logging.getLogger(__name__)

# (folder, distribution) in reading order. Only what the run-time dependencies bring, so that the corpus does
# not depend on the test extra; pytorch_lightning is left out, for it is the text of lightning.pytorch again.
PACKAGES = (
    ("torch", "torch"),
    ("numpy", "numpy"),
    ("pandas", "pandas"),
    ("pyarrow", "pyarrow"),
    ("lightning", "lightning"),
    ("torchmetrics", "torchmetrics"),
    ("datasets", "datasets"),
    ("huggingface_hub", "huggingface_hub"),
    ("fsspec", "fsspec"),
    ("aiohttp", "aiohttp"),
    ("matplotlib", "matplotlib"),
    ("sympy", "sympy"),
    ("mpmath", "mpmath"),
    ("networkx", "networkx"),
    ("jinja2", "jinja2"),
    ("wandb", "wandb"),
    ("pydantic", "pydantic"),
    ("fontTools", "fonttools"),
    ("PIL", "pillow"),
    ("requests", "requests"),
    ("urllib3", "urllib3"),
    ("httpx", "httpx"),
    ("anyio", "anyio"),
    ("click", "click"),
    ("jsonargparse", "jsonargparse"),
    ("tqdm", "tqdm"),
    ("packaging", "packaging"),
    ("attr", "attrs"),
    ("dateutil", "python-dateutil"),
    ("pyparsing", "pyparsing"),
    ("filelock", "filelock"),
)

_SKIPPED_FOLDERS = frozenset(
    "__pycache__ site-packages dist-packages lib-dynload pydoc_data idlelib turtledemo lib2to3 ensurepip "  # noqa: SIM905
    "test tests testing _testing _vendor vendor vendored".split()
)
_TOPICS = ("pydoc_data", "topics.py")
_MIN_DOCUMENT_WORDS = 60
_FILES_PER_TASK = 16
# Files with a smaller share of triple-quoted text are not parsed: much of the time for little of the text.
_MIN_DOCUMENTATION = 0.06

# Calls that attach a docstring to something written in C; the text is one of the arguments.
_DOCSTRING_CALLS = frozenset(("add_docstr", "_add_docstr", "add_docstr_all", "add_newdoc"))


def read_python_docs(progress: Progress | None = None, processes: int | None = None) -> Iterator[str]:
    """Yield the documents of this installation: a paragraph a line, at least a few dozen words as a rule.

    Args:
        progress: called with (files done, files in all) after every file.
        processes: worker processes; None: one a core; 1: none, all is done here.
    """
    return (document for _, document in read_package_docs(progress, processes))


def read_package_docs(
    progress: Progress | None = None, processes: int | None = None
) -> Iterator[tuple[str, str]]:
    """Yield the same documents, each with the package it is from: a name of `PACKAGES`, or python."""
    library = Path(sysconfig.get_path("stdlib"))
    owners = dict.fromkeys([library.joinpath(*_TOPICS), *python_files(library)], "python")
    for name, _ in PACKAGES:
        folder = _package_folder(name)
        if folder is not None:
            owners |= dict.fromkeys(python_files(folder), name)
    for file, document in _documents_of(list(owners), progress, processes):
        yield owners[file], document


def python_docs_digest() -> str:
    """Return a hex digest of what decides the corpus: versions of Python and `PACKAGES`, and this file."""
    parts = [f"python {platform.python_version()}"]
    for _, distribution in PACKAGES:
        try:
            version = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            version = "missing"
        parts.append(f"{distribution} {version}")
    digest = hashlib.sha256("\n".join(parts).encode())
    digest.update(Path(__file__).read_bytes())
    return digest.hexdigest()


def _package_folder(name: str) -> Path | None:
    """Locate a package without importing it; a namespace (such as a run folder called wandb) is none."""
    spec = importlib.machinery.PathFinder.find_spec(name)
    origin = Path(spec.origin) if spec is not None and spec.origin else None
    return origin.parent if origin is not None and origin.name == "__init__.py" else None


def python_files(folder: Path) -> list[Path]:
    """List the .py files of a package except its tests, in an order that no file system decides."""
    files: list[Path] = []
    for directory, subfolders, names in os.walk(folder):
        subfolders[:] = sorted(set(subfolders) - _SKIPPED_FOLDERS)
        modules = (name for name in sorted(names) if name.endswith(".py"))
        files += (Path(directory, name) for name in modules if not name.startswith(("test_", "conftest")))
    return files


def read_files(
    files: Iterable[Path], progress: Progress | None = None, processes: int | None = None
) -> Iterator[str]:
    """Yield the documents of Python files, in the order of the files.

    Args:
        files: sources to read; one that cannot be read or parsed is skipped.
        progress: called with (files done, files in all) after every file.
        processes: worker processes; None: one a core; 1: none, all is done here.
    """
    return (document for _, document in _documents_of(list(files), progress, processes))


def _documents_of(
    files: list[Path], progress: Progress | None, processes: int | None
) -> Iterator[tuple[Path, str]]:
    """Yield file and document, in the order of the files."""
    seen: set[str] = set()
    unparsed = 0
    extracted = zip(files, _extract_all(files, processes), strict=True)
    for done, (file, docstrings) in enumerate(extracted, start=1):
        if docstrings is None:
            unparsed += 1
        else:
            for document in _documents(docstrings, seen):
                yield file, document
        if progress is not None:
            progress(done, len(files))
    if unparsed:
        logger.info("python-docs: %d of %d files could not be parsed and were skipped", unparsed, len(files))


def _documents(docstrings: list[list[str]], seen: set[str]) -> Iterator[str]:
    """Join the new paragraphs of one file's docstrings into documents; `seen` holds all earlier ones."""
    pending: list[str] = []
    words = 0
    for paragraphs in docstrings:
        for paragraph in paragraphs:
            if paragraph not in seen:
                seen.add(paragraph)
                pending.append(paragraph)
                words += len(paragraph.split())
        if words >= _MIN_DOCUMENT_WORDS:
            yield "\n".join(pending)
            pending, words = [], 0
    if pending:
        yield "\n".join(pending)


def _extract_all(files: list[Path], processes: int | None) -> Iterator[list[list[str]] | None]:
    """Apply `read_docstrings` to every file in order, in processes where that pays and is possible."""
    processes = min(processes or available_cores(), len(files) // _FILES_PER_TASK + 1)
    done = 0
    if processes > 1 and not multiprocessing.current_process().daemon:
        try:
            # Spawned, not forked: the caller may have started threads, and a fork then can hang.
            with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
                for result in pool.map(read_docstrings, files, chunksize=_FILES_PER_TASK):
                    done += 1
                    yield result
        except (BrokenProcessPool, OSError) as error:
            # No semaphores here, or a calling script without a main guard: slower, but the same documents.
            logger.warning("python-docs: reading on in one process, worker processes failed: %s", error)
    yield from map(read_docstrings, files[done:])


def read_docstrings(file: Path) -> list[list[str]] | None:
    """Return the prose paragraphs of each docstring of one source file, or None when it cannot be parsed."""
    try:
        source = file.read_bytes()
        is_topics = file.parts[-2:] == _TOPICS
        if not is_topics and _triple_quoted_share(source) < _MIN_DOCUMENTATION:
            return []
        tree = _parse(source)
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    docstrings = _topics(tree) if is_topics else _docstrings(tree)
    extracted = (extract_prose(docstring) for docstring in docstrings)
    return [paragraphs for paragraphs in extracted if paragraphs]


def _triple_quoted_share(source: bytes) -> float:
    """Estimate which share of a file is documentation, at a hundredth of the cost of parsing it."""
    quoted = source.split(b'"""')[1::2]
    return sum(map(len, quoted)) / (len(source) + 1)


def _parse(source: bytes) -> ast.Module:
    """Parse without warnings about escapes, and without the garbage collector, which doubles the time."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(source)
    finally:
        if collecting:
            gc.enable()


def _topics(tree: ast.Module) -> Iterator[str]:
    """Yield the texts of pydoc's topics: the values of the one dictionary of the file."""
    for node in tree.body:
        value = getattr(node, "value", None)
        if isinstance(value, ast.Dict):
            for text in value.values:
                if isinstance(text, ast.Constant) and isinstance(text.value, str):
                    yield text.value


def _docstrings(node: ast.AST) -> Iterator[str]:
    """Yield the docstrings of a module, of its classes, functions and methods, in the order of the source."""
    if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        docstring = ast.get_docstring(node)
        if docstring:
            yield docstring
    if isinstance(node, (ast.Module, ast.ClassDef, ast.If, ast.Try, ast.With)):
        for child in (*node.body, *getattr(node, "orelse", ())):
            yield from _docstrings(child)
    elif isinstance(node, (ast.Expr, ast.Assign)) and isinstance(node.value, ast.Call):
        function = node.value.func
        name = function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")
        if name in _DOCSTRING_CALLS:
            for part in ast.walk(node.value):
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    yield inspect.cleandoc(part.value)


def extract_prose(docstring: str) -> list[str]:
    """Return the paragraphs of a dedented docstring that read as prose, unwrapped and without markup."""
    if "\n" in docstring:
        docstring = _without_sections(docstring)
        for needle, pattern, replacement in _NOT_PROSE:
            if needle in docstring:
                docstring = pattern.sub(replacement, docstring)
    # Most of what is dropped is short: so the words are counted first.
    plain = (_strip_markup(p) for p in _paragraphs(docstring) if p.count(" ") + 1 >= _MIN_PARAGRAPH_WORDS)
    return [paragraph for paragraph in plain if _is_prose(paragraph)]


_SECTIONS = (
    "Parameters|Other Parameters|Params|Args|Arguments|Keyword Args|Keyword Arguments|Kwargs|Type Parameters|"
    "Attributes|Methods|Returns?|Return value|Yields?|Receives|Raises?|Warns|Inputs?|Outputs?|Shape|"
    "Signature|Usage|See Also|References?|Bibliography|Authors?|Copyright|License|Todo"
)
_SECTION = re.compile(rf"\s*(?:{_SECTIONS}):?\s*", re.IGNORECASE)
_UNDERLINED = re.compile(r"^(.*)\n[ \t]*[-=~^\"'*+#_.:]{3,}[ \t]*$", re.MULTILINE)


def _without_sections(docstring: str) -> str:
    """Cut at underlined headings, leave out these and the sections that are tables or lists."""
    kept, *rest = _UNDERLINED.split(docstring)
    for title, body in zip(rest[::2], rest[1::2], strict=True):
        if not _SECTION.fullmatch(title):
            kept += body
    return kept


_ADMONITIONS = "note|warning|tip|hint|important|attention|caution|seealso"
_DEEPER = r"(?:\n(?:\1[ \t]+\S.*|[ \t]*$))*"  # the lines indented deeper than group 1, and blank ones

# What is cut out before a docstring is divided into paragraphs, in this order: (what it must hold to be worth
# the search, pattern, replacement).
_NOT_PROSE = tuple(
    (needle, re.compile(pattern, re.MULTILINE), replacement)
    for needle, pattern, replacement in (
        # Doctests with their output, up to the next blank line.
        (">>>", r"^[ \t]*>>>.*(?:\n[ \t]*\S.*)*", ""),
        # Fenced code.
        ("```", r"^[ \t]*```[^`\n]*\n(?:.*\n)*?[ \t]*```[ \t]*$", ""),
        # Sections named by a line that ends in a colon, with all that is indented below.
        (":\n", rf"^([ \t]*)(?:\*\*|#+ )?(?i:{_SECTIONS})(?:\*\*)?:{{1,2}}(?:\*\*)?[ \t]*${_DEEPER}", ""),
        # Field lists (:param x: ..., @param x: ...) and directives other than admonitions.
        (":", rf"^([ \t]*)(?::[a-z]+(?: [^:\n]*)?:(?!`)|@\w+|\.\. (?!(?:{_ADMONITIONS})::)).*{_DEEPER}", ""),
        # Literal blocks behind a double colon.
        ("::", rf"^([ \t]*)(\S.*)::[ \t]*${_DEEPER}", r"\1\2:\n"),
    )
)

# What opens a paragraph and is no part of its text: bullets, numbers, admonitions.
_MARKER = re.compile(
    r"(?:[-*+•o]|\(?(?:\d+|[a-zA-Z]|[ivx]+)[.)]|\[!\w+\]|\.\. \w+::|"
    rf"(?i:{_ADMONITIONS}|example)s?:)(?:\s+|$)"
)


def _paragraphs(text: str) -> Iterator[str]:
    """Cut a text at blank lines, markers and changes of the indent, and join the lines of each paragraph."""
    lines: list[str] = []
    column: int | None = None
    for line in (*text.split("\n"), ""):
        content = line.strip().removeprefix("> ")
        indent = len(line) - len(line.lstrip())
        marker = _MARKER.match(content)
        if marker:
            content = content[marker.end() :]
        if lines and (not content or marker or column not in (None, indent)):
            yield " ".join(lines)
            lines = []
        if marker:
            column = None  # the line that continues an item chooses the indent
        elif not lines or column is None:
            column = indent
        if content:
            lines.append(content)


# Light reStructuredText and Markdown, in this order: (what it must hold, pattern, replacement).
_MARKUP = tuple(
    (needle, re.compile(pattern), replacement)
    for needle, pattern, replacement in (
        ("`", r":[\w:+-]+:(?=`)", ""),  # the role of :class:`x`
        ("`~", r"`~[\w.]*?(\w+)`", r"\1"),  # ~package.name shows only its last part
        ("<", r"`([^`<>]+?)\s*<[^`<>]*>`_{0,2}", r"\1"),  # `text <target>`_
        ("[`", r"\[`([^\]`]+)`\](?:\([^)]*\)|\[[^\]]*\])?", r"\1"),  # [`name`], [`name`](target)
        ("](", r"\[([^\]`]+)\]\([^)\s]*\)", r"\1"),  # [text](target)
        ("]_", r" ?\[#?\w*\]_", ""),  # footnotes
        ("`", r"`+([^`]+)`+(?:_{1,2}(?!\w))?", r"\1"),
        ("*", r"(?<![\w*])\*{1,3}(\w(?:[^*]*[\w.,:;!?)])?)\*{1,3}(?![\w*])", r"\1"),
        ("|", r"\|(\w+)\|", r"\1"),
        ("\\", r"\\([*_`|<>#])", r"\1"),
        ("\\", r"\\[ s]", ""),  # joins a word to markup before it
    )
)
_COLUMNS = re.compile(r"[^\s.!?:)\"'] {3,}\S")


def _strip_markup(paragraph: str) -> str:
    """Leave of ``x``, :role:`x`, *x* and links the text only; a table (aligned columns) becomes empty."""
    if "   " in paragraph and _COLUMNS.search(paragraph):
        return ""
    for needle, pattern, replacement in _MARKUP:
        if needle in paragraph:
            paragraph = pattern.sub(replacement, paragraph)
    return " ".join(paragraph.split())


_UNREADABLE = re.compile(r"[`\\{}$]|\*\*|://|%\(|>>>|::|Copyright|[Pp]ermission is hereby|TODO")
_SENTENCE = re.compile(r"[\"'(]?[A-Z0-9].*(?:[.!?:][\"')]*|\))")
_SYMBOLS = "=<>[]|/@%^&~*+#"
_WORD = re.compile(r"[\"'(\[]*[A-Za-z]+(?:['’-][A-Za-z]+)*[\"')\]]*[.,;:!?]*[\"')]*")
_COMMON_WORDS = frozenset(
    "a all an and any are as at be between but by can each for from has have if in is it its must no not of "  # noqa: SIM905
    "on only or should than that the then this to use used was we when which will with you".split()
)
_MIN_PARAGRAPH_WORDS = 6
_MAX_WORD_LETTERS = 60
_MAX_SYMBOLS = 0.03
_MIN_PLAIN_WORDS = 0.75
_MIN_COMMON_WORDS = 0.18


def _is_prose(paragraph: str) -> bool:
    """Tell sentences from names, code and formulas: most words are plain ones, enough of them common ones."""
    words = paragraph.split()
    if len(words) < _MIN_PARAGRAPH_WORDS or len(max(words, key=len)) > _MAX_WORD_LETTERS:
        return False
    if not _SENTENCE.fullmatch(paragraph) or _UNREADABLE.search(paragraph):
        return False
    common = sum(1 for word in words if word.lower() in _COMMON_WORDS)
    if common < _MIN_COMMON_WORDS * len(words):
        return False
    if sum(map(paragraph.count, _SYMBOLS)) > _MAX_SYMBOLS * len(paragraph):
        return False
    return sum(1 for word in words if _WORD.fullmatch(word)) >= _MIN_PLAIN_WORDS * len(words)
