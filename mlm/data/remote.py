"""Sources that are no files of this machine: URLs of any protocol that fsspec knows, data sets of the hub.

Both are streamed; what is known of their content before reading is what the server says about them.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Iterator
from itertools import count
from typing import IO, Any

from mlm.config.data import HUB_PREFIX, HubName, SourceConfig
from mlm.config.errors import InputError
from mlm.data.formats import ReadReport, one_line
from mlm.data.tables import row_documents

HTTP = ("http://", "https://")
HUB_TIMEOUT_S = 10.0
"""How long the hub may take to say which version of a data set is the current one."""


def url_file_name(url: str) -> str:
    """Return the last part of the path of a URL."""
    return re.split(r"[?#]", url.partition("::")[0])[0].rpartition("/")[2]


def url_files(url: str) -> list[str]:
    """Return the URLs of the files that a URL stands for, sorted: several for a glob, else itself.

    Raises:
        InputError: the glob matches nothing, or the place cannot be reached.
    """
    if url.startswith(HTTP) or not glob.has_magic(url):
        return [url]
    try:
        files, path = _file_system(url)
        found = sorted(files.unstrip_protocol(match) for match in files.glob(path))
    except Exception as error:  # each protocol has its own exceptions, a missing package among them
        raise InputError(f"{url}: cannot be reached: {one_line(error.__cause__ or error)}") from error
    if not found:
        raise InputError(f"{url}: has no documents: no file matches")
    return found


def open_url(url: str) -> IO[bytes]:
    """Open a file for reading.

    Raises:
        InputError: it cannot be opened.
    """
    try:
        files, path = _file_system(url)
        # Not every web server can jump about in a file.
        in_order = {"block_size": 0} if url.startswith(HTTP) else {}
        file: IO[bytes] = files.open(path, "rb", **in_order)
    except Exception as error:  # as in url_files
        raise InputError(f"{url}: cannot be opened: {one_line(error.__cause__ or error)}") from error
    return file


def url_facts(url: str) -> dict[str, Any]:
    """Return what the server says about a file: size, date, tag.

    Raises:
        InputError: it cannot be reached.
    """
    try:
        files, path = _file_system(url)
        return dict(files.info(path))
    except Exception as error:  # as in url_files
        raise InputError(f"{url}: cannot be reached: {one_line(error.__cause__ or error)}") from error


def _file_system(url: str) -> tuple[Any, str]:
    """Return the file system of a URL, and the path in it."""
    from fsspec.core import url_to_fs

    options: dict[str, Any] = {}
    if url.startswith(HTTP):
        from aiohttp import ClientTimeout

        # The default ends every download after five minutes.
        options["client_kwargs"] = {"timeout": ClientTimeout(total=None, sock_connect=10, sock_read=60)}
    files, path = url_to_fs(url, **options)
    return files, path


def hub_documents(source: SourceConfig, report: ReadReport) -> Iterator[str]:
    """Yield the documents of a data set as they are downloaded.

    Raises:
        InputError: the hub cannot be reached, or the data set cannot be read.
    """
    name = HubName.parse(source.path)
    revision = hub_revision(source.path)
    try:
        import datasets

        rows = datasets.load_dataset(
            name.repository, name.config, split=name.split or "train", streaming=True, revision=revision
        )
        numbered = zip((f"row {number}" for number in count(1)), rows, strict=False)
        yield from row_documents(numbered, source.path, source.text_column, report)
    except InputError:
        raise
    except Exception as error:  # the library has a different one for each way to fail
        raise InputError(f"{source.path}: cannot be read: {one_line(error)}") from error


def hub_repository(path: str) -> str:
    """Return the name under which all configurations and splits of a data set stand."""
    return f"{HUB_PREFIX}{HubName.parse(path).repository}"


def hub_revision(path: str) -> str:
    """Return the current commit of a data set.

    It is also the quick test whether the hub can be reached: `load_dataset` would try for half a minute.

    Raises:
        InputError: it cannot be reached, or has no such data set.
    """
    from huggingface_hub import HfApi

    name = HubName.parse(path).repository
    try:
        return str(HfApi().dataset_info(name, timeout=HUB_TIMEOUT_S).sha)
    except Exception as error:  # as in hub_documents
        raise InputError(f"{path}: the hub cannot be reached or has no {name}: {one_line(error)}") from error
