"""The five tokens that are no text."""

from __future__ import annotations

from dataclasses import astuple, dataclass

from tokenizers import Tokenizer

from mlm.config.errors import InputError

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
"""Names of the special tokens of a trained vocabulary, in the order of their ids."""
OTHER_NAMES = ("<pad>", "<unk>", "<s>", "</s>", "<mask>")
"""What the same tokens are called in vocabularies of the RoBERTa family."""


@dataclass(frozen=True)
class SpecialTokens:
    """Ids of the special tokens."""

    pad: int
    unk: int
    cls: int
    sep: int
    mask: int

    @property
    def ids(self) -> tuple[int, int, int, int, int]:
        """All of them: never masked, never drawn as a replacement."""
        return astuple(self)

    @classmethod
    def from_tokenizer(cls, tokenizer: Tokenizer) -> SpecialTokens:
        """Look the ids up by name.

        Raises:
            InputError: one is missing.
        """
        # Where a vocabulary has both spellings, one of them came later: it belongs to somebody's words.
        vocab = tokenizer.get_vocab(with_added_tokens=True)
        whole = [names for names in (SPECIAL_TOKENS, OTHER_NAMES) if all(name in vocab for name in names)]
        if whole:
            return cls(*min([vocab[name] for name in names] for names in whole))
        ids = []
        for names in zip(SPECIAL_TOKENS, OTHER_NAMES, strict=True):
            found = [vocab[name] for name in names if name in vocab]
            if not found:
                raise InputError(
                    f"the tokenizer has no {names[0]} (or {names[1]}); masked language modelling needs one"
                )
            ids.append(min(found))
        return cls(*ids)


def num_ids(tokenizer: Tokenizer) -> int:
    """Return the rows that a table needs for all ids of a tokenizer, which may have left some out."""
    return int(max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)) + 1
