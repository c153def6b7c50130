"""Fine-tune an encoder on labelled texts: `python finetune.py`, or `python finetune.py --help`.

Reading order: mlm/training/finetuning.py, mlm/model/heads.py, mlm/data/labelled.py, mlm/data/examples.py; for
GLUE mlm/training/suite.py and mlm/data/glue.py.
"""

import sys

from mlm.__main__ import run

if __name__ == "__main__":
    sys.exit(run("finetune", prog="finetune.py"))
