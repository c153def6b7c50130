"""The model card: README.md of a model folder, in the form that the Hugging Face hub shows."""

from __future__ import annotations

from collections.abc import Mapping

from mlm.config.model import ModelConfig
from mlm.hub.families import OWN
from mlm.plan import count_parameters, total_parameters

_FRONT_MATTER = """---
library_name: transformers
pipeline_tag: fill-mask
tags: [masked-lm, encoder]
---"""

_STOCK_EXAMPLE = """from transformers import AutoTokenizer, {architecture}

model = {architecture}.from_pretrained("{name}")
tokenizer = AutoTokenizer.from_pretrained("{name}")"""

_OWN_EXAMPLE = """from mlm.hub import load_pretrained  # transformers has no class for this architecture

model = load_pretrained("{name}")"""


def model_card(name: str, model_config: ModelConfig, facts: Mapping[str, object], architecture: str) -> str:
    """Return the card as Markdown.

    Args:
        name: title, and the folder or repository in the example.
        model_config: the model; becomes the table of its architecture.
        facts: what to say about training, in this order; floats are shown with four digits.
        architecture: the class that reads the folder, see `mlm.hub.architecture_of`.
    """
    example = _OWN_EXAMPLE if architecture == OWN.architecture else _STOCK_EXAMPLE
    parameters = {part: f"{count:,}" for part, count in count_parameters(model_config).items()}
    parameters["total"] = f"{total_parameters(model_config):,}"
    sections = {
        "Use": f"```python\n{example.format(name=name, architecture=architecture)}\n```",
        "Training": _table(("fact", "value"), facts),
        "Architecture": _table(("field", "value"), vars(model_config)),
        "Parameters": _table(("part", "parameters"), parameters),
    }
    intro = f"A BERT-style encoder ({architecture}), pretrained with masked language modelling."
    body = "\n\n".join(f"## {title}\n\n{text}" for title, text in sections.items())
    return f"{_FRONT_MATTER}\n\n# {name}\n\n{intro}\n\n{body}\n"


def _table(header: tuple[str, str], rows: Mapping[str, object]) -> str:
    shown = {name: f"{value:.4g}" if isinstance(value, float) else str(value) for name, value in rows.items()}
    lines = [header, ("---", "---"), *shown.items()]
    return "\n".join(f"| {name} | {text} |" for name, text in lines)
