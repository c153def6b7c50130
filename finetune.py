"""Fine-tune an encoder on labelled texts: `python finetune.py`, or `python finetune.py --help`.

Reading order: mlm/training/finetuning.py, mlm/model/heads.py, mlm/data/labelled.py, mlm/data/examples.py; for
GLUE mlm/training/suite.py and mlm/data/glue.py.
"""

from __future__ import annotations

import sys

from mlm.config.finetune import FinetuneConfig
from mlm.startup.command import log_to_stderr, one_line_errors, parse_config


def main() -> int:
    """Run what the command line asks for and return the exit status."""
    config = parse_config(FinetuneConfig, prog="finetune.py")
    log_to_stderr()
    with one_line_errors("finetune.py", config):
        from mlm.training.tracking import import_tracker  # only now: mistakes come before heavy imports

        import_tracker(config.logging)
        from mlm.training.suite import finetune_all

        status = finetune_all(config)
    return status or 0


if __name__ == "__main__":
    sys.exit(main())
