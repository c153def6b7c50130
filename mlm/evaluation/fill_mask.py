"""The most likely tokens for each mask token of a sentence: the `fill-mask` command."""

from __future__ import annotations

from mlm.config.experiment import FillMaskConfig
from mlm.evaluation.predictor import Predictor


def fill_mask(config: FillMaskConfig) -> int:
    """Print candidates for each mask token of each text.

    Raises:
        InputError: there is no masked language model, or nothing to fill in a text.
    """
    predictor = Predictor(config.model)
    for text in config.text:
        filled = predictor.fill_mask(text, config.top_k)
        print(text)
        for number, candidates in enumerate(filled, start=1):
            for candidate in candidates:
                print(f"  mask {number}  {candidate.probability:7.2%}  {candidate.token}")
    return 0
