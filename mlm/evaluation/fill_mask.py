"""The most likely words for each hidden place of a sentence."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from tokenizers import Tokenizer

from mlm.config.errors import InputError
from mlm.config.experiment import FillMaskConfig
from mlm.hub.download import model_folder
from mlm.hub.pretrained import load_masked_lm
from mlm.model.heads import MaskedLM
from mlm.tokenizer import SpecialTokens, load_tokenizer, num_ids


@dataclass(frozen=True)
class Candidate:
    """One proposal for a hidden place."""

    token: str
    """The token as the vocabulary spells it."""
    probability: float


@torch.no_grad()
def fill_masks(model: MaskedLM, tokenizer: Tokenizer, text: str, top_k: int = 5) -> list[list[Candidate]]:
    """Return the `top_k` most likely tokens for each mask token in `text`, in order.

    Raises:
        InputError: the text holds no mask token, or is too long for the model.
    """
    special = SpecialTokens.from_tokenizer(tokenizer)
    mask = tokenizer.id_to_token(special.mask)
    tokenizer.encode_special_tokens = False  # here a literal mask token is meant as one
    ids = torch.tensor([tokenizer.encode(text).ids])
    places = (ids[0] == special.mask).nonzero()[:, 0]
    if not len(places):
        raise InputError(f"nothing to fill in {text!r}: write {mask} where a word is hidden")
    longest = model.config.max_position_embeddings
    if longest is not None and ids.shape[1] > longest:
        raise InputError(f"{text[:40]!r}... has {ids.shape[1]} tokens; the model reads at most {longest}")
    known = torch.tensor(sorted(tokenizer.get_vocab(with_added_tokens=True).values()))
    shares = model.eval()(ids, masked_positions=places[None])[0].softmax(-1)[:, known]
    best = shares.topk(min(top_k, len(known)))
    return [
        [
            Candidate(str(tokenizer.id_to_token(number)), share)
            for number, share in zip(numbers, found, strict=True)
        ]
        for numbers, found in zip(known[best.indices].tolist(), best.values.tolist(), strict=True)
    ]


def fill_mask(config: FillMaskConfig) -> int:
    """Print candidates for each mask of each text: the `fill-mask` command."""
    folder = model_folder(config.model)
    model, tokenizer = load_masked_lm(folder, needs_head=True), load_tokenizer(folder)
    model.config.check_fit(num_ids(tokenizer), seq_len=1)
    tokenizer.no_padding()
    tokenizer.no_truncation()
    for text in config.text:
        print(text)
        for number, candidates in enumerate(fill_masks(model, tokenizer, text, config.top_k), start=1):
            for candidate in candidates:
                print(f"  mask {number}  {candidate.probability:7.2%}  {candidate.token}")
    return 0
