"""`mlm inspect`: the batch that training would take at a step, as text."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby
from unicodedata import east_asian_width

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from mlm.config.commands import InspectConfig
from mlm.config.errors import InputError
from mlm.data.collate import MaskedBatch, MaskedRows, Rows, build_masking
from mlm.data.corpus import Corpus, prepare_corpus
from mlm.data.sampler import RowBatch, TrainingSampler
from mlm.hub.download import model_folder
from mlm.masking import mask_rate_at
from mlm.plan import planned_steps
from mlm.tokenizer import SpecialTokens, num_ids, starts_word

Ints = npt.NDArray[np.int64]

COLOURS = {"hidden": "\x1b[1;31m", "random": "\x1b[1;35m", "unchanged": "\x1b[1;32m"}
PLAIN = "\x1b[0m"
COLOUR = re.compile(r"\x1b\[[\d;]*m")
LEGEND = """{a>[MASK]} hidden, {a>b} replaced by another token, {a} predicted and left as it is
2 the second document of a row, 2+ the rest of one that began in another row"""


def inspect(config: InspectConfig) -> None:
    """Print a batch of training; InputError: a source cannot be read or holds no text."""
    tokenizer = config.tokenizer
    if config.init is not None:
        tokenizer = replace(tokenizer, path=str(model_folder(config.init)))
    corpus = prepare_corpus(config.data, tokenizer)
    drawn, batch = training_batch(config, corpus)
    print("\n".join(["", *_statistics(config, corpus, drawn, batch), "", LEGEND]))
    colours = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    view = RowView(corpus.train, corpus.tokenizer, colours)
    width = shutil.get_terminal_size((110, 50)).columns
    for number in range(min(config.rows, len(drawn.rows))):
        print("\n".join(["", *view.lines(number, drawn, batch, width)]))


def training_batch(config: InspectConfig, corpus: Corpus) -> tuple[RowBatch, MaskedBatch]:
    """Return the rows of the optimizer step `config.step` of a run, and its batch over all devices."""
    size, train, masking = config.trainer.global_batch_size, corpus.train, config.masking
    total = None
    if config.trainer.max_time is None:
        total = planned_steps(config.trainer, train.tokens_per_row * size)
    consumed = config.step * size
    sampler = TrainingSampler(len(train), config.seed, size, size, rows_consumed=consumed, parts=train.parts)
    drawn = next(iter(sampler))._replace(mask_rate=mask_rate_at(masking, config.step, 0, total))
    rows = MaskedRows(train, build_masking(masking, masking.highest_mask_rate, corpus.tokenizer), config.seed)
    return drawn, rows[drawn]


def _statistics(config: InspectConfig, corpus: Corpus, drawn: RowBatch, batch: MaskedBatch) -> Iterator[str]:
    rows, seq_len = batch["input_ids"].shape
    passes = np.unique(drawn.passes).tolist()
    gone = f"pass {passes[0]}" if len(passes) == 1 else f"passes {passes[0]} to {passes[-1]}"
    pieces = sum(len(_pieces(corpus.train, int(row))) for row in drawn.rows)
    yield f"step {config.step:<8,}{rows:,} rows of {seq_len}, {gone} over {len(corpus.train):,} rows"
    tokens, places = batch["num_tokens"], rows * seq_len
    filled = f"{tokens:,} of {places:,} places ({tokens / places:.1%})"
    yield f"tokens       {filled}, {pieces:,} documents or parts of one"
    masked, ordinary = batch["num_masked"], batch["num_ordinary"]
    rate = f"{masked / max(ordinary, 1):.1%}; masking asks for {drawn.mask_rate:.1%}"
    yield f"predicted    {masked:,} of {ordinary:,} ordinary tokens ({rate})"
    if config.masking.final_mask_rate is not None and config.trainer.max_time is not None:
        yield f"{'':13}(the length of a run with a time limit is not known: this is the rate of its start)"
    hidden, random = batch["num_hidden"], batch["num_random"]
    kinds = {"[MASK]": hidden, "another token": random, "unchanged": masked - hidden - random}
    shares = (f"{name} {count:,} ({count / max(masked, 1):.1%})" for name, count in kinds.items())
    yield f"shown as     {', '.join(shares)}"


def _pieces(rows: Rows, row: int) -> Ints:
    """Return where in the store the pieces of a row begin."""
    first, last = rows.table.offsets[row : row + 2]
    return np.asarray(rows.table.pieces.starts[first:last])


class RowView:
    """Writes rows of a batch as text, the predicted tokens in `colours` too."""

    def __init__(self, rows: Rows, tokenizer: Tokenizer, colours: bool = False):
        self.rows, self.tokenizer, self.colours = rows, tokenizer, colours
        self.special = SpecialTokens.from_tokenizer(tokenizer)
        try:
            self._starts_word = starts_word(tokenizer)
        except InputError:  # of another kind: a space between any two tokens
            self._starts_word = np.ones(num_ids(tokenizer), bool)

    def lines(self, number: int, drawn: RowBatch, batch: MaskedBatch, width: int) -> Iterator[str]:
        """Yield a heading and a paragraph for each document of the row `number` of a batch."""
        row = int(drawn.rows[number])
        original, documents = (array[0] for array in self.rows.render(np.array([row])))
        labels = batch["labels"][number].numpy()
        places = set(batch["masked_positions"][number].numpy()[labels >= 0].tolist())
        shown = batch["input_ids"][number].numpy()
        real = int((documents > 0).sum())
        filled = f"{real} of {len(original)} places, {len(places)} predicted"
        yield f"row {number}: number {row:,} in pass {drawn.passes[number]}, {filled}"
        begins = self.rows.store.documents.starts
        start = 0
        for piece, begin in enumerate(_pieces(self.rows, row), 1):
            end = start + int(np.flatnonzero(original[start:real] == self.special.sep)[0]) + 1
            begun = begins[np.searchsorted(begins, begin, side="right") - 1] == begin
            words = self._words(original[start:end], shown[start:end], {place - start for place in places})
            yield from _filled(f"  {piece}  " if begun else f"  {piece}+ ", words, width)
            start = end

    def _words(self, original: Ints, shown: Ints, places: set[int]) -> list[str]:
        """Return the words of a document, the predicted tokens marked and the pieces of a word joined."""
        words: list[str] = []
        joins = False
        alone = [at in places or token in self.special.ids for at, token in enumerate(original.tolist())]
        for _, group in groupby(range(len(original)), lambda at: at if alone[at] else -1):
            at = list(group)
            first = int(original[at[0]])
            if first in self.special.ids:
                words.append(str(self.tokenizer.id_to_token(first)))
                joins = False
                continue
            marked = at[0] in places
            new = [self._mark(first, int(shown[at[0]]))] if marked else self._text(original[at]).split()
            if new and joins and not self._starts_word[first]:
                new[0] = words.pop() + new[0]
            words += new
            joins = bool(new)
        return words

    def _mark(self, label: int, seen: int) -> str:
        """Return a predicted token and the one in its place."""
        text = f"{{{self._name(label)}}}"
        kind = "unchanged"
        if seen != label:
            kind = "hidden" if seen == self.special.mask else "random"
            other = self.tokenizer.id_to_token(seen) if kind == "hidden" else self._name(seen)
            text = f"{text[:-1]}>{other}}}"
        return f"{COLOURS[kind]}{text}{PLAIN}" if self.colours else text

    def _text(self, ids: Ints) -> str:
        """Return the text of ordinary tokens that follow each other."""
        text = " ".join(self.tokenizer.decode(ids.tolist(), skip_special_tokens=False).split())
        return text if self._starts_word[ids[0]] else text.removeprefix("##")

    def _name(self, token: int) -> str:
        """Return the text of one token; if that is part of a character or a space, the token as it is."""
        text = self._text(np.array([token]))
        return text if text and "\ufffd" not in text else str(self.tokenizer.id_to_token(token))


def _filled(indent: str, words: list[str], width: int) -> Iterator[str]:
    """Yield words in lines of at most `width` columns behind an indent."""
    line, used = indent.rstrip(), len(indent) - 1
    for word in words:
        size = 1 + sum(2 if east_asian_width(character) in "WF" else 1 for character in COLOUR.sub("", word))
        if used + size > width and used >= len(indent):
            yield line
            line, used = " " * (len(indent) - 1), len(indent) - 1
        line, used = f"{line.ljust(len(indent) - 1)} {word}", used + size
    yield line
