"""Documents to token ids, on all cores, each word tokenized once.

- natural text repeats its words: `DocumentEncoder` keeps the tokens of the words it has seen, within bounds,
  and is three times as fast for it
- exact: a text is cut into words only where its tokenizer cuts too, whatever the characters around the cut
  (`_word_splitter`); with any other tokenizer the library encodes whole documents
- `encode_in_order` spreads batches over processes and returns them in order: their number changes no token
"""

import hashlib
import json
import multiprocessing
import os
import re
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from itertools import chain, islice, repeat
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from mlm.config.errors import InputError
from mlm.data.vocabulary import is_by_character
from mlm.tokenizer import (
    OTHER_NAMES,
    SPECIAL_TOKENS,
    encode_plain,
    num_ids,
    plain_tokenizer,
    text_groups,
    text_pieces,
)

Ints = npt.NDArray[np.int64]
Ids = npt.NDArray[np.unsignedinteger[Any]]

WORD_MEMORY = 2**27  # about the most bytes that the remembered words of a process take
WORD_OVERHEAD = 200  # bytes of a remembered word beside its characters
BATCHES_ALONE = 4  # encoded before processes are started, which get the words seen in them
SPLIT_AT_SPACES = ("WordPiece", "BertPreTokenizer"), ("WordLevel", "WhitespaceSplit")  # kinds cut there
BATCHES_AHEAD = 2  # batches a process that are read before they are needed


class Encoded(NamedTuple):
    """A batch of N documents with T tokens."""

    ids: Ids  # (T,) the tokens of all documents
    lengths: Ints  # (N,) tokens of each document
    text_hashes: npt.NDArray[np.uint64]  # (N,)
    num_bytes: npt.NDArray[np.uint64]  # (N,) UTF-8 bytes of each text
    unknown_bytes: npt.NDArray[np.uint64]  # (N,) of them in words that become the unknown token


class _Words(NamedTuple):
    """The tokens of many words, one word after the other."""

    ids: Ids
    starts: Ints
    lengths: Ints
    unknown: Ints  # UTF-8 bytes of each word that become the unknown token

    def extended(self, encoded: list[list[int]], unknown: list[int]) -> "_Words":
        """Return these words followed by further ones."""
        ids = np.fromiter(chain.from_iterable(encoded), self.ids.dtype)
        lengths = np.fromiter(map(len, encoded), np.int64, len(encoded))
        starts = len(self.ids) + np.cumsum(lengths) - lengths
        more = _Words(ids, starts, lengths, np.array(unknown, np.int64))
        return _Words(*(np.concatenate(pair) for pair in zip(self, more, strict=True)))

    def spell(self, numbers: Ints) -> tuple[Ids, Ints]:
        """Return the tokens of a sequence of words, and how many tokens each of them has."""
        lengths = self.lengths[numbers]
        shift = self.starts[numbers] - (np.cumsum(lengths) - lengths)
        places = np.repeat(shift, lengths)
        places += np.arange(len(places))
        return self.ids[places], lengths


class DocumentEncoder:
    """Returns the same tokens as `mlm.tokenizer.encode_documents`, faster.

    Any tokenizer will do; it is copied. `known` is that of another encoder with the same tokenizer.
    """

    def __init__(self, tokenizer: Tokenizer, known: tuple[dict[str, int], _Words] | None = None):
        self._plain = plain_tokenizer(tokenizer)
        self._split = _word_splitter(self._plain)
        none = np.zeros(0, np.int64)
        id_type = np.uint16 if num_ids(tokenizer) <= 2**16 else np.uint32
        self._no_words = _Words(none.astype(id_type), none, none, none)
        named = map(tokenizer.token_to_id, (SPECIAL_TOKENS[1], OTHER_NAMES[1]))
        self._unk = next((number for number in named if number is not None), -1)
        self._numbers, self._words = known or ({}, self._no_words)
        self._memory_left = WORD_MEMORY - _memory(self._numbers)

    @property
    def known(self) -> tuple[dict[str, int], _Words]:
        """The words remembered so far: a copy of their numbers, and their tokens."""
        return dict(self._numbers), self._words

    def __call__(self, texts: list[str]) -> Encoded:
        """Encode at least one document; "[MASK]" in a text is three or more ordinary tokens."""
        raw = [text.encode() for text in texts]
        digests = b"".join(hashlib.blake2b(text, digest_size=8).digest() for text in raw)
        if self._split is None:
            encoded = encode_plain(self._plain, texts)
            lost = map(self._unknown_bytes, texts, encoded)
            ids, _, lengths, unknown = self._no_words.extended(encoded, list(lost))
        else:
            pieces = [list(text_pieces(text)) for text in texts]  # the words looked up at a time are bounded
            groups = text_groups(chain.from_iterable(pieces))
            found = [self._look_up([self._split(piece) for piece in group]) for group in groups]
            ids, of_pieces, lost_of = (np.concatenate(arrays) for arrays in zip(*found, strict=True))
            counts = np.fromiter(map(len, pieces), np.int64, len(pieces))
            firsts = np.cumsum(counts) - counts
            lengths, unknown = (np.add.reduceat(array, firsts) for array in (of_pieces, lost_of))
        sizes = np.fromiter(map(len, raw), np.uint64, len(raw))
        hashes = np.frombuffer(digests, "<u8").astype(np.uint64)
        return Encoded(ids, lengths, hashes, sizes, unknown.astype(np.uint64))

    def _unknown_bytes(self, text: str, ids: list[int]) -> int:
        """Return the bytes of a text that become unknown tokens."""
        if self._unk not in ids:
            return 0
        encoding = self._plain.encode(text, add_special_tokens=False)
        spans = zip(encoding.ids, encoding.offsets, strict=True)
        return sum(len(text[begin:end].encode()) for id_, (begin, end) in spans if id_ == self._unk)

    def _look_up(self, words_of: list[list[str]]) -> tuple[Ids, Ints, Ints]:
        """Return the tokens of all lists of words; how many each has, and its bytes that are unknown."""
        words = list(chain.from_iterable(words_of))
        numbers = np.fromiter(map(self._numbers.get, words, repeat(-1)), np.int64, len(words))
        known = self._words
        unseen = np.flatnonzero(numbers < 0)
        if len(unseen):
            found = [words[place] for place in unseen.tolist()]
            new = {word: len(known.lengths) + place for place, word in enumerate(dict.fromkeys(found))}
            spelled = self._plain.encode_batch_fast(list(new), add_special_tokens=False)
            ids_of = [word.ids for word in spelled]
            known = known.extended(ids_of, list(map(self._unknown_bytes, new, ids_of)))
            numbers[unseen] = [new[word] for word in found]
            memory = _memory(new)
            if memory <= self._memory_left:  # the words seen first are the frequent ones
                self._memory_left -= memory
                self._numbers |= new
                self._words = known
        ids, lengths = known.spell(numbers)
        ends = np.cumsum([0, *map(len, words_of)])
        sums = (np.concatenate([[0], np.cumsum(of)])[ends] for of in (lengths, known.unknown[numbers]))
        return ids, *map(np.diff, sums)


def _memory(words: dict[str, int]) -> int:
    return sum(map(len, words)) + WORD_OVERHEAD * len(words)


def _word_splitter(tokenizer: Tokenizer) -> Callable[[str], list[str]] | None:
    """Return a function that cuts texts such that the tokens of a text are those of its parts in order.

    None for a tokenizer with steps of another kind than those below, or with tokens of several words.
    """
    facts = json.loads(tokenizer.to_str())
    model, splitter = facts["model"], facts["pre_tokenizer"] or {}
    normalizer = facts["normalizer"] or {"type": "Sequence", "normalizers": []}
    if not is_by_character(normalizer) or not all(token["special"] for token in facts["added_tokens"]):
        return None
    if (model["type"], splitter.get("type")) in SPLIT_AT_SPACES:
        return _split_at_spaces
    by_bytes = (
        splitter.get("type") == "ByteLevel" and splitter["use_regex"] and not splitter["add_prefix_space"]
    )
    if model["type"] == "BPE" and not model["dropout"] and by_bytes:
        return _BYTE_LEVEL_WORD.findall
    return None


def _split_at_spaces(text: str) -> list[str]:
    """Cut at spaces and line breaks, which end a word for BERT; the normaliser looks at single characters."""
    return text.replace("\n", " ").split(" ")


# Byte-level BPE cuts at every step from a character to white space, and white space belongs to what follows.
# Each part but the last holds a letter, digit or ASCII sign: a part of accents only could vanish, and two
# runs of white space would become one. The separators \x1c to \x1f are white space to Python only.
_BYTE_LEVEL_WORD = re.compile(r"[^\w!-~]*+[\w!-~][\S\x1c-\x1f]*+|[^\w!-~]++")


def encode_in_order(
    batches: Iterable[tuple[int, list[str]]], tokenizer: Tokenizer, processes: int = 1
) -> Generator[tuple[int, Encoded]]:
    """Encode labelled batches of documents, drawn as needed, and yield them in the same order.

    With 1 core in `processes` no process is started, and the library's threads are turned off too.
    """
    batches = iter(batches)
    encode = DocumentEncoder(tokenizer)
    with _library_threads(processes > 1):
        for label, texts in islice(batches, BATCHES_ALONE if processes > 1 else None):
            yield label, encode(texts)
    following = next(batches, None)
    if following is None:
        return
    waiting: deque[tuple[int, Future[Encoded]]] = deque()
    spawn = multiprocessing.get_context("spawn")  # a fork would copy the library's threads half
    with ProcessPoolExecutor(processes, spawn, _start_process, (tokenizer, encode.known)) as pool:
        try:
            for label, texts in chain([following], batches):
                waiting.append((label, pool.submit(_encode_in_process, texts)))
                if len(waiting) > processes * BATCHES_AHEAD:
                    label, future = waiting.popleft()
                    yield label, future.result()
            for label, future in waiting:
                yield label, future.result()
        except BrokenProcessPool:
            raise InputError(
                "a process that tokenizes was killed (out of memory?) or could not start (a script that uses "
                "this package needs `if __name__ == '__main__':`); data.num_proc=1 works without"
            ) from None
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


@contextmanager
def _library_threads(wanted: bool) -> Iterator[None]:
    """Turn the library's own threads on or off, unless the user has set its variable."""
    is_set = "TOKENIZERS_PARALLELISM" in os.environ
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true" if wanted else "false")
    try:
        yield
    finally:
        if not is_set:
            os.environ.pop("TOKENIZERS_PARALLELISM", None)


_encoder: DocumentEncoder  # of a tokenizing process


def _start_process(tokenizer: Tokenizer, known: tuple[dict[str, int], _Words]) -> None:
    global _encoder
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes share the cores already
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process gets it too, and ends the others
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _encoder = DocumentEncoder(tokenizer, known)


def _encode_in_process(texts: list[str]) -> Encoded:
    return _encoder(texts)


def _end_with_parent() -> None:
    """Exit once the main process has ended: if it was killed, it could not end this one."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
