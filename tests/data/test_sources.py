from __future__ import annotations

import bz2
import csv
import functools
import gzip
import http.server
import json
import lzma
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mlm.config.data import SourceConfig
from mlm.config.errors import InputError
from mlm.data import text as text_module
from mlm.data.formats import ReadReport
from mlm.data.sources import read_documents, source_files, source_size
from mlm.data.text import DigestCache, source_digest

SAMPLE = Path(__file__).parents[2] / "data" / "sample"
COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
}
DOCUMENTS = ["quiet harbour lights", "old wall, two boats", 'a "word"\nof two lines']


def read(path: Path | str, rule: str = "auto", **options: str) -> list[str]:
    return list(read_documents(SourceConfig(str(path), **options), rule))  # type: ignore[arg-type]


def write(path: Path, data: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


def test_linked_folders_are_read_once(tmp_path: Path) -> None:
    write(tmp_path / "elsewhere" / "b.txt", "behind the link")
    write(tmp_path / "folder" / "sub" / "a.txt", "harbour")
    for name in ("link", "link-again"):
        (tmp_path / "folder" / name).symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "back").symlink_to(tmp_path / "folder")
    assert read(tmp_path / "folder") == ["behind the link", "harbour"]


def test_glob_of_folders_only_reads_them(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path / "x" / "a.txt", "harbour")
    write(tmp_path / "y" / "deep" / "b.txt", "lights")
    assert read(tmp_path / "*") == ["harbour", "lights"]
    assert not caplog.records
    write(tmp_path / "c.txt", "old wall")
    assert read(tmp_path / "*") == ["old wall"]
    assert "the folders are not read: " in caplog.text
    assert read(tmp_path / "**") == ["old wall", "harbour", "lights"]


@pytest.mark.parametrize("suffix", ["txt", "txt.gz", "jsonl", "csv", "parquet"])
def test_sample_is_the_same_in_every_format(suffix: str) -> None:
    oracle = [json.loads(line)["text"] for line in (SAMPLE / "notes.jsonl").read_text("utf-8").splitlines()]
    assert len(oracle) == 40
    assert read(SAMPLE / f"notes.{suffix}") == oracle


def table_files(folder: Path) -> list[Path]:
    with (folder / "d.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([["text"], *[[text] for text in DOCUMENTS]])
    pq.write_table(pa.table({"text": DOCUMENTS}), folder / "d.parquet")
    lines = "\n".join(json.dumps({"text": text}) for text in DOCUMENTS)
    return [write(folder / "d.JSONL", lines), folder / "d.csv", folder / "d.parquet"]


def test_compressed_tables_equal_plain_ones(tmp_path: Path) -> None:
    for path in table_files(tmp_path):
        assert read(path) == DOCUMENTS
        for suffix, compress in COMPRESS.items():
            assert read(write(tmp_path / (path.name + suffix), compress(path.read_bytes()))) == DOCUMENTS


def test_compression_is_seen_from_the_content(tmp_path: Path) -> None:
    text = b"quiet harbour\nold wall\n"
    for name, data in {"plain.txt.gz": text, "plain.gz": text, "packed.txt": gzip.compress(text)}.items():
        assert read(write(tmp_path / name, data)) == ["quiet harbour", "old wall"]


def test_options_of_a_source_are_followed(tmp_path: Path) -> None:
    latin = write(tmp_path / "latin.txt", "quiet harbour\ncafé wall\nend".encode("latin-1"))
    assert read(latin, encoding="latin-1")[1] == "café wall"
    with pytest.raises(InputError, match=r"latin\.txt, line 2, byte 17: 0xe9"):
        read(latin)
    table = write(tmp_path / "t.csv", "title,body\na,b c\n")
    assert read(table, text_column="body") == ["b c"]


@pytest.mark.parametrize("suffix", ["txt", "jsonl", "csv", "tsv"])
def test_byte_order_mark_is_in_no_text_and_no_column_name(tmp_path: Path, suffix: str) -> None:
    rows = {"txt": "harbour lights", "jsonl": '{"text": "harbour lights"}', "csv": "text,n\nharbour lights,1"}
    rows["tsv"] = rows["csv"].replace(",", "\t")
    for encoding in ("utf-8-sig", "utf-8"):
        path = write(tmp_path / f"a.{suffix}", f"\ufeff{rows[suffix]}\n".encode())
        assert read(path, encoding=encoding) == ["harbour lights"]


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_line_ends_make_the_same_documents(tmp_path: Path, end: bytes) -> None:
    path = write(tmp_path / "a.txt", end.join([b"one", b"two", b" ", b"", b"three"]) + end)
    assert read(path, "line") == ["one", "two", "three"]
    assert read(path, "paragraph") == ["one two", "three"]


def test_folder_is_read_sorted_without_hidden_and_foreign_files(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.md", "a/a.txt.gz", "c.txt"):
        write(tmp_path / name, name)
    for name in (".hidden.txt", ".git/x.txt", "picture.png", "LICENSE"):
        write(tmp_path / name, "no")
    assert [Path(name).name for name in source_files(SourceConfig(str(tmp_path)))] == [
        "a.txt.gz",
        "z.md",
        "b.txt",
        "c.txt",
    ]
    assert read(tmp_path) == ["a/a.txt.gz", "a/z.md", "b.txt", "c.txt"]


def test_glob_is_read_sorted(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", "deep/er/c.txt", "d.log"):
        write(tmp_path / name, name)
    (tmp_path / "folder.txt").mkdir()
    assert read(tmp_path / "*.txt") == ["a.txt", "b.txt"]
    assert read(tmp_path / "**" / "*.txt") == ["a.txt", "b.txt", "deep/er/c.txt"]


def test_file_whose_name_looks_like_a_glob_is_a_file(tmp_path: Path) -> None:
    assert read(write(tmp_path / "notes[1].txt", "one")) == ["one"]


def test_folder_named_like_a_file_is_a_folder(tmp_path: Path) -> None:
    write(tmp_path / "x.txt" / "y.txt", "inside")
    assert read(tmp_path / "x.txt") == ["inside"]


def test_progress_and_report_cover_every_byte(tmp_path: Path) -> None:
    table_files(tmp_path)
    write(tmp_path / "t.txt.gz", gzip.compress(b"some words\n" * 1000))
    source, report = SourceConfig(str(tmp_path)), ReadReport("x")
    progress: list[int] = []
    documents = list(read_documents(source, "line", report, progress.append))
    assert sum(progress) == source_size(source)
    assert (report.files, report.documents) == (4, len(documents)) == (4, 1009)


def test_reading_stops_where_the_caller_stops(tmp_path: Path) -> None:
    write(tmp_path / "a.txt", "one\ntwo\n")
    write(tmp_path / "b.txt", b"\xff")
    documents = read_documents(SourceConfig(str(tmp_path)), "line")
    assert [next(documents), next(documents)] == ["one", "two"]
    documents.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize("content", ["", "\n \n", "\ufeff"])
def test_source_without_documents_is_an_error(tmp_path: Path, content: str) -> None:
    path = write(tmp_path / "empty.txt", content)
    with pytest.raises(InputError, match=r"empty\.txt: has no documents"):
        read(path)


def test_table_without_documents_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path / "nulls.jsonl", '{"text": null}\n{"text": ""}\n')
    with pytest.raises(InputError, match=r"nulls\.jsonl: has no documents: 2 of 2 rows had no text"):
        read(path)
    for name, data in {"e.csv": "", "f.csv": "text\n", "g.jsonl": "", "h.json": "[]"}.items():
        with pytest.raises(InputError, match="has no documents"):
            read(write(tmp_path / name, data))


def test_empty_file_among_others_is_no_error(tmp_path: Path) -> None:
    write(tmp_path / "a.txt", "")
    write(tmp_path / "b.txt", "words")
    assert read(tmp_path) == ["words"]


def test_paths_without_files_are_errors(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    write(tmp_path / "other" / "a.pdf", "x")
    (tmp_path / "link.txt").symlink_to(tmp_path / "nothing")
    os.mkfifo(tmp_path / "pipe.txt")
    for path, message in {
        tmp_path / "nowhere.txt": "nowhere.txt: no such file or folder",
        empty: "empty: has no documents: an empty folder",
        empty / "*.txt": "has no documents: no file matches",
        tmp_path / "other": r"has no documents: only \.pdf; known formats are \.txt",
        tmp_path
        / "other"
        / "a.pdf": r"a\.pdf: unknown format \.pdf; known are .* \.arrow, each also with .*format: text",
        tmp_path / "link.txt": r"link\.txt: is a symbolic link to nothing",
        tmp_path / "pipe.txt": r"pipe\.txt: is neither a file nor a folder",
        tmp_path / ("x" * 300): "cannot be read: File name too long",
    }.items():
        with pytest.raises(InputError, match=message):
            read(path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_forbidden_file_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path / "secret.txt", "x")
    path.chmod(0)
    with pytest.raises(InputError, match=r"secret\.txt: cannot be read: Permission denied"):
        read(path)


@pytest.mark.parametrize("name", ["a.txt.gz", "a.jsonl.bz2", "a.csv.xz", "a.parquet"])
def test_truncated_file_is_an_error(tmp_path: Path, name: str) -> None:
    lines = "\n".join(json.dumps({"text": str(hash(number))}) for number in range(20_000))
    compress = COMPRESS.get(Path(name).suffix, lambda data: b"PAR1" + data)
    data = compress(lines.encode())
    path = write(tmp_path / name, data[: len(data) // 2])
    with pytest.raises(InputError, match=rf"{name}: cannot be read: \S+"):
        read(path, "line")


def test_corrupt_zstd_is_an_error(tmp_path: Path) -> None:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(os.urandom(100_000))
    path = write(tmp_path / "a.txt.zst", sink.getvalue().to_pybytes()[:-50_000])
    with pytest.raises(InputError, match=r"a\.txt\.zst"):
        read(path, encoding="latin-1")


def test_error_messages_are_one_line(tmp_path: Path) -> None:
    for name in ("a.parquet", "a.json"):
        with pytest.raises(InputError) as error:
            read(write(tmp_path / name, "not\nthis"))
        assert "\n" not in str(error.value)


# ----------------------------------------------------------------------------------------- digests


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trust the time stamps of files that were written just now."""
    monkeypatch.setattr(text_module, "UNSETTLED_NS", -(10**12))


def digest(path: Path, cache: DigestCache, rule: str = "auto", **options: str) -> str:
    return source_digest(SourceConfig(str(path), **options), rule, cache)  # type: ignore[arg-type]


def test_digest_follows_content_and_options(tmp_path: Path) -> None:
    cache = DigestCache(tmp_path / "cache" / "digests.json")
    path = write(tmp_path / "a" / "x.txt", "one\ntwo")
    first = digest(path, cache)
    assert digest(write(tmp_path / "b" / "y.text", "one\ntwo"), cache) == first
    assert digest(tmp_path / "a", cache) == first
    others = [
        digest(path, cache, rule="line"),
        digest(path, cache, encoding="latin-1"),
        digest(path, cache, text_column="text"),
        digest(write(tmp_path / "c.txt", "one\ntwo!"), cache),
        digest(write(tmp_path / "c.csv", "one\ntwo"), cache),
    ]
    assert len({first, *others}) == 6


def test_digest_sees_an_edit_of_the_same_size_and_date(tmp_path: Path, settled: None) -> None:
    cache = DigestCache(tmp_path / "digests.json")
    path = write(tmp_path / "x.txt", "one")
    before, stat = digest(path, cache), path.stat()
    time.sleep(0.02)  # clocks of file systems tick slowly
    write(path, "two")
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert digest(path, cache) != before


def test_unchanged_files_are_read_once(
    tmp_path: Path, settled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "x.txt", "one")
    first = digest(path, DigestCache(tmp_path / "digests.json"))
    with monkeypatch.context() as patch:
        patch.setattr(text_module.hashlib, "file_digest", None)
        assert digest(path, DigestCache(tmp_path / "digests.json")) == first
    (tmp_path / "digests.json").write_text("{ damaged")
    assert digest(path, DigestCache(tmp_path / "digests.json")) == first
    assert sorted(file.name for file in tmp_path.iterdir()) == ["digests.json", "x.txt"]


def test_digest_of_a_file_changed_just_now_is_not_kept(tmp_path: Path) -> None:
    cache = DigestCache(tmp_path / "digests.json")
    digest(write(tmp_path / "x.txt", "one"), cache)
    assert not (tmp_path / "digests.json").exists()


# ------------------------------------------------------------------------------------ URLs and the hub


@contextmanager
def serving(handler: Callable[..., http.server.BaseHTTPRequestHandler]) -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as web:
        threading.Thread(target=web.serve_forever, args=[0.02], daemon=True).start()
        yield f"http://127.0.0.1:{web.server_port}"
        web.shutdown()


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves a folder, without the ability to jump about in a file."""

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    with serving(functools.partial(Quiet, directory=str(tmp_path))) as address:
        yield address


def test_url_is_read_like_a_file(tmp_path: Path, server: str) -> None:
    paths = table_files(tmp_path)
    paths.append(write(tmp_path / "t.txt.gz", gzip.compress(b"words\n" * 10_000)))
    for path in paths:
        source, progress = SourceConfig(f"{server}/{path.name}?v=1"), list[int]()
        assert list(read_documents(source, "auto", progress=progress.append)) == read(path)
        assert source_size(source) == sum(progress) == path.stat().st_size
    assert read(f"file://{paths[0]}") == DOCUMENTS


def test_digest_of_a_url_follows_what_the_server_says(tmp_path: Path, server: str) -> None:
    cache = DigestCache(tmp_path / "digests.json")
    write(tmp_path / "a.txt", "one")
    source = SourceConfig(f"{server}/a.txt")
    first = source_digest(source, "auto", cache)
    assert source_digest(source, "auto", cache) == first
    write(tmp_path / "a.txt", "three")
    assert source_digest(source, "auto", cache) != first


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_bad_urls_are_errors(server: str) -> None:
    for url, message in {
        f"{server}/missing.txt": "cannot be read: 404",
        f"http://127.0.0.1:{free_port()}/a.txt": "cannot be read: ",
        f"{server}/a.pdf": r"unknown format \.pdf",
        "gopher://x/a.txt": "cannot be read: .*gopher",
    }.items():
        with pytest.raises(InputError, match=message):
            read(url)
    with pytest.raises(InputError, match="cannot be read: 404"):
        source_size(SourceConfig(f"{server}/missing.txt"))


def test_hub_names_are_checked() -> None:
    with pytest.raises(InputError, match=r"hub: is not of the form hub:OWNER/NAME"):
        read("hub:")
    for bad in ("hub:a/b@c@d", "hub:a/b@c@d:train", "hub:a/b/c"):
        with pytest.raises(InputError, match="is not of the form hub:OWNER/NAME"):
            read(bad)
        with pytest.raises(InputError, match="is not of the form hub:OWNER/NAME"):
            source_digest(SourceConfig(bad), "auto", DigestCache(Path("none")))
    assert source_size(SourceConfig("hub:a/b")) is None


def run_with_hub(address: str, home: Path, *paths: str) -> tuple[list[str], float]:
    """Read sources in a process that takes `address` for the hub; return a line for each, and the seconds."""
    program = """
import json, sys
from mlm.config.data import SourceConfig
from mlm.config.errors import InputError
from mlm.data.labelled import read_table
from mlm.data.sources import read_documents
for path in sys.argv[1:]:
    name = path.removeprefix("table=")
    try:
        documents = read_table(name).rows if name != path else read_documents(SourceConfig(name), "auto")
        print(json.dumps(list(documents)))
    except InputError as error:
        print(error)
"""
    environment = {**os.environ, "HF_ENDPOINT": address, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0"}
    start = time.monotonic()
    command = [sys.executable, "-c", program, *paths]
    output = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
    return output.splitlines(), time.monotonic() - start


def test_unreachable_hub_is_an_error_within_seconds(tmp_path: Path) -> None:
    path = "hub:owner/name@config:split"
    (message,), seconds = run_with_hub(f"http://127.0.0.1:{free_port()}", tmp_path, path)
    assert message.startswith(f"{path}: the hub cannot be reached or has no owner/name: ")
    assert seconds < 15


class Hub(Quiet):
    """As much of the hub as one data set of one parquet file needs."""

    COMMIT = "0123456789" * 4
    FILE = "data/train-00000-of-00001.parquet"
    table: bytes

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        listing = [{"type": "file", "path": self.FILE, "size": len(self.table), "oid": "1" * 40}]
        if not path.startswith(("/api/datasets/me/toy", "/datasets/me/toy")):
            self.answer(b"{}", 404, "RepoNotFound")
        elif "/tree/" in path:
            folder = {"type": "directory", "path": "data", "size": 0, "oid": "2" * 40}
            self.answer(json.dumps(listing if path.endswith("/data") else [folder]).encode())
        elif path.startswith("/api/"):
            info = {"id": "me/toy", "sha": self.COMMIT, "siblings": [{"rfilename": self.FILE}], "tags": []}
            self.answer(json.dumps(info).encode())
        elif path.endswith(".parquet"):
            self.answer(self.table)
        else:
            self.answer(b"{}", 404, "EntryNotFound")

    def answer(self, body: bytes, status: int = 200, error: str = "") -> None:
        size = len(body)
        asked = self.headers.get("Range")
        if asked and status == 200:
            first, _, last = asked.removeprefix("bytes=").partition("-")
            status, body = 206, body[int(first) : int(last or size) + 1]
        self.send_response(status)
        if status == 206:
            self.send_header("Content-Range", f"bytes {first}-{int(first) + len(body) - 1}/{size}")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("X-Repo-Commit", self.COMMIT)
        self.send_header("ETag", '"1"')
        if error:
            self.send_header("X-Error-Code", error)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


def test_hub_data_set_is_streamed(tmp_path: Path) -> None:
    pq.write_table(
        pa.table({"n": [1, 2, 3], "body": ["quiet harbour", None, "old wall"]}), tmp_path / "t.parquet"
    )
    Hub.table = (tmp_path / "t.parquet").read_bytes()
    paths = ["hub:me/toy", "hub:me/toy@default:train", "hub:me/toy:valid", "hub:me/none", "table=hub:me/toy"]
    with serving(Hub) as address:
        lines, _ = run_with_hub(address, tmp_path, *paths)
    assert [json.loads(line) for line in lines[:2]] == [["quiet harbour", "old wall"]] * 2
    assert lines[2].startswith("hub:me/toy:valid: cannot be read: ")
    assert lines[3].startswith("hub:me/none: the hub cannot be reached or has no me/none: ")
    assert json.loads(lines[4])[1:] == [
        ["row 2", {"n": 2, "body": None}],
        ["row 3", {"n": 3, "body": "old wall"}],
    ]
    assert len(lines) == 5


def test_hub_revision_seen_last_is_used_without_a_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", f"http://127.0.0.1:{free_port()}")
    cache = DigestCache(tmp_path / "digests.json")
    with pytest.raises(InputError, match="hub cannot be reached"):
        digest(Path("hub:owner/name"), cache)
    cache.known["hub:owner/name"] = "0123abcd"
    assert digest(Path("hub:owner/name"), cache) == digest(Path("hub:owner/name"), cache)


def test_long_line_is_read_in_linear_time(tmp_path: Path) -> None:
    path = write(tmp_path / "long.txt", b"x" * (32 << 20))
    start = time.monotonic()
    assert [len(document) for document in read(path)] == [32 << 20]
    assert time.monotonic() - start < 10
    shutil.rmtree(tmp_path)


# ------------------------------------------------------------------------- what is asked of a source


def test_format_can_be_said(tmp_path: Path) -> None:
    rows = "\n".join(json.dumps({"text": text}) for text in DOCUMENTS)
    path = write(tmp_path / "a" / "corpus.data", rows)
    assert read(path, format="jsonl") == read(path.parent, format="jsonl") == DOCUMENTS
    assert read(write(tmp_path / "b.jsonl", "{not json"), format="text") == ["{not json"]
    with pytest.raises(InputError, match=r"corpus\.data: unknown format \.data; known are .*format: text"):
        read(path)
    cache = DigestCache(tmp_path / "digests.json")
    assert digest(path, cache, format="text") != digest(path, cache, format="jsonl")


def test_bytes_outside_the_encoding_are_replaced_on_request(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", b"one\ncaf\xe9 \xff\xfe\nthree\n")
    report = ReadReport("a")
    source = SourceConfig(str(path), encoding_errors="replace")
    assert list(read_documents(source, "line", report)) == ["one", "caf\ufffd \ufffd\ufffd", "three"]
    assert report.replaced_bytes == 3
    assert "3 bytes replaced" in report.summary()


BAD_FILES = {
    "a.txt": (b"one\nbad \xe9\nthree\n", r"a\.txt, line 2: 0xe9 is not in the encoding"),
    "b.jsonl": (
        b'{"text": "one"}\n\n{"text": "t\n{"text": 7}\n[]\n{"text": "\xff"}\n{"text": "three"}',
        r"b\.jsonl, line 3, column 10: not valid JSON",
    ),
    "c.csv": (b'text,n\none,1\n"two" x,1\n1,2,3\nthree,2\n', r"c\.csv, line 3: ',' expected"),
    "d.tsv": (b"text\tn\none\t1\nx\ty\tz\nthree\t2\n", r"d\.tsv, line 3: 3 cells under 2 columns"),
    "e.json": (b'[{"text": "one"}, {"text": 2}, {"text": "three"}]', r"e\.json, item 2: text is 2"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_rows_are_skipped_on_request_and_counted(tmp_path: Path, name: str) -> None:
    data, first = BAD_FILES[name]
    source = SourceConfig(str(write(tmp_path / name, data)))
    with pytest.raises(InputError, match=rf"{name}, (line|item) \d"):
        list(read_documents(source, "line"))
    report = ReadReport(name, skip_bad_rows=True)
    assert list(read_documents(source, "line", report)) == ["one", "three"]
    assert report.bad_rows == {"b.jsonl": 4, "c.csv": 2}.get(name, 1)
    assert re.search(rf"{report.bad_rows} bad rows? skipped \(the first: .*{first}", report.summary())


def test_source_of_bad_rows_only_has_no_documents(tmp_path: Path) -> None:
    source = SourceConfig(str(write(tmp_path / "a.jsonl", "{\n{\n")))
    with pytest.raises(InputError, match=r"has no documents: 2 bad rows skipped \(the first: .*line 1"):
        list(read_documents(source, "line", ReadReport("a", skip_bad_rows=True)))


def test_documents_of_the_wrong_length_are_left_out(tmp_path: Path) -> None:
    path, report = write(tmp_path / "a.txt", "ab\nabc\nabcd\nabcde\n"), ReadReport("a")
    source = SourceConfig(str(path))
    assert list(read_documents(source, "line", report, bounds=(3, 4))) == ["abc", "abcd"]
    assert "2 documents left out for their length" in report.summary()
    with pytest.raises(InputError, match="has no documents: 4 documents left out for their length"):
        list(read_documents(source, "line", bounds=(9, 99)))


# ------------------------------------------------------------------------------- what `datasets` saves


def saved(folder: Path, texts: list[str], **options: int) -> Path:
    datasets.Dataset.from_dict({"id": list(range(len(texts))), "text": texts}).save_to_disk(folder, **options)
    return folder


def test_saved_data_set_is_read(tmp_path: Path) -> None:
    folder = saved(tmp_path / "d", DOCUMENTS, num_shards=2)
    (folder / "cache-0123.arrow").write_bytes(b"something else")
    assert len(list(folder.glob("data-*.arrow"))) == 2
    assert read(folder) == read(tmp_path) == DOCUMENTS
    assert read(folder / "data-00001-of-00002.arrow") == DOCUMENTS[2:]


def test_split_train_of_a_saved_data_set_is_read(tmp_path: Path) -> None:
    splits = {name: datasets.Dataset.from_dict({"text": [name]}) for name in ("train", "test", "other")}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "a")
    assert read(tmp_path / "a") == ["train"]
    assert read(tmp_path / "a" / "test") == ["test"]
    del splits["train"]
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "b")
    with pytest.raises(InputError, match=r"b: has the splits test, other; name one: .*b/test"):
        read(tmp_path / "b")


@pytest.mark.parametrize("suffix", ["", *COMPRESS])
@pytest.mark.parametrize("form", ["stream", "file"])
def test_arrow_is_read_in_both_forms(tmp_path: Path, form: str, suffix: str) -> None:
    table = pa.table({"n": range(90), "body": pa.array(DOCUMENTS * 30).dictionary_encode()})
    sink = pa.BufferOutputStream()
    with (pa.ipc.new_stream if form == "stream" else pa.ipc.new_file)(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=40)
    data = COMPRESS.get(suffix, bytes)(sink.getvalue().to_pybytes())
    path = write(tmp_path / f"a.arrow{suffix}", data)
    source, progress = SourceConfig(str(path)), list[int]()
    assert list(read_documents(source, "auto", progress=progress.append)) == DOCUMENTS * 30
    assert sum(progress) == path.stat().st_size
    with pytest.raises(InputError, match=r"a\.arrow.*: cannot be read"):
        read(write(path, data[: len(data) // 2]))


def test_glob_of_urls_is_read_sorted(tmp_path: Path) -> None:
    import fsspec

    for name in ("b.txt", "a.txt", "c.csv"):
        with fsspec.open(f"memory://corpus/{name}", "w") as file:
            file.write(name)
    source = SourceConfig("memory://corpus/*.txt")
    assert read(source.path) == ["a.txt", "b.txt"]
    assert source_size(source) == 10
    with pytest.raises(InputError, match="no file matches"):
        read("memory://corpus/*.md")
