"""tokenizer_config.json: the settings of a tokenizer that transformers reads beside tokenizer.json."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from tokenizers import Tokenizer

from mlm.config.errors import InputError
from mlm.config.model import ModelConfig
from mlm.hub.download import model_folder
from mlm.hub.family import Json
from mlm.tokenizer import OTHER_NAMES, SpecialTokens

TOKENIZER_CONFIG = "tokenizer_config.json"
CARRIED_SETTINGS = (
    "padding_side",
    "truncation_side",
    "do_lower_case",
    "strip_accents",
    "tokenize_chinese_chars",
    "add_prefix_space",
    "clean_up_tokenization_spaces",
    "extra_special_tokens",
    "additional_special_tokens",
)
"""Settings copied from the model that training started from; the others follow from the tokenizer."""


def describe_tokenizer(
    tokenizer: Tokenizer, config: ModelConfig, model_max_length: int, start: str | Path | None = None
) -> Json:
    """Return the content of tokenizer_config.json.

    Args:
        tokenizer: the tokenizer beside it.
        config: the model.
        model_max_length: longest row in tokens.
        start: the model folder that training started from, whose CARRIED_SETTINGS are copied.
    """
    special = SpecialTokens.from_tokenizer(tokenizer)
    tokens = {f"{name}_token": tokenizer.id_to_token(token) for name, token in asdict(special).items()}
    if tokens["cls_token"] in OTHER_NAMES:  # RoBERTa has a second name for both
        tokens |= {"bos_token": tokens["cls_token"], "eos_token": tokens["sep_token"]}
    written = _read(start) if start else {}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_input_names": [
            "input_ids",
            *["token_type_ids"] * (config.type_vocab_size > 1),
            "attention_mask",
        ],
        "clean_up_tokenization_spaces": False,
        **tokens,
        **{name: written[name] for name in CARRIED_SETTINGS if name in written},
        "model_max_length": model_max_length,
    }


def longest_row(folder: str | Path, config: ModelConfig) -> int | None:
    """Return the model_max_length of a folder, at most the model's longest row; None: no bound.

    Raises:
        InputError: its tokenizer_config.json is damaged.
    """
    bounds = (_read(folder).get("model_max_length"), config.max_position_embeddings)
    known = [int(bound) for bound in bounds if isinstance(bound, int | float) and 0 < bound < 1e9]
    return min(known, default=None)  # transformers writes 1e30 for no bound


def _read(folder: str | Path) -> Json:
    path = model_folder(folder) / TOKENIZER_CONFIG
    try:
        written = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise InputError(f"{path} is damaged: {error}") from None
    return written if isinstance(written, dict) else {}
