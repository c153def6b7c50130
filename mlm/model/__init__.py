"""The encoder and its heads: what is computed, nothing about how it is trained or stored.

Read top-down: `heads.py` (MaskedLM, SequenceClassifier), `encoder.py`, `layers.py`, `attention.py`,
`positions.py`.
"""

from mlm.model.attention import matrix_blocks
from mlm.model.encoder import Encoder
from mlm.model.heads import UNUSED_ID_BIAS, MaskedLM, SequenceClassifier, rule_out_unused_ids
from mlm.model.layers import init_weights
from mlm.model.pooling import pool

__all__ = [
    "UNUSED_ID_BIAS",
    "Encoder",
    "MaskedLM",
    "SequenceClassifier",
    "init_weights",
    "matrix_blocks",
    "pool",
    "rule_out_unused_ids",
]
