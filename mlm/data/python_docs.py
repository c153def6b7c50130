"""The default corpus: English prose from the documentation of the Python installation itself.

It exists on every machine that can run us, so pretraining needs no download. In fixed order: the topics of
`pydoc` (the language reference), the docstrings of the standard library, and those of `PACKAGES`.

Files are parsed with `ast`, never imported. Of a docstring only paragraphs of sentences are kept: no code,
tables, parameter lists, fields or signatures. A repeated paragraph is dropped. A document is the prose of one
docstring; short ones are joined with the next of the same file, because a masked word is guessed from the
words around it.

This module imports little beyond the standard library: the worker processes import it too.
"""

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
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import chain
from pathlib import Path

from mlm.cores import available_cores

PACKAGES = tuple(
    "torch numpy pandas pyarrow lightning torchmetrics datasets huggingface_hub fsspec aiohttp matplotlib "  # noqa: SIM905
    "sympy mpmath networkx jinja2 wandb pydantic fontTools PIL requests urllib3 httpx anyio click "
    "jsonargparse tqdm packaging attr dateutil pyparsing filelock".split()
)
"""Read in this order; a missing one is skipped. All come with the run-time dependencies, so the corpus does
not depend on the test extra. Without pytorch_lightning, which repeats the text of lightning.pytorch."""
DISTRIBUTIONS = {"PIL": "pillow", "attr": "attrs", "dateutil": "python-dateutil"}  # with another name
SKIPPED_FOLDERS = frozenset(
    "__pycache__ site-packages dist-packages lib-dynload pydoc_data idlelib turtledemo lib2to3 ensurepip "  # noqa: SIM905
    "test tests testing _testing _vendor vendor vendored".split()
)
TOPICS = ("pydoc_data", "topics.py")
MIN_DOCUMENT_WORDS = 60
FILES_PER_TASK = 16
MIN_DOCUMENTATION = 0.06  # files with a smaller share of triple-quoted text are not parsed
DOCSTRING_CALLS = frozenset(("add_docstr", "_add_docstr", "add_docstr_all", "add_newdoc"))
"""Functions that attach a docstring, one of their arguments, to something written in C."""

log = logging.getLogger(__name__)


def read_python_docs(processes: int | None = None) -> Iterator[str]:
    """Yield the documents of this installation; see `file_documents`."""
    return chain.from_iterable(file_documents(list(package_files()), processes))


def package_files() -> dict[Path, str]:
    """Return the files to read, in order, and the package of each: a name of `PACKAGES`, or python."""
    library = Path(sysconfig.get_path("stdlib"))
    packages = dict.fromkeys([library.joinpath(*TOPICS), *python_files(library)], "python")
    for name in PACKAGES:
        spec = importlib.machinery.PathFinder.find_spec(name)  # imports nothing
        origin = Path(spec.origin) if spec and spec.origin else None
        if origin and origin.name == "__init__.py":  # not a namespace, such as a run folder called wandb
            packages |= dict.fromkeys(python_files(origin.parent), name)
    return packages


def python_docs_digest() -> str:
    """Return a hex digest of everything that decides the corpus: the versions, and this file."""
    parts = [f"python {platform.python_version()}"]
    for name in PACKAGES:
        try:
            version = importlib.metadata.version(DISTRIBUTIONS.get(name, name))
        except importlib.metadata.PackageNotFoundError:
            version = "missing"
        parts.append(f"{name} {version}")
    return hashlib.sha256("\n".join(parts).encode() + Path(__file__).read_bytes()).hexdigest()


def python_files(folder: Path) -> list[Path]:
    """List the .py files of a package except its tests, in sorted order."""
    files: list[Path] = []
    for directory, subfolders, names in os.walk(folder):
        subfolders[:] = sorted(set(subfolders) - SKIPPED_FOLDERS)
        modules = (name for name in sorted(names) if name.endswith(".py"))
        files += (Path(directory, name) for name in modules if not name.startswith(("test_", "conftest")))
    return files


def file_documents(files: list[Path], processes: int | None = None) -> Iterator[list[str]]:
    """Yield the documents of each Python source; none if it cannot be parsed.

    The number of worker processes, None: one a core, 1: none, changes no document.
    """
    seen: set[str] = set()
    unparsed = 0
    for docstrings in _read_all(files, processes):
        unparsed += docstrings is None
        documents: list[str] = []
        words = MIN_DOCUMENT_WORDS  # the first docstring begins a document
        for paragraphs in docstrings or []:
            new = [paragraph for paragraph in dict.fromkeys(paragraphs) if paragraph not in seen]
            seen.update(new)
            if not new:
                continue
            if words >= MIN_DOCUMENT_WORDS:
                documents.append("")
                words = 0
            documents[-1] = "\n".join([*filter(None, [documents[-1]]), *new])
            words += sum(len(paragraph.split()) for paragraph in new)
        yield documents
    if unparsed:
        log.info("python-docs: %d of %d files could not be parsed and were skipped", unparsed, len(files))


def _read_all(files: list[Path], processes: int | None) -> Iterator[list[list[str]] | None]:
    """Apply `read_docstrings` to every file in order, in several processes if that pays and is possible."""
    processes = min(processes or available_cores(), len(files) // FILES_PER_TASK + 1)
    done = 0
    if processes > 1 and not multiprocessing.current_process().daemon:
        try:
            # Spawned, not forked: the caller may have started threads, and a fork then can hang.
            with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
                for result in pool.map(read_docstrings, files, chunksize=FILES_PER_TASK):
                    done += 1
                    yield result
        except (BrokenProcessPool, OSError) as error:  # no semaphores, or a script without a main guard
            log.warning("python-docs: reading on in one process, worker processes failed: %s", error)
    yield from map(read_docstrings, files[done:])


def read_docstrings(file: Path) -> list[list[str]] | None:
    """Return the prose paragraphs of each docstring of one source file, or None if it cannot be parsed."""
    is_topics = file.parts[-2:] == TOPICS
    collecting = gc.isenabled()
    gc.disable()  # it doubles the time of parsing
    try:
        source = file.read_bytes()
        documentation = sum(map(len, source.split(b'"""')[1::2]))
        if not is_topics and documentation < MIN_DOCUMENTATION * (len(source) + 1):
            return []
        with warnings.catch_warnings(action="ignore"):
            tree = ast.parse(source)
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    finally:
        if collecting:
            gc.enable()
    extracted = map(extract_prose, _topics(tree) if is_topics else _docstrings(tree))
    return [paragraphs for paragraphs in extracted if paragraphs]


def _topics(tree: ast.Module) -> Iterator[str]:
    """Yield the texts of pydoc's topics: the values of the one dictionary of the file."""
    for node in tree.body:
        if isinstance(value := getattr(node, "value", None), ast.Dict):
            yield from (str(text.value) for text in value.values if isinstance(text, ast.Constant))


def _docstrings(node: ast.AST) -> Iterator[str]:
    """Yield the docstrings of a module, its classes, functions and methods, in the order of the source."""
    if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        yield ast.get_docstring(node) or ""
    if isinstance(node, (ast.Module, ast.ClassDef, ast.If, ast.Try, ast.With)):
        for child in (*node.body, *getattr(node, "orelse", ())):
            yield from _docstrings(child)
    elif isinstance(node, (ast.Expr, ast.Assign)) and isinstance(node.value, ast.Call):
        function = node.value.func
        name = function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")
        if name in DOCSTRING_CALLS:
            for part in ast.walk(node.value):
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    yield inspect.cleandoc(part.value)


_SECTIONS = (
    "Parameters|Other Parameters|Params|Args|Arguments|Keyword Args|Keyword Arguments|Kwargs|Type Parameters|"
    "Attributes|Methods|Returns?|Return value|Yields?|Receives|Raises?|Warns|Inputs?|Outputs?|Shape|"
    "Signature|Usage|See Also|References?|Bibliography|Authors?|Copyright|License|Todo"
)
_SECTION = re.compile(rf"\s*(?:{_SECTIONS}):?\s*", re.IGNORECASE)
_UNDERLINED = re.compile(r"^(.*)\n[ \t]*[-=~^\"'*+#_.:]{3,}[ \t]*$", re.MULTILINE)
_ADMONITIONS = "note|warning|tip|hint|important|attention|caution|seealso"
_DEEPER = r"(?:\n(?:\1[ \t]+\S.*|[ \t]*$))*"  # the lines indented deeper than group 1, and blank ones

# Each row: a text without which the search is skipped, pattern, replacement.
_NOT_PROSE = (
    # Doctests with their output, up to the next blank line.
    (">>>", r"^[ \t]*>>>.*(?:\n[ \t]*\S.*)*", ""),
    # Fenced code.
    ("```", r"^[ \t]*```[^`\n]*\n(?:.*\n)*?[ \t]*```[ \t]*$", ""),
    # Sections named by a line that ends in a colon, with everything indented below.
    (":\n", rf"^([ \t]*)(?:\*\*|#+ )?(?i:{_SECTIONS})(?:\*\*)?:{{1,2}}(?:\*\*)?[ \t]*${_DEEPER}", ""),
    # Field lists (:param x: ..., @param x: ...) and directives other than admonitions.
    (":", rf"^([ \t]*)(?::[a-z]+(?: [^:\n]*)?:(?!`)|@\w+|\.\. (?!(?:{_ADMONITIONS})::)).*{_DEEPER}", ""),
    # Literal blocks behind a double colon.
    ("::", rf"^([ \t]*)(\S.*)::[ \t]*${_DEEPER}", r"\1\2:\n"),
)
"""Cut out, in this order, before a docstring is divided into paragraphs."""
_MARKUP = (
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
"""Light reStructuredText and Markdown, undone in this order."""
_COLUMNS = re.compile(r"[^\s.!?:)\"'] {3,}\S")
"""A table of aligned columns."""
_MARKER = re.compile(
    r"(?:[-*+•o]|\(?(?:\d+|[a-zA-Z]|[ivx]+)[.)]|\[!\w+\]|\.\. \w+::|"
    rf"(?i:{_ADMONITIONS}|example)s?:)(?:\s+|$)"
)
"""Start of a paragraph that is not part of its text: bullets, numbers, admonitions."""

_UNREADABLE = re.compile(r"[`\\{}$]|\*\*|://|%\(|>>>|::|Copyright|[Pp]ermission is hereby|TODO")
_SENTENCE = re.compile(r"[\"'(]?[A-Z0-9].*(?:[.!?:][\"')]*|\))")
_SYMBOLS = "=<>[]|/@%^&~*+#"
_WORD = re.compile(r"[\"'(\[]*[A-Za-z]+(?:['’-][A-Za-z]+)*[\"')\]]*[.,;:!?]*[\"')]*")
_COMMON_WORDS = frozenset(
    "a all an and any are as at be between but by can each for from has have if in is it its must no not of "  # noqa: SIM905
    "on only or should than that the then this to use used was we when which will with you".split()
)
MIN_PARAGRAPH_WORDS = 6
MAX_WORD_LETTERS = 60
MAX_SYMBOLS, MIN_PLAIN_WORDS, MIN_COMMON_WORDS = 0.03, 0.75, 0.18
"""Shares of a paragraph's characters and words."""


def extract_prose(docstring: str) -> list[str]:
    """Return the paragraphs of a dedented docstring that read as prose, unwrapped and without markup."""
    if "\n" in docstring:
        docstring, *rest = _UNDERLINED.split(docstring)  # headings, of which sections of tables and lists go
        bodies = zip(rest[::2], rest[1::2], strict=True)
        docstring += "".join(body for title, body in bodies if not _SECTION.fullmatch(title))
        docstring = _substitute(docstring, _NOT_PROSE)
    # Most of the dropped paragraphs are short: so the words are counted first.
    paragraphs = (p for p in _paragraphs(docstring) if p.count(" ") + 1 >= MIN_PARAGRAPH_WORDS)
    texts = (p for p in paragraphs if not ("   " in p and _COLUMNS.search(p)))
    plain = (" ".join(_substitute(text, _MARKUP).split()) for text in texts)
    return [paragraph for paragraph in plain if _is_prose(paragraph)]


def _substitute(text: str, substitutions: tuple[tuple[str, str, str], ...]) -> str:
    for needle, pattern, replacement in substitutions:
        if needle in text:
            text = re.sub(pattern, replacement, text, flags=re.MULTILINE)
    return text


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


def _is_prose(paragraph: str) -> bool:
    """Return whether a paragraph is made of sentences: most words are plain, and enough of them common."""
    words = paragraph.split()
    if len(words) < MIN_PARAGRAPH_WORDS or len(max(words, key=len)) > MAX_WORD_LETTERS:
        return False
    if not _SENTENCE.fullmatch(paragraph) or _UNREADABLE.search(paragraph):
        return False
    if sum(word.lower() in _COMMON_WORDS for word in words) < MIN_COMMON_WORDS * len(words):
        return False
    if sum(map(paragraph.count, _SYMBOLS)) > MAX_SYMBOLS * len(paragraph):
        return False
    return sum(1 for word in words if _WORD.fullmatch(word)) >= MIN_PLAIN_WORDS * len(words)
