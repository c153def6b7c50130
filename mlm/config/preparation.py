"""The options of the commands that prepare text: `mlm prepare`, `mlm tokenizer train` and `inspect`."""

from __future__ import annotations

import re
from dataclasses import field
from typing import ClassVar, Literal

from mlm.config.data import CorpusConfig, SourceConfig, TokenizerConfig
from mlm.config.errors import require
from mlm.config.experiment import PretrainConfig
from mlm.config.schema import Positive, UserPath, schema


@schema()
class PrepareConfig:
    """Prepare a corpus for pretraining, or look after what was prepared before.

    Example: mlm prepare --data.sources my_texts/ --tokenizer.vocab_size 32768
    """

    shipped_kind: ClassVar[str] = "pretrain"
    """Sub-folder of the shipped files that `--config` searches."""
    files_of: ClassVar[type] = PretrainConfig
    """The command whose files it reads, for the keys that it has too."""

    data: CorpusConfig = field(default_factory=CorpusConfig)
    """The text, as for train.py."""
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    """The vocabulary, as for train.py."""
    shard: str | None = None
    """i/n: write only the share of machine i of n; the last one to end finishes the store."""
    list: bool = False
    """Print what the cache holds, and prepare nothing."""
    clean: int | Literal["all"] | None = None
    """Remove from the cache what was not used for so many days, or all of it, and prepare nothing."""

    def __post_init__(self) -> None:
        rule = "must be i/n with 1 <= i <= n, such as 2/8"
        require(1 <= self.machine[0] <= self.machine[1], "shard", self.shard, rule)
        days = self.clean if isinstance(self.clean, int) else 0
        require(days >= 0, "clean", self.clean, "must be a number of days, or all")

    @property
    def machine(self) -> tuple[int, int]:
        """Which machine of how many this is, counted from 1; (0, 0) when `shard` cannot be read."""
        match = re.fullmatch(r"(\d+)/(\d+)", self.shard or "1/1")
        return (int(match[1]), int(match[2])) if match else (0, 0)


@schema()
class TokenizerTrainConfig:
    """Learn a vocabulary from text and write it as tokenizer.json.

    Example: mlm tokenizer train --data.sources my_texts/ --tokenizer.vocab_size 32768 --output my_tokenizer
    """

    output: UserPath
    """Folder to write tokenizer.json into."""
    data: CorpusConfig = field(default_factory=CorpusConfig)
    """The text."""
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    """Kind and size of the vocabulary."""

    def __post_init__(self) -> None:
        path = self.tokenizer.path
        require(path is None, "tokenizer.path", path, "is not to be trained; leave it out")


@schema()
class TokenizerInspectConfig:
    """Show what a vocabulary is like, and how it cuts text.

    Example: mlm tokenizer inspect --path my_tokenizer "Some words to cut."
    """

    path: str
    """A tokenizer.json or model folder."""
    text: list[str] = field(default_factory=list)
    """Sentences to cut, given without a flag."""
    sources: list[SourceConfig] = field(default_factory=list)
    """Text to measure it on, as data.sources of train.py."""
    max_bytes: Positive = 16 * 2**20
    """Measure on at most this much of each source."""
