"""What is read, how it is cut into tokens and rows, and which tokens are hidden."""

from __future__ import annotations

import glob
import math
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from mlm.config.errors import InputError, require, require_finite

PYTHON_DOCS = "python-docs"
HUB_PREFIX = "hub:"
IGNORE_INDEX = -100
"""Label of a slot that predicts nothing."""
MAX_VOCABULARY, MAX_ROW = 2**22, 2**20
"""Entries of a vocabulary and tokens of a row beyond which memory runs out before anything is trained."""

DocumentRule = Literal["auto", "paragraph", "line", "file"]
FileFormat = Literal["text", "jsonl", "json", "csv", "tsv", "parquet", "arrow"]


@dataclass(frozen=True)
class HubName:
    """A data set on the Hugging Face hub, written `hub:OWNER/NAME[@CONFIG][:SPLIT]`."""

    repository: str
    """OWNER/NAME."""
    config: str | None = None
    """Configuration (subset) of the data set; None: its only one."""
    split: str | None = None
    """Split such as train or train[:1%]; None: train."""

    @classmethod
    def parse(cls, text: str) -> HubName:
        """Take a source's path apart.

        Raises:
            InputError: the text does not follow the pattern.
        """
        name = r"[A-Za-z0-9][\w.-]*"
        match = re.fullmatch(rf"{HUB_PREFIX}({name}/{name})(?:@([^@:\s]+))?(?::(\S+))?", text)
        if match is None:
            raise InputError(f"data.sources: {text} is not of the form hub:OWNER/NAME[@CONFIG][:SPLIT]")
        return cls(*match.groups())


@dataclass
class SourceConfig:
    """One place to read text from; on the command line and in YAML a plain string is its `path`."""

    path: str
    """File, folder, glob, python-docs, hub:OWNER/NAME[@CONFIG][:SPLIT] or a URL."""
    document: DocumentRule | None = None
    """What one document is in this source; null: data.document."""
    text_column: str | None = None
    """Column or JSON key that holds the text; null: the only candidate."""
    encoding: str = "utf-8"
    """Text encoding of the files."""
    encoding_errors: Literal["strict", "replace"] = "strict"
    """What to do at bytes that are not in the encoding: stop, or put U+FFFD and count them."""
    format: FileFormat | None = None
    """Format of the files; null: what their names say."""
    weight: float | None = None
    """Share of the training tokens, relative to the other sources; null: as much as there is."""

    def __post_init__(self) -> None:
        self.path = os.path.expanduser(self.path)
        positive = self.weight is None or 0 < self.weight < float("inf")
        require(
            positive, f"data.sources: {self.path}: weight", self.weight, "must be a number above 0, or null"
        )
        rule = "is not a text encoding; try utf-8 or latin-1"
        is_text = is_text_encoding(self.encoding)
        require(is_text, f"data.sources: {self.path}: encoding", self.encoding, rule)

    @property
    def is_local(self) -> bool:
        """Whether `path` names files of this machine."""
        return self.path != PYTHON_DOCS and not self.path.startswith(HUB_PREFIX) and "://" not in self.path


def is_text_encoding(name: str) -> bool:
    """Return whether Python decodes bytes to text by this name: base64, hex and rot13 are codecs of bytes."""
    try:
        return isinstance(b"".decode(name), str) and "".encode(name) is not None
    except (LookupError, ValueError):
        return False


def check_sources(sources: list[SourceConfig]) -> None:
    """Check that what can be checked without reading is right: files exist, hub names are well formed.

    Raises:
        InputError: names the first source that is not.
    """
    for source in sources:
        if source.path.startswith(HUB_PREFIX):
            HubName.parse(source.path)
        elif source.is_local and not (os.path.exists(source.path) or glob.glob(source.path, recursive=True)):
            raise InputError(
                f"data.sources: no file, folder or glob match {source.path!r}; looked in {os.getcwd()}; "
                "a hub data set is written hub:OWNER/NAME, a name with a comma {path: 'a,b'}"
            )


def _default_sources() -> list[SourceConfig]:
    return [SourceConfig(PYTHON_DOCS)]


@dataclass
class CorpusConfig:
    """Documents, rows and the held-out part."""

    sources: list[SourceConfig] = field(default_factory=_default_sources)
    """File, folder, glob, python-docs, hub:OWNER/NAME[@CONFIG][:SPLIT], or several as a,b."""
    document: DocumentRule = "auto"
    """One document of a text file; auto: paragraph if it has blank lines, else line."""
    seq_len: int = 128
    """Tokens a row, special tokens included."""
    packing: Literal["isolate", "concat", "none"] = "isolate"
    """isolate: documents that share a row never see each other; concat: they run on; none: one a row."""
    validation_fraction: float = 0.03
    """Share of the documents held out, chosen by a hash of their content."""
    max_validation_tokens: int = 1_000_000
    """Bound of the tokens validated on; the rest held out is not trained on."""
    max_documents: int | None = None
    """Read only the first documents of the corpus; null: all."""
    min_length: int | None = None
    """Leave out documents of fewer characters; null: none."""
    max_length: int | None = None
    """Leave out documents of more characters; null: none."""
    deduplicate: Literal["none", "exact", "near"] = "none"
    """Of equal documents keep the first; near: of similar ones too."""
    near_similarity: float = 0.8
    """Share of common five-token runs from which documents are similar."""
    skip_bad_rows: bool = False
    """Leave out and count rows that cannot be read; false: stop at the first."""
    num_proc: int | None = None
    """Processes that read and tokenize; null: all cores."""
    num_workers: int | None = None
    """Loader processes a device; null: 0 on a CPU, 2 on an accelerator."""
    cache_dir: str | None = None
    """Token stores; null: $MLM_CACHE, data/cache of a checkout, ~/.cache/mlm."""

    def __post_init__(self) -> None:
        hint = "names no source; give a path, python-docs or hub:OWNER/NAME"
        require(bool(self.sources), "data.sources", "[]", hint)
        fits = 8 <= self.seq_len <= MAX_ROW
        require(fits, "data.seq_len", self.seq_len, f"must be at least 8, and at most {MAX_ROW}")
        fraction, tokens = self.validation_fraction, self.max_validation_tokens
        require(0 < fraction < 1, "data.validation_fraction", fraction, "must lie in (0, 1)")
        require(tokens > 0, "data.max_validation_tokens", tokens, "must be at least 1")
        for name in ("max_documents", "num_proc", "min_length", "max_length"):
            value = getattr(self, name)
            require(value is None or value > 0, f"data.{name}", value, "must be at least 1, or null")
        fits = (self.min_length or 1) <= (self.max_length or self.min_length or 1)
        require(fits, "data.max_length", self.max_length, f"is below data.min_length={self.min_length}")
        require(
            0 < self.near_similarity <= 1, "data.near_similarity", self.near_similarity, "must lie in (0, 1]"
        )
        without = [source.path for source in self.sources if source.weight is None]
        require(
            len(without) in (0, len(self.sources)),
            "data.sources",
            without,
            "have no weight; give it to all, or none",
        )
        workers = self.num_workers
        require(workers is None or workers >= 0, "data.num_workers", workers, "must be at least 0, or null")
        self.cache_dir = self.cache_dir and os.path.expanduser(self.cache_dir)


@dataclass
class TokenizerConfig:
    """The vocabulary: trained on the corpus, or taken from a file."""

    path: str | None = None
    """A tokenizer.json or model folder to reuse; null: train one."""
    type: Literal["wordpiece", "bpe"] = "wordpiece"
    """Kind of vocabulary to train: WordPiece or byte-level BPE."""
    vocab_size: int = 8192
    """Entries of the trained vocabulary, special tokens included."""
    lowercase: bool = True
    """Fold case and accents first (trained vocabularies only)."""
    max_bytes: int = 128 * 2**20
    """Learn from at most this much text, sources in proportion: more costs time and changes little."""
    add_tokens: str | None = None
    """Text file of words, one a line, that become tokens of their own; null: none."""

    def __post_init__(self) -> None:
        smallest = 261 if self.type == "bpe" else 16  # bytes and special tokens
        require(
            self.vocab_size >= smallest,
            "tokenizer.vocab_size",
            self.vocab_size,
            f"must be at least {smallest} for type {self.type}",
        )
        size = self.vocab_size
        require(size <= MAX_VOCABULARY, "tokenizer.vocab_size", size, f"must be at most {MAX_VOCABULARY}")
        require(self.max_bytes > 0, "tokenizer.max_bytes", self.max_bytes, "must be at least 1")
        self.path = self.path and os.path.expanduser(self.path)
        self.add_tokens = self.add_tokens and os.path.expanduser(self.add_tokens)

    def check_file(self) -> None:
        """Check that the tokenizer to reuse is there, and the file of words to add.

        Raises:
            InputError: it is not; says where it was looked for.
        """
        words = self.add_tokens
        if words is not None and not Path(words).is_file():
            raise InputError(f"tokenizer.add_tokens={words}: there is no file {Path(words).absolute()}")
        if self.path is None:
            return
        path = Path(self.path)
        files = [path / name for name in ("tokenizer.json", "vocab.txt")] if path.is_dir() else [path]
        if not any(file.is_file() for file in files):
            raise InputError(f"tokenizer.path={self.path}: there is no file {files[0].absolute()}")


@dataclass
class MaskingConfig:
    """Which tokens are predicted and what the model sees in their place."""

    strategy: Literal["token", "whole_word", "span"] = "token"
    """Hide single tokens, whole words, or runs of tokens."""
    mask_rate: float = 0.15
    """Share of the ordinary tokens predicted in training, in (0, 1]."""
    final_mask_rate: float | None = None
    """The same at the end of training, reached in a straight line; null: mask_rate throughout."""
    validation_mask_rate: float = 0.15
    """The same for validation, whose masks are frozen."""
    mask_token_fraction: float = 0.8
    """Share of the predicted tokens shown as [MASK]."""
    random_token_fraction: float = 0.1
    """Share of them shown as a random ordinary token; the rest is unchanged."""

    def __post_init__(self) -> None:
        require_finite("masking", self)
        for name in ("mask_rate", "validation_mask_rate"):
            value = getattr(self, name)
            require(0 < value <= 1, f"masking.{name}", value, "must lie in (0, 1]")
        final = self.final_mask_rate
        require(
            final is None or 0 < final <= 1, "masking.final_mask_rate", final, "must lie in (0, 1], or null"
        )
        for name in ("mask_token_fraction", "random_token_fraction"):
            value = getattr(self, name)
            require(0 <= value <= 1, f"masking.{name}", value, "must lie in [0, 1]")
        total = self.mask_token_fraction + self.random_token_fraction
        both = "masking.mask_token_fraction + masking.random_token_fraction"
        require(total <= 1 + 1e-9, both, total, "must not exceed 1")

    @property
    def highest_mask_rate(self) -> float:
        """The largest rate of the run: rows have slots for so many predictions."""
        return max(self.mask_rate, self.final_mask_rate or 0.0)


def prediction_slots(seq_len: int, rate: float) -> int:
    """Return M, the most predictions in a row of `seq_len` tokens: CLS and SEP are never predicted."""
    return math.ceil(rate * max(seq_len - 2, 1))
