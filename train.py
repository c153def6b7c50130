"""Pretrain a masked language model on plain text: `python train.py`, or `python train.py --help`.

Reading order: mlm/training/pretraining.py, mlm/model/encoder.py, mlm/masking.py, mlm/data/store.py.
"""

from __future__ import annotations

import sys

from mlm.config.experiment import PretrainConfig
from mlm.startup.command import log_to_stderr, one_line_errors, parse_config


def main() -> int:
    """Run what the command line asks for and return the exit status."""
    config = parse_config(PretrainConfig, prog="train.py")
    log_to_stderr()
    with one_line_errors("train.py", config):
        from mlm.training.tracking import import_tracker  # only now: mistakes come before heavy imports

        import_tracker(config.logging)
        from mlm.training.pretraining import pretrain

        status = pretrain(config)
    return status or 0


if __name__ == "__main__":
    sys.exit(main())
