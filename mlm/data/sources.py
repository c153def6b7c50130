"""Read the documents of a source: find its files and read each.

- a source is a file, a folder, a glob, a URL, `hub:OWNER/NAME[@CONFIG][:SPLIT]` or a folder of `save_to_disk`
- files are read in sorted order, so that a source gives the same documents in the same order everywhere
- hub data sets are streamed; before reading, only their current commit is known
"""

import gc
import glob
import logging
import math
import os
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

from mlm.config.data import HUB_PREFIX, DocumentRule, HubName, SourceConfig
from mlm.config.errors import InputError
from mlm.data.formats import (
    HTTP,
    IS_TAR,
    SUFFIXES,
    ReadReport,
    cut_text,
    file_system,
    format_of,
    one_line,
    open_file,
    readable,
    text_blocks,
)
from mlm.data.tables import ARROW_FORMATS, arrow_documents, row_documents, text_rows
from mlm.files import shorten

HUB_TIMEOUT_S = 10.0  # seconds the hub may take to report the current version of a data set
SPLITS, STATE, INFO = "dataset_dict.json", "state.json", "dataset_info.json"
"""Files that `save_to_disk` writes beside the data: the list of splits; state and features of each."""

log = logging.getLogger(__name__)


def read_documents(
    source: SourceConfig,
    rule: DocumentRule,
    report: ReadReport | None = None,
    progress: Callable[[int], None] = lambda num_bytes: None,
    bounds: tuple[float, float] = (0, math.inf),
) -> Iterator[str]:
    """Yield the documents of one source as they are read; those outside `bounds` are left out.

    `rule`, which the caller takes from the source or the corpus, splits plain text; in other formats a row is
    a document. `report` counts documents and losses, and holds whether bad rows may be left out; `progress`
    gets the stored bytes of each block. A source without documents is an InputError.
    """
    report = report or ReadReport(source.path)
    before = report.documents
    for document in _read(source, rule, report, progress):
        if bounds[0] <= len(document) <= bounds[1]:
            report.add(document)
            yield document
        else:
            report.wrong_length += 1
    if report.documents == before:
        raise InputError(f"{source.path}: has no documents{report.losses(': ')}")


def _read(
    source: SourceConfig, rule: DocumentRule, report: ReadReport, progress: Callable[[int], None]
) -> Iterator[str]:
    column = source.text_column
    if source.path.startswith(HUB_PREFIX):
        yield from row_documents(data_set_rows(source.path), source.path, column, report)
        return
    for name in source_files(source):
        with open_file(name, progress) as stored, readable(name):
            report.files += 1
            kind = source.format or str(format_of(name))
            if kind in ARROW_FORMATS:
                yield from arrow_documents(kind, stored, name, column, report)
                continue
            blocks = text_blocks(stored, name, source.encoding, source.encoding_errors, report)
            if kind == "text":
                yield from cut_text(blocks, rule, report, name)
            else:
                rows = text_rows(blocks, kind, name, report)
                yield from row_documents(rows, name, column, report, open_ended=kind in ("json", "jsonl"))


def source_files(source: SourceConfig, formats: Sequence[str] = ()) -> list[str]:
    """Return the paths or URLs of the files of a source, sorted; each is of a known format.

    A folder means every such file below it that is not hidden; of a saved data set in splits, only `train`.
    With `formats` only files of these are read of a folder or glob.
    """
    with readable(source.path, Exception if not source.is_local else (OSError, ValueError)):
        found = _local_files(source, formats) if source.is_local else _urls(source.path)
        for name in found:
            if source.is_local and not os.path.isfile(name):
                dangling = "a symbolic link to nothing", "neither a file nor a folder"
                raise InputError(f"{name}: is {dangling[os.path.exists(name)]}")
            if {".tar", ".tgz"} & {*Path(name).suffixes}:
                raise InputError(f"{name}: {IS_TAR}")
            if not source.format and format_of(name) is None:
                remedy = f"known are {SUFFIXES}; or set the format of this source, format: text (jsonl, ...)"
                raise InputError(f"{name}: unknown format {Path(name).suffix}; {remedy}")
        return found


def _urls(path: str) -> list[str]:
    if path.startswith(HTTP) or not glob.has_magic(path):
        return [path]
    files, pattern = file_system(path)
    if found := sorted(files.unstrip_protocol(match) for match in files.glob(pattern)):
        return found
    raise InputError(f"{path}: has no documents: no file matches")


def _local_files(source: SourceConfig, formats: Sequence[str]) -> list[str]:
    text, path = source.path, Path(source.path)
    if path.is_dir():
        found = _files_below(path)
    elif path.exists() or path.is_symlink():
        return [text]
    elif glob.has_magic(text):
        found = _matching_files(path)
    else:
        raise InputError(f"{text}: no such file or folder")
    if not found:
        why = "an empty folder" if path.is_dir() else "no file matches"
        raise InputError(f"{text}: has no documents: {why}")
    known = [file for file in sorted(found) if source.format or _is_known(file, formats)]
    others = shorten(sorted({file.suffix or file.name for file in set(found) - set(known)}), 8)
    if not known:
        remedy = f"known formats are {SUFFIXES}; or set the format of this source, format: text (jsonl, ...)"
        remedy = f"files of {', '.join(formats)} are read" if formats else remedy
        raise InputError(f"{text}: has no documents: only {others}; {remedy}")
    if others:
        _tell_skipped(text, others)
    return list(map(str, known))


@cache
def _tell_skipped(text: str, others: str) -> None:
    """Say it once in a process, however often the files are listed."""
    log.info("%s: skipped files of other formats: %s", text, others)


def _is_known(file: Path, formats: Sequence[str]) -> bool:
    kind = format_of(file.name) if file.suffix else None
    return kind is not None and (not formats or kind in formats)


def _matching_files(pattern: Path) -> list[Path]:
    """Return the files that a glob matches; if it matches folders only, the files below them."""
    matches = [Path(match) for match in sorted(glob.glob(str(pattern), recursive=True))]
    folders = [match for match in matches if match.is_dir()]
    if folders == matches:
        return list(dict.fromkeys(file for folder in folders for file in _files_below(folder)))
    if folders and "**" not in pattern.parts:
        text = "%s: matches files and folders; the folders are not read: %s"
        log.warning(text, pattern, shorten(folders, 3))
    return [match for match in matches if not match.is_dir()]


def _files_below(folder: Path) -> list[Path]:
    """Return the files below a folder, also through links; a folder that several paths lead to comes once."""
    found, seen = [], set()
    for parent, folders, names in os.walk(folder, onerror=_raise, followlinks=True):
        real = os.path.realpath(parent)
        if real in seen:
            folders.clear()
        elif _is_saved(names):
            found += [Path(file["filename"]) for file in open_data_set(parent).cache_files]
            folders.clear()
        else:
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            found += [Path(parent, name) for name in names if not name.startswith(".") and name != INFO]
        seen.add(real)
    return found


def _raise(error: OSError) -> NoReturn:
    raise error


def source_size(source: SourceConfig) -> int | None:
    """Return the stored bytes of a source; None if that is unknown before reading."""
    if source.path.startswith(HUB_PREFIX):
        return None
    sizes = [int(file_facts(name).get("size") or 0) for name in source_files(source)]
    return sum(sizes) if source.is_local or all(sizes) else None


def file_facts(name: str) -> dict[str, Any]:
    """Return size, date and tag of a file or URL, as its file system reports them."""
    with readable(name, Exception):  # each protocol has its own exceptions
        files, path = file_system(name)
        return dict(files.info(path))


def _is_saved(names: list[str]) -> bool:
    return SPLITS in names or {STATE, INFO} <= set(names)


def is_data_set(path: str) -> bool:
    """Return whether a path is a hub data set or a folder of `save_to_disk`."""
    return path.startswith(HUB_PREFIX) or (os.path.isdir(path) and _is_saved(os.listdir(path)))


def hub_revision(path: str) -> str:
    """Return the current commit of a hub data set, or raise InputError at once; `load_dataset` takes 30 s."""
    from huggingface_hub import HfApi

    name = HubName.parse(path).repository
    try:
        return str(HfApi().dataset_info(name, timeout=HUB_TIMEOUT_S).sha)
    except Exception as error:  # the library has a different one for each way to fail
        raise InputError(f"{path}: the hub cannot be reached or has no {name}: {one_line(error)}") from error


def open_data_set(path: str) -> Any:
    """Open a data set: stream it from the hub, or map a saved folder into memory; of splits, `train`."""
    import datasets

    if path.startswith(HUB_PREFIX):
        name, revision = HubName.parse(path), hub_revision(path)
        options = {"split": name.split or "train", "streaming": True, "revision": revision}
        with readable(path, Exception):
            return datasets.load_dataset(name.repository, name.config, **options)
    with readable(path, Exception):
        data = datasets.load_from_disk(path)
    if not isinstance(data, dict):
        return data
    splits = list(data)
    if "train" not in splits and len(splits) > 1:
        raise InputError(f"{path}: has the splits {', '.join(splits)}; name one: {Path(path, splits[0])}")
    split = "train" if "train" in splits else splits[0]
    log.info("%s: reading the split %s of %s", path, split, ", ".join(splits))
    return data[split]


def data_set_rows(path: str, named: bool = False) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield place and cells of each row of a data set; with `named`, class ids become the classes' names."""
    import datasets

    data = open_data_set(path)
    features = (data.features or {}) if named else {}
    classes = {key: label.names for key, label in features.items() if isinstance(label, datasets.ClassLabel)}
    try:
        with readable(path, Exception):
            for number, row in enumerate(data, 1):
                for key, names in classes.items():
                    if row[key] in range(len(names)):
                        row[key] = names[row[key]]
                yield f"row {number}", row
    finally:
        del data
        gc.collect()  # a reader of parquet that is left when Python ends can abort it: apache/arrow 45214
