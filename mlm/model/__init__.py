"""The encoder and its heads: what is computed, nothing about how it is trained or stored.

Read top-down: `heads.py` (MaskedLM), `encoder.py`, `layers.py`, `attention.py`, `positions.py`.
"""

from mlm.model.attention import fused_blocks
from mlm.model.encoder import Encoder
from mlm.model.heads import MaskedLM, rule_out_unused_ids

__all__ = ["Encoder", "MaskedLM", "fused_blocks", "rule_out_unused_ids"]
