"""The encoder and its heads. Read top-down: `heads.py`, `encoder.py`, `attention.py`."""

from mlm.model.encoder import Encoder, init_weights
from mlm.model.heads import MaskedLM, SequenceClassifier

__all__ = ["Encoder", "MaskedLM", "SequenceClassifier", "init_weights"]
