import json
import os
import pickle
import resource
import signal
import subprocess
import sys
import time

import datasets
import numpy as np
import pytest
from stores import build_store

from mlm.config.errors import InputError
from mlm.data import encoding
from mlm.data import store as store_module
from mlm.data.packing import Spans
from mlm.data.store import TokenStore, finish_store, write_shards
from mlm.tokenizer import encode_documents


@pytest.fixture
def store(tmp_path, documents, tokenizer):
    return build_store(tmp_path / "store", documents, tokenizer)


def test_every_document_comes_back(store, documents, tokenizer):
    expected = encode_documents(tokenizer, documents)
    spans = zip(store.documents.starts.tolist(), store.documents.lengths.tolist(), strict=True)
    assert [store.tokens(*span).tolist() for span in spans] == expected
    assert store.num_bytes.tolist() == [len(document.encode()) for document in documents]
    counts = np.bincount(np.concatenate(expected), minlength=120)
    assert store.counts(120, store.documents).tolist() == counts.tolist()
    assert store.manifest["num_tokens"] == counts.sum()


def test_opening_imports_no_pandas(store):
    code = (
        "import sys; from pathlib import Path; from mlm.data.store import TokenStore;"
        "store = TokenStore(Path(sys.argv[1])); size = int(store.num_bytes.sum());"
        "print(store.documents.num_tokens, len(store.text_hashes), size, 'pandas' in sys.modules)"
    )
    found = subprocess.check_output([sys.executable, "-c", code, str(store.folder)], text=True).split()
    totals = (store.documents.num_tokens, len(store.text_hashes), int(store.num_bytes.sum()))
    assert found == [*map(str, totals), "False"]


def test_shards_change_nothing(store, tmp_path, documents, tokenizer, monkeypatch):
    monkeypatch.setattr(store_module, "SHARD_CHARACTERS", 2000)
    sharded = build_store(tmp_path / "sharded", documents, tokenizer)
    assert len(sharded.manifest["shards"]) > 5
    assert np.array_equal(sharded.documents.starts, store.documents.starts)
    for start, length in zip(store.documents.starts.tolist(), store.documents.lengths.tolist(), strict=True):
        assert np.array_equal(sharded.tokens(start, length), store.tokens(start, length))
    assert sharded.counts(120, sharded.documents).tolist() == store.counts(120, store.documents).tolist()
    some = store.documents.take(np.arange(300) % 7 < 3)
    assert sharded.counts(120, some).tolist() == store.counts(120, some).tolist()
    pieces = [store.tokens(*span) for span in zip(some.starts.tolist(), some.lengths.tolist(), strict=True)]
    assert store.counts(120, some).tolist() == np.bincount(np.concatenate(pieces), minlength=120).tolist()


def test_datasets_opens_a_shard(store, documents, tokenizer):
    table = datasets.Dataset.from_file(str(store.folder / store.manifest["shards"][0]))
    assert table["input_ids"][7] == encode_documents(tokenizer, documents[7:8])[0]


def test_as_dataset_has_the_documents_of_the_store_memory_mapped(tmp_path, documents, tokenizer, monkeypatch):
    monkeypatch.setattr(store_module, "SHARD_CHARACTERS", 2000)
    sharded = build_store(tmp_path / "sharded", documents, tokenizer)
    assert len(sharded.manifest["shards"]) > 5
    dataset = sharded.as_dataset()
    assert dataset.column_names == ["input_ids"]
    spans = zip(sharded.documents.starts.tolist(), sharded.documents.lengths.tolist(), strict=True)
    assert dataset["input_ids"][:] == [sharded.tokens(*span).tolist() for span in spans]
    files = [sharded.folder / name for name in sharded.manifest["shards"]]
    assert [file["filename"] for file in dataset.cache_files] == list(map(str, files))
    assert dataset.features["input_ids"].feature.dtype == "uint16"


def test_same_text_same_bytes(store, tmp_path, documents, tokenizer):
    again = build_store(tmp_path / "again", iter(documents), tokenizer)
    for name in store.manifest["shards"]:
        assert (again.folder / name).read_bytes() == (store.folder / name).read_bytes()


def test_equal_texts_have_equal_hashes(tmp_path, tokenizer):
    found = build_store(tmp_path / "s", ["the boat", "a lamp", "the boat"], tokenizer)
    hashes = found.text_hashes.tolist()
    assert hashes[0] == hashes[2] != hashes[1]


def test_documents_without_tokens_are_counted_and_left_out(tmp_path, tokenizer):
    found = build_store(tmp_path / "s", ["the boat", "\u200b", "a lamp"], tokenizer)
    assert found.manifest["num_documents"] == 2
    assert found.manifest["num_without_tokens"] == 1


def test_unknown_tokens_are_counted(tmp_path, tokenizer):
    assert build_store(tmp_path / "s", ["the \u4e16 boat \u754c"], tokenizer).manifest["num_unknown"] == 2


def test_a_failure_leaves_nothing(tmp_path, tokenizer):
    def broken():
        yield "the boat"
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        build_store(tmp_path / "s", broken(), tokenizer)
    assert list(tmp_path.iterdir()) == []


def test_a_loader_process_opens_it_again(store):
    other = pickle.loads(pickle.dumps(store))
    assert isinstance(other, TokenStore)
    assert np.array_equal(other.tokens(0, 5), store.tokens(0, 5))


def test_text_without_any_token_is_refused(tmp_path, tokenizer):
    with pytest.raises(InputError, match="documents: the text gives no tokens"):
        build_store(tmp_path / "s", ["\u200b", "\u200b\u200b"], tokenizer)
    assert list(tmp_path.iterdir()) == []


def test_counts_of_spans_are_those_of_their_tokens(tmp_path, documents, tokenizer, monkeypatch):
    monkeypatch.setattr(store_module, "SHARD_CHARACTERS", 2000)
    store = build_store(tmp_path / "s", documents, tokenizer)
    chosen = np.random.default_rng(0).random(len(documents)) < 0.7
    cut = Spans(store.documents.starts + 1, np.maximum(store.documents.lengths - 2, 0))
    for spans in (store.documents, store.documents.take(chosen), cut):
        pairs = zip(spans.starts.tolist(), spans.lengths.tolist(), strict=True)
        ids = np.concatenate([store.tokens(*pair) for pair in pairs])
        assert store.counts(120, spans).tolist() == np.bincount(ids, minlength=120).tolist()


def test_opening_reads_no_documents(store):
    opened = TokenStore(store.folder)
    assert not {"documents", "text_hashes", "num_bytes"} & vars(opened).keys()


def test_each_source_has_its_shards_and_counts(tmp_path, tokenizer):
    sources = [["the boat", "a lamp", "the boat"], [], ["a lamp \u4e16", "\u200b"]]
    shards = write_shards(tmp_path / "s", sources, tokenizer)
    assert shards == [1, 0, 1]
    facts = [{"path": name} for name in "abc"]
    store = finish_store(tmp_path / "s", shards, facts, {})
    expected = {"num_documents": [3, 0, 1], "num_tokens": [6, 0, 3], "num_unknown": [0, 0, 1]}
    expected |= {"num_without_tokens": [0, 0, 1], "num_duplicates": [1, 0, 0], "num_bytes": [22, 0, 10]}
    for name, values in expected.items():
        assert [source[name] for source in store.sources] == values
        assert store.manifest[name] == sum(values)
    assert [source["path"] for source in store.sources] == ["a", "b", "c"]


def test_documents_of_megabytes_lose_nothing(tmp_path, documents, tokenizer):
    text = " ".join(documents)
    long = " ".join([text] * (3_000_000 // len(text)))
    store = build_store(tmp_path / "s", (f"{number} {long}" for number in range(4)), tokenizer)
    expected = [len(ids) for ids in encode_documents(tokenizer, [f"{number} {long}" for number in range(4)])]
    assert store.documents.lengths.tolist() == expected


# ------------------------------------------------------------------- processes, machines, interruptions


def files_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def small_shards(monkeypatch):
    monkeypatch.setattr(store_module, "SHARD_CHARACTERS", 3000)
    monkeypatch.setattr(store_module, "BATCH_CHARACTERS", 500)
    monkeypatch.setattr(encoding, "BATCHES_ALONE", 4)


@pytest.fixture
def halves(documents):
    return [documents[:100], documents[100:]]


FACTS = [{"path": "a"}, {"path": "b"}]


@pytest.mark.usefixtures("small_shards")
def test_processes_change_no_byte(tmp_path, halves, tokenizer):
    for name, processes in (("one", 1), ("two", 2)):
        shards = write_shards(tmp_path / name, halves, tokenizer, processes)
        assert finish_store(tmp_path / name, shards, FACTS, {}) is not None
    assert len(files_of(tmp_path / "one")) > 10
    assert files_of(tmp_path / "one") == files_of(tmp_path / "two")


@pytest.mark.usefixtures("small_shards")
def test_machines_share_the_shards(tmp_path, halves, tokenizer):
    shards = write_shards(tmp_path / "whole", halves, tokenizer)
    finish_store(tmp_path / "whole", shards, FACTS, {})
    written = []
    for number in (3, 1, 2):
        assert finish_store(tmp_path / "parts", shards, FACTS, {}) is None
        assert write_shards(tmp_path / "parts", halves, tokenizer, machine=(number, 3)) == shards
        written.append(len(list((tmp_path / "parts.partial").glob("shard-*"))))
    assert written[0] < written[1] < written[2] == sum(shards)
    assert finish_store(tmp_path / "parts", shards, FACTS, {}) is not None
    assert files_of(tmp_path / "parts") == files_of(tmp_path / "whole")


@pytest.mark.usefixtures("small_shards")
def test_interrupted_work_resumes_with_the_missing_shards(tmp_path, halves, tokenizer, caplog):
    shards = write_shards(tmp_path / "whole", halves, tokenizer)
    finish_store(tmp_path / "whole", shards, FACTS, {})

    def broken():
        yield halves[0]
        yield from ()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_shards(tmp_path / "parts", broken(), tokenizer)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "parts.partial").iterdir()}
    assert 0 < len(before) < sum(shards)
    (tmp_path / "parts.partial" / ".shard-00007.arrow.4711").write_bytes(b"killed while it wrote this")
    with caplog.at_level("INFO"):
        assert write_shards(tmp_path / "parts", halves, tokenizer) == shards
    assert f"resuming after {len(before)} finished shards" in caplog.text
    assert all(path.stat().st_mtime_ns == time_ for path, time_ in before.items())
    finish_store(tmp_path / "parts", shards, FACTS, {})
    assert files_of(tmp_path / "parts") == files_of(tmp_path / "whole")


PROGRAM = """
import json, sys
from mlm.data import encoding, store
from mlm.tokenizer import load_tokenizer

def slowly(documents, seconds):
    import time
    for document in documents:
        time.sleep(seconds)
        yield document

if __name__ == "__main__":
    folder, texts, vocabulary, seconds = sys.argv[1:5]
    store.SHARD_CHARACTERS, store.BATCH_CHARACTERS, encoding.BATCHES_ALONE = 3000, 500, 1
    from pathlib import Path
    documents = slowly(json.loads(Path(texts).read_text()), float(seconds))
    from mlm.config.errors import InputError
    try:
        shards = store.write_shards(Path(folder), [documents], load_tokenizer(vocabulary), int(sys.argv[5]))
        store.finish_store(Path(folder), shards, [{"path": "a"}], {})
    except InputError as error:
        sys.exit(f"error: {error}")
"""


def program(tmp_path, documents, tokenizer, folder, seconds=0.0, processes=2, **options):
    (tmp_path / "texts.json").write_text(json.dumps(documents))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    script = tmp_path / "program.py"  # a file, since the processes import it
    script.write_text(PROGRAM)
    inputs = [tmp_path / "texts.json", tmp_path / "tokenizer.json"]
    command = [sys.executable, script, folder, *inputs, seconds, processes]
    return subprocess.Popen(
        list(map(str, command)), stderr=subprocess.PIPE, text=True, start_new_session=True, **options
    )


def test_killed_run_resumes_to_the_same_bytes(tmp_path, documents, tokenizer):
    assert program(tmp_path, documents, tokenizer, tmp_path / "whole").wait() == 0
    run = program(tmp_path, documents, tokenizer, tmp_path / "killed", seconds=0.005)
    partial = tmp_path / "killed.partial"
    for _ in range(1000):
        if len(list(partial.glob("shard-*"))) >= 2:
            break
        time.sleep(0.01)
    os.kill(run.pid, signal.SIGKILL)
    run.wait()
    kept = len(list(partial.glob("shard-*")))
    assert 2 <= kept < len(files_of(tmp_path / "whole")) - 1
    assert not (tmp_path / "killed").exists()
    assert program(tmp_path, documents, tokenizer, tmp_path / "killed").wait() == 0
    assert files_of(tmp_path / "killed") == files_of(tmp_path / "whole")
    assert not partial.exists()


# -------------------------------------------------------------------------------------------- full disk


def limit_files():
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))


def test_a_write_that_fails_is_one_line_and_keeps_nothing_half_written(tmp_path, documents, tokenizer):
    folder = tmp_path / "s"
    run = program(tmp_path, documents, tokenizer, folder, processes=1, preexec_fn=limit_files)
    _, errors = run.communicate()
    assert run.returncode == 1
    assert errors.startswith("error: ")
    assert "cannot be written: File too large" in errors
    assert "--data.cache_dir" in errors
    assert len(errors.splitlines()) == 1
    assert not list(tmp_path.glob("s*"))


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 100 kB; only root can make one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=100k", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs a disk of its own")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_is_found_before_writing(small_disk, tmp_path, documents, tokenizer, monkeypatch):
    texts = documents * 20
    with pytest.raises(
        InputError, match=r"needs about \d+\.\d kB more, but \d+\.\d kB are free; .*cache_dir"
    ):
        build_store(small_disk / "s", texts, tokenizer)
    assert list(small_disk.iterdir()) == []
    # Where the need is not seen in advance, the disk fills up in the middle.
    monkeypatch.setattr(store_module, "check_room", lambda path, needed: None)
    monkeypatch.setattr(store_module, "SHARD_CHARACTERS", 60_000)
    with pytest.raises(InputError, match="cannot be written: No space left on device"):
        build_store(small_disk / "s", texts, tokenizer)
    kept = files_of(small_disk / "s.partial")
    assert kept
    assert all(name.startswith("shard-") for name in kept)
    # After room is made the work goes on.
    subprocess.run(["mount", "-o", "remount,size=1m", str(small_disk)], check=True)
    assert build_store(small_disk / "s", texts, tokenizer).manifest["num_documents"] == len(texts)
    assert kept.items() <= files_of(small_disk / "s").items()


def test_the_room_for_the_rest_is_estimated(tmp_path, documents, tokenizer, monkeypatch):
    monkeypatch.setattr(store_module, "SHARD_CHARACTERS", 60_000)
    monkeypatch.setattr(store_module, "BATCH_CHARACTERS", 2000)
    texts, needs = documents * 20, []
    monkeypatch.setattr(store_module, "check_room", lambda path, needed: needs.append(needed))
    read = 0

    def counted():
        nonlocal read
        for text in texts:
            read += 1
            yield text

    write_shards(tmp_path / "s", [counted()], tokenizer, share_read=lambda: read / len(texts))
    sizes = [path.stat().st_size for path in sorted((tmp_path / "s.partial").iterdir())]
    real = np.cumsum(sizes[::-1])[::-1]
    assert np.all((real[:-1] * 0.9 < needs[:-1]) & (needs[:-1] < real[:-1] * 1.6))
