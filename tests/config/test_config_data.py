from __future__ import annotations

import pytest

from mlm.config.data import CorpusConfig, HubName, SourceConfig, TokenizerConfig
from mlm.config.errors import InputError
from mlm.startup.checks import check_sources, check_tokenizer


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("hub:owner/name", ("owner/name", None, None)),
        (
            "hub:Salesforce/wikitext@wikitext-2-raw-v1:train",
            ("Salesforce/wikitext", "wikitext-2-raw-v1", "train"),
        ),
        ("hub:owner/name.v2:train[:1%]", ("owner/name.v2", None, "train[:1%]")),
        ("hub:owner/na-me_1@en", ("owner/na-me_1", "en", None)),
    ],
)
def test_hub_names(text, parts):
    name = HubName.parse(text)
    assert (name.repository, name.config, name.split) == parts


@pytest.mark.parametrize(
    "text", ["hub:", "hub:name", "hub:a/b/c", "hub:a/b@", "hub:a/b:", "hub:a/b@c@d", "hub:../b"]
)
def test_malformed_hub_names(text):
    with pytest.raises(InputError, match=r"data.sources: hub:.* is not of the form hub:OWNER/NAME"):
        check_sources([SourceConfig(text)])


def test_sources_that_are_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a b.txt").write_text("x")
    (tmp_path / "[odd].txt").write_text("x")
    (tmp_path / "folder" / "sub").mkdir(parents=True)
    (tmp_path / "folder" / "sub" / "c.txt").write_text("x")
    paths = [
        "a b.txt",
        "[odd].txt",
        "folder",
        "*.txt",
        "folder/**/c.txt",
        "~/a b.txt",
        str(tmp_path / "a b.txt"),
    ]
    others = ["python-docs", "hub:owner/name", "https://example.org/x.txt"]
    check_sources([SourceConfig(path) for path in paths + others])


@pytest.mark.parametrize("path", ["nowhere.txt", "*.nowhere", "owner/name", "", "python_docs"])
def test_sources_that_are_not(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError) as error:
        check_sources([SourceConfig("python-docs"), SourceConfig(path)])
    assert str(error.value).startswith(
        f"data.sources: no file, folder or glob match {path!r}; looked in {tmp_path}"
    )


@pytest.mark.parametrize("encoding", ["utf-9", "hex", "rot13", "base64", "zlib", "a\0b", ""])
def test_codec_that_is_no_encoding_of_text(encoding):
    with pytest.raises(InputError, match=r"data.sources: encoding=.* is not a text encoding that Python"):
        SourceConfig("x", encoding=encoding)


@pytest.mark.parametrize(
    "encoding", ["utf-8", "latin-1", "utf-16", "utf-8-sig", "cp1252", "shift_jis", "idna"]
)
def test_encodings_of_text(encoding):
    assert SourceConfig("x", encoding=encoding).encoding == encoding


def test_tokenizer_to_reuse(tmp_path):
    check_tokenizer(TokenizerConfig())
    with pytest.raises(InputError, match=r"tokenizer.path=.*: there is no file .*tokenizer.json"):
        check_tokenizer(TokenizerConfig(path=str(tmp_path)))
    (tmp_path / "tokenizer.json").write_text("{}")
    check_tokenizer(TokenizerConfig(path=str(tmp_path)))
    check_tokenizer(TokenizerConfig(path=str(tmp_path / "tokenizer.json")))


def test_sizes_have_upper_bounds():
    with pytest.raises(InputError, match=r"tokenizer\.vocab_size=1000000000 must be at most 4194304"):
        TokenizerConfig(vocab_size=10**9)
    with pytest.raises(InputError, match=r"data\.seq_len=1000000000 must be at most 1048576"):
        CorpusConfig(seq_len=10**9)
    assert CorpusConfig(seq_len=2**20).seq_len == TokenizerConfig(vocab_size=2**20).vocab_size
