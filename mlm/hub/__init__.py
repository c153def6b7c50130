"""Models on disk, in folders that Hugging Face's stock classes read whenever they have the architecture."""

from mlm.hub.card import model_card
from mlm.hub.download import resolve_model
from mlm.hub.families import architecture_of
from mlm.hub.parity import CheckRows
from mlm.hub.pretrained import load_classifier, load_encoder, load_masked_lm, load_pretrained, save_pretrained
from mlm.hub.tokenizer_config import longest_row

__all__ = [
    "CheckRows",
    "architecture_of",
    "load_classifier",
    "load_encoder",
    "load_masked_lm",
    "load_pretrained",
    "longest_row",
    "model_card",
    "resolve_model",
    "save_pretrained",
]
