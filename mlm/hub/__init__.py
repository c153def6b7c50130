"""Models on disk, in folders that Hugging Face's stock classes read whenever they have the architecture."""

from mlm.hub.download import pinned_name, resolve_model
from mlm.hub.pretrained import load_classifier, load_encoder, load_masked_lm, load_pretrained, longest_row
from mlm.hub.saving import model_card, save_pretrained

__all__ = [
    "load_classifier",
    "load_encoder",
    "load_masked_lm",
    "load_pretrained",
    "longest_row",
    "model_card",
    "pinned_name",
    "resolve_model",
    "save_pretrained",
]
