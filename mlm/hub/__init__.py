"""Models on disk, in folders that Hugging Face's stock classes read whenever they have the architecture."""

from mlm.hub.card import model_card
from mlm.hub.families import architecture_of
from mlm.hub.pretrained import load_classifier, load_encoder, load_masked_lm, load_pretrained, save_pretrained

__all__ = [
    "architecture_of",
    "load_classifier",
    "load_encoder",
    "load_masked_lm",
    "load_pretrained",
    "model_card",
    "save_pretrained",
]
