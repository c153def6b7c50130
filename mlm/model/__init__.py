"""The encoder and its heads. Read top-down: `heads.py`, `encoder.py`, `attention.py`."""

from mlm.model.encoder import Encoder, init_weights
from mlm.model.heads import UNUSED_ID_BIAS, MaskedLM, SequenceClassifier, pool, rule_out_unused_ids

__all__ = [
    "UNUSED_ID_BIAS",
    "Encoder",
    "MaskedLM",
    "SequenceClassifier",
    "init_weights",
    "pool",
    "rule_out_unused_ids",
]
