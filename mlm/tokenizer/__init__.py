"""The vocabulary: train one, load one, and cut text into its pieces.

- WordPiece as in Devlin et al. 2019 (arXiv:1810.04805) or byte-level BPE as in Radford et al. 2019; special
  tokens [PAD] [UNK] [CLS] [SEP] [MASK] have the ids 0 to 4
- the same documents give the same tokenizer.json, byte for byte, in every process
- text that spells a special token never becomes one: see `encode_documents`
- words of any length and documents of any length are safe in memory
"""

from mlm.tokenizer.encoding import (
    encode_documents,
    encode_plain,
    plain_tokenizer,
    text_groups,
    text_pieces,
)
from mlm.tokenizer.loading import added_pieces, load_tokenizer, tokenizer_digest
from mlm.tokenizer.special import SPECIAL_TOKENS, SpecialTokens, num_ids
from mlm.tokenizer.training import TOKENIZER_VERSION, train_tokenizer
from mlm.tokenizer.words import starts_word

__all__ = [
    "SPECIAL_TOKENS",
    "TOKENIZER_VERSION",
    "SpecialTokens",
    "added_pieces",
    "encode_documents",
    "encode_plain",
    "load_tokenizer",
    "num_ids",
    "plain_tokenizer",
    "starts_word",
    "text_groups",
    "text_pieces",
    "tokenizer_digest",
    "train_tokenizer",
]
