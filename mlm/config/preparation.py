"""What the commands that prepare text can be told: `mlm prepare`, `mlm tokenizer train` and `inspect`."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

from mlm.config.data import CorpusConfig, SourceConfig, TokenizerConfig, check_sources
from mlm.config.errors import InputError, require
from mlm.config.experiment import PretrainConfig


@dataclass
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

    def check_files(self) -> None:
        """Check that everything named is there."""
        if not self.list and self.clean is None:
            check_sources(self.data.sources)
            self.tokenizer.check_file()


@dataclass
class TokenizerTrainConfig:
    """Learn a vocabulary from text and write it as tokenizer.json.

    Example: mlm tokenizer train --data.sources my_texts/ --tokenizer.vocab_size 32768 --output my_tokenizer
    """

    output: str
    """Folder to write tokenizer.json into."""
    data: CorpusConfig = field(default_factory=CorpusConfig)
    """The text."""
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    """Kind and size of the vocabulary."""

    def __post_init__(self) -> None:
        self.output = os.path.expanduser(self.output)
        require(
            self.tokenizer.path is None,
            "tokenizer.path",
            self.tokenizer.path,
            "is not to be trained; leave it out",
        )

    def check_files(self) -> None:
        """Check that the text is there, and that nothing would be overwritten."""
        check_sources(self.data.sources)
        file = Path(self.output, "tokenizer.json")
        if file.exists():
            raise InputError(f"output={self.output} holds a tokenizer.json already; name another folder")


@dataclass
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
    max_bytes: int = 16 * 2**20
    """Measure on at most this much of each source."""

    def __post_init__(self) -> None:
        require(self.max_bytes > 0, "max_bytes", self.max_bytes, "must be at least 1")

    def check_files(self) -> None:
        """Check that the tokenizer and the text are there."""
        TokenizerConfig(path=self.path).check_file()
        check_sources(self.sources)
