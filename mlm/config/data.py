"""Texts, their tokens and rows, and which tokens are masked."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Annotated, Literal

from mlm.config.errors import InputError, require, require_defaults
from mlm.config.schema import (
    AboveZero,
    Encoding,
    InsideUnit,
    NonNegative,
    Positive,
    RowLength,
    Unit,
    UpToOne,
    UserPath,
    rule,
    schema,
)

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
    def parse(cls, text: str, key: str = "data.sources") -> HubName:
        """Split the path of a source; raise InputError if it does not follow the pattern."""
        name = r"[A-Za-z0-9][\w.-]*"
        match = re.fullmatch(rf"{HUB_PREFIX}({name}/{name})(?:@([^@:\s]+))?(?::(\S+))?", text)
        if match is None:
            form = f"{text} is not of the form hub:OWNER/NAME[@CONFIG][:SPLIT]"
            raise InputError(f"{key}: {form}", key)
        return cls(*match.groups())


@schema("data.sources: ")
class SourceConfig:
    """One place to read text from; on the command line and in YAML a plain string is its `path`."""

    path: UserPath
    """File, folder, glob, python-docs, hub:OWNER/NAME[@CONFIG][:SPLIT] or a URL."""
    document: DocumentRule | None = None
    """What one document is in this source; null: data.document."""
    text_column: str | None = None
    """Column or JSON key that holds the text; null: the only candidate."""
    encoding: Encoding = "utf-8"
    """Text encoding of the files."""
    encoding_errors: Literal["strict", "replace"] = "strict"
    """At bytes that are not in the encoding: stop, or put U+FFFD and count them."""
    format: FileFormat | None = None
    """Format of the files; null: by their names."""
    weight: AboveZero | None = None
    """Share of the training tokens, relative to the other sources; null: as much as there is."""

    @property
    def is_local(self) -> bool:
        """Whether `path` names files of this machine."""
        return self.path != PYTHON_DOCS and not self.path.startswith(HUB_PREFIX) and "://" not in self.path


def source_names(sources: list[SourceConfig]) -> list[str]:
    """Return a short name of each source: the stem of its file, folder or data set, made unique."""
    names: list[str] = []
    for source in sources:
        place = re.sub(r"^.*://|[?#].*$|@.*$|:[^:/]*$", "", source.path)
        parts = [
            re.sub(r"\W+", "-", part.lstrip(".").partition(".")[0]).strip("-") for part in place.split("/")
        ]
        stem = next(filter(None, reversed(parts)), "source")
        numbered = (stem if number == 1 else f"{stem}-{number}" for number in count(1))
        names.append(next(name for name in numbered if name not in names))
    return names


@schema("data.")
class CorpusConfig:
    """Documents, rows and the held-out part."""

    sources: list[SourceConfig] = field(default_factory=lambda: [SourceConfig(PYTHON_DOCS)])
    """File, folder, glob, python-docs, hub:OWNER/NAME[@CONFIG][:SPLIT], or several as a,b."""
    validation: list[SourceConfig] = field(default_factory=list)
    """Texts to validate on, as sources; nothing is then held out. Empty: hold out a share."""
    document: DocumentRule = "auto"
    """One document of a text file; auto: paragraph if it has blank lines, else line."""
    seq_len: Annotated[RowLength, rule(f"must be at most {MAX_ROW}", MAX_ROW.__ge__)] = 128
    """Tokens a row, special tokens included."""
    packing: Literal["isolate", "concat", "none"] = "isolate"
    """isolate: documents that share a row never see each other; concat: they run on; none: one a row."""
    validation_fraction: InsideUnit = 0.03
    """Share of the documents held out, chosen by a hash of their content."""
    max_validation_tokens: Positive = 1_000_000
    """Bound of the tokens validated on; the rest held out is not trained on."""
    max_documents: Positive | None = None
    """Read only the first documents of the corpus; null: all."""
    min_length: Positive | None = None
    """Skip documents of fewer characters; null: none."""
    max_length: Positive | None = None
    """Skip documents of more characters; null: none."""
    deduplicate: Literal["none", "exact", "near"] = "none"
    """Of equal documents keep the first; near: of similar ones too."""
    near_similarity: UpToOne = 0.8
    """Share of common five-token runs from which documents are similar."""
    skip_bad_rows: bool = False
    """Skip and count rows that cannot be read; false: stop at the first."""
    num_proc: Positive | None = None
    """Processes that read and tokenize; null: all cores."""
    num_workers: NonNegative | None = None
    """Loader processes a device; null: 0 on a CPU, 2 on an accelerator."""
    cache_dir: UserPath | None = None
    """Token stores; null: $MLM_CACHE, data/cache of a checkout, ~/.cache/mlm."""

    def __post_init__(self) -> None:
        hint = "names no source; give a path, python-docs or hub:OWNER/NAME"
        require(bool(self.sources), "data.sources", "[]", hint)
        fits = (self.min_length or 1) <= (self.max_length or self.min_length or 1)
        require(fits, "data.max_length", self.max_length, f"is below data.min_length={self.min_length}")
        without = [source.path for source in self.sources if source.weight is None]
        all_or_none = len(without) in (0, len(self.sources))
        require(all_or_none, "data.sources", without, "have no weight; give it to all, or none")
        if self.validation:
            hint = "conflicts with data.validation, which is validated on instead; leave out one of them"
            require_defaults(self, ("validation_fraction",), hint, "data.")
        weighted = [source.path for source in self.validation if source.weight is not None]
        require(not weighted, "data.validation", weighted, "have a weight; only data.sources are weighted")

    @property
    def validated_sources(self) -> list[str]:
        """The names of the sources whose losses a validation reports; empty for a single source."""
        sources = self.validation or self.sources
        return source_names(sources) if len(sources) > 1 else []

    @property
    def validation_text(self) -> CorpusConfig | None:
        """The texts of `validation` as a corpus, read like the training text; None if some is held out."""
        if not self.validation:
            return None
        return replace(self, sources=self.validation, validation=[], max_documents=None)


@schema("tokenizer.")
class TokenizerConfig:
    """The vocabulary: trained on the corpus, or taken from a file."""

    path: UserPath | None = None
    """A tokenizer.json or model folder to reuse; null: train one."""
    type: Literal["wordpiece", "bpe", "wordlevel"] = "wordpiece"
    """Kind of vocabulary to train: WordPiece, byte-level BPE, or whole words between spaces, as for codes."""
    vocab_size: Annotated[int, rule(f"must be at most {MAX_VOCABULARY}", MAX_VOCABULARY.__ge__)] = 8192
    """Entries of the trained vocabulary, special tokens included."""
    lowercase: bool = True
    """Fold case first (trained vocabularies only)."""
    strip_accents: bool | Literal["all"] = False
    """Drop accents: true: of Latin, Greek and Cyrillic letters; all: Hebrew points and Arabic marks too."""
    max_bytes: Positive = 128 * 2**20
    """Learn from at most this much text, sources in proportion: more costs time and changes little."""
    add_tokens: UserPath | None = None
    """Text file of words, one a line, that become tokens of their own; null: none."""

    def __post_init__(self) -> None:
        smallest = 261 if self.type == "bpe" else 16  # bytes and special tokens
        rule = f"must be at least {smallest} for type {self.type}"
        require(self.vocab_size >= smallest, "tokenizer.vocab_size", self.vocab_size, rule)


@schema("masking.")
class MaskingConfig:
    """Which tokens are predicted and what the model sees in their place."""

    strategy: Literal["token", "whole_word", "span"] = "token"
    """Hide single tokens, whole words, or runs of tokens."""
    mask_rate: UpToOne = 0.15
    """Share of the ordinary tokens predicted in training, in (0, 1]."""
    final_mask_rate: UpToOne | None = None
    """The same at the end of training, reached in a straight line; null: mask_rate throughout."""
    validation_mask_rate: UpToOne = 0.15
    """The same for validation, whose masks are frozen."""
    mask_token_fraction: Unit = 0.8
    """Share of the predicted tokens shown as [MASK]."""
    random_token_fraction: Unit = 0.1
    """Share of them shown as a random ordinary token; the rest is unchanged."""

    def __post_init__(self) -> None:
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
