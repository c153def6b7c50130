from __future__ import annotations

import pytest

from mlm.config.commands import PrepareConfig, TokenizerInspectConfig, TokenizerTrainConfig
from mlm.config.data import CorpusConfig, SourceConfig, TokenizerConfig
from mlm.config.errors import InputError
from mlm.startup.checks import check_files


def test_machines_are_counted_from_one() -> None:
    assert PrepareConfig().machine == (1, 1)
    assert PrepareConfig(shard="2/8").machine == (2, 8)
    for shard in ("0/8", "9/8", "8", "a/b", "1/0", "-1/3"):
        with pytest.raises(InputError, match=rf"shard={shard} must be i/n with 1 <= i <= n"):
            PrepareConfig(shard=shard)


def test_days_are_not_negative() -> None:
    PrepareConfig(clean=0)
    PrepareConfig(clean="all")
    with pytest.raises(InputError, match="clean=-1 must be a number of days, or all"):
        PrepareConfig(clean=-1)


def test_looking_after_the_cache_needs_no_text() -> None:
    data = CorpusConfig(sources=[SourceConfig("nowhere.txt")])
    check_files(PrepareConfig(data, list=True))
    check_files(PrepareConfig(data, clean="all"))
    with pytest.raises(InputError, match=r"nowhere\.txt"):
        check_files(PrepareConfig(data))


def test_a_vocabulary_to_train_is_not_to_be_loaded(tmp_path) -> None:
    with pytest.raises(InputError, match="is not to be trained"):
        TokenizerTrainConfig("out", tokenizer=TokenizerConfig(path=str(tmp_path)))
    with pytest.raises(InputError, match="there is no file"):
        check_files(TokenizerInspectConfig(str(tmp_path)))


def test_weights_are_given_to_all_or_none() -> None:
    CorpusConfig(sources=[SourceConfig("a", weight=1), SourceConfig("b", weight=2)])
    with pytest.raises(InputError, match=r"data.sources=\['b'\] have no weight; give it to all, or none"):
        CorpusConfig(sources=[SourceConfig("a", weight=1), SourceConfig("b")])
    for weight in (0, -1, float("nan"), float("inf")):
        with pytest.raises(InputError, match=r"weight=.* must be (above 0, or null|finite)"):
            SourceConfig("a", weight=weight)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_length": 0}, "data.min_length=0 must be at least 1"),
        ({"min_length": 9, "max_length": 8}, "data.max_length=8 is below data.min_length=9"),
        ({"near_similarity": 0.0}, r"data.near_similarity=0.0 must be in \(0, 1\]"),
    ],
)
def test_cleaning_options_are_checked(options, message) -> None:
    with pytest.raises(InputError, match=message):
        CorpusConfig(**options)
