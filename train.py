"""Pretrain a masked language model on plain text: `python train.py`, or `python train.py --help`.

Reading order: mlm/training/pretraining.py, mlm/model/encoder.py, mlm/masking.py, mlm/data/store.py.
"""

import sys

from mlm.__main__ import run

if __name__ == "__main__":
    sys.exit(run("pretrain", prog="train.py"))
