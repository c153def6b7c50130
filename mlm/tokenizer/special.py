"""The five special tokens: their names, their ids in a vocabulary, and where they go around a text."""

from __future__ import annotations

from dataclasses import astuple, dataclass

from tokenizers import Tokenizer, processors

from mlm.config.errors import InputError

PAD, UNK, CLS, SEP, MASK = SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
"""Names of the special tokens of a trained vocabulary, in the order of their ids."""
OTHER_NAMES = ("<pad>", "<unk>", "<s>", "</s>", "<mask>")
"""Names of the same tokens in vocabularies of the RoBERTa family."""


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
        vocab = tokenizer.get_vocab(with_added_tokens=True)
        # A vocabulary with both spellings got one of them later, from added words: the lower ids win.
        if whole := [names for names in (SPECIAL_TOKENS, OTHER_NAMES) if vocab.keys() >= {*names}]:
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


def bert_template(tokenizer: Tokenizer) -> processors.TemplateProcessing:
    """Return the post-processor that makes `[CLS] text [SEP]` and `[CLS] first [SEP] second [SEP]`."""
    return processors.TemplateProcessing(
        single=f"{CLS} $A {SEP}",
        pair=f"{CLS} $A {SEP} $B:1 {SEP}:1",
        special_tokens=[(name, tokenizer.token_to_id(name)) for name in (CLS, SEP)],
    )


def num_ids(tokenizer: Tokenizer) -> int:
    """Return the rows that an embedding table needs: one more than the highest id, as ids may have gaps."""
    return int(max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)) + 1
