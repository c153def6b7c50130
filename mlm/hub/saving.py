"""Write a model folder: config.json, weights, tokenizer and card.

Before it gets its name, every reader of it, ours and transformers' if it is installed, must compute the
logits of the model in memory.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from tokenizers import Tokenizer
from torch import Tensor

from mlm.config.errors import InputError
from mlm.config.model import ClassifierConfig, ModelConfig
from mlm.config.training import CardConfig
from mlm.files import recover, replacing, shorten
from mlm.hub.families import OWN, architecture_of, family_of, missing_counterparts
from mlm.hub.family import Family, Json
from mlm.hub.pretrained import (
    CONFIG,
    MODULES,
    POOLING,
    SENTENCES,
    TOKENIZER_CONFIG,
    TOKENS,
    UNTRAINED_POOLER,
    WEIGHTS,
    load_pretrained,
    read_settings,
)
from mlm.model.heads import UNUSED_ID_BIAS, MaskedLM, SequenceClassifier
from mlm.plan import count_parameters
from mlm.tokenizer import OTHER_NAMES, SpecialTokens, num_ids

TOKENIZER, CARD = "tokenizer.json", "README.md"
FILES = {CONFIG, WEIGHTS, TOKENIZER, TOKENIZER_CONFIG, CARD, SENTENCES, MODULES, POOLING}
"""All files of a folder that we write."""
TOKEN_IDS = {f"{name}_token_id": name for name in ("pad", "cls", "sep", "mask")}
"""Fields of config.json for token ids, and the fields of `SpecialTokens` that they repeat."""
BOUNDARIES = {"bos": "cls", "eos": "sep"}
"""Second names of two tokens outside of BERT's families; ModernBERT's own ids are out of range."""
TRANSFORMERS_VERSION = "4.48.0"
"""Oldest version of transformers with all classes that we write for."""
CARRIED_SETTINGS = (
    *("padding_side", "truncation_side", "do_lower_case", "strip_accents", "tokenize_chinese_chars"),
    *("add_prefix_space", "clean_up_tokenization_spaces"),
    *("extra_special_tokens", "additional_special_tokens"),
)
"""Settings of the tokenizer copied from the model that training started from; the others follow from it."""
POSITIONS = "encoder.embeddings.position.weight"
MAX_DIFFERENCE = 1e-4
"""Largest accepted difference of a float32 logit between a model and a reader of its folder."""
NEXT = "checkpoints of the run are kept; try another version of transformers, and report this"
"""Remedy if a reader differs."""
CheckRows = Mapping[str, Tensor]
"""Arguments of a model's forward pass: `input_ids` (B, S), `attention_mask` (B, S) of 0 and 1, and perhaps
`token_type_ids` (B, S)."""
Trained = MaskedLM | SequenceClassifier

log = logging.getLogger(__name__)


def save_pretrained(
    folder: str | Path,
    model: Trained,
    tokenizer: Tokenizer,
    model_max_length: int,
    card: str,
    rows: CheckRows | None = None,
    start: str | Path | None = None,
    tokens: int | None = None,
    check: bool = True,
) -> Path:
    """Write a model folder, completely or not at all; an existing model folder is replaced.

    The masked-LM head rules out ids beyond the tokenizer, which only pad the tables, by its output bias. No
    other process may write the folder at the same time. The model, on any device and in any mode, does not
    change. `rows` are real text to compare logits for (None: random tokens); the result is appended to the
    `card`. Settings of the tokenizer are kept from `start`, the model folder that training started from.
    `tokens` are those of pretraining, see `pretraining_tokens`.
    Without `check` no reader is compared, for a folder that lasts as long as this process.

    Raises:
        InputError: the tokenizer is larger than the model's tables, the logits are not finite, `folder` holds
            other files, the disk is full (DiskError), or a reader computes other logits.
    """
    folder = Path(folder)
    longest = model.config.max_position_embeddings or model_max_length
    config = replace(model.config, max_position_embeddings=longest)
    classifier = model.classifier_config if isinstance(model, SequenceClassifier) else None
    family, special = family_of(config, classifier), SpecialTokens.from_tokenizer(tokenizer)
    num_tokens, size = num_ids(tokenizer), model.encoder.embeddings.token.num_embeddings
    if num_tokens > size:
        raise InputError(f"the tokenizer has {num_tokens} entries, more than the model's vocab_size={size}")
    if family.positions_follow_padding:
        config = replace(config, position_offset=special.pad + 1)
    if family is OWN:
        reason = missing_counterparts(config, classifier)
        log.warning("%s: only mlm reads this model, because %s", folder, reason)
    recover(folder)
    there = {*os.listdir(folder)} if folder.is_dir() else {folder.name} if folder.exists() else set()
    if strange := sorted(there - FILES):
        raise InputError(f"{folder} is taken by something else ({shorten(strange, 4)}); give a new one")
    described = family.write_config(config, classifier)
    described |= {path: getattr(special, token) for path, token in TOKEN_IDS.items()}
    has_boundaries = family.model_type not in ("bert", "distilbert", "electra")
    if has_boundaries:
        described |= {f"{name}_token_id": getattr(special, token) for name, token in BOUNDARIES.items()}
    described |= {"dtype": "float32", "transformers_version": TRANSFORMERS_VERSION}
    if classifier and classifier.label_type == "regression":  # a cross-encoder's default is a sigmoid
        described["sentence_transformers"] = {"activation_fn": "torch.nn.modules.linear.Identity"}
    settings = describe_tokenizer(tokenizer, config, model_max_length, start, has_boundaries)
    others = {} if classifier or family is OWN else _describe_sentences(config, model_max_length, start)
    with replacing(folder, "place") as part:
        part.mkdir(parents=True)
        tensors = _their_tensors(family, model, num_tokens, config.position_offset)
        metadata = {"format": "pt"} | ({} if tokens is None else {TOKENS: str(tokens)})
        if family.pooler and isinstance(model, MaskedLM):
            tensors |= _untrained_pooler(family, model.config)
            metadata |= {UNTRAINED_POOLER: family.pooler}
        (part / WEIGHTS).write_bytes(save(tensors, metadata=metadata))
        (part / TOKENIZER).write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
        for name, content in {CONFIG: described, TOKENIZER_CONFIG: settings, **others}.items():
            (part / name).parent.mkdir(exist_ok=True)
            (part / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        if check:
            on = "real text" if rows else "random tokens"
            rows = rows or _random_rows(num_tokens, min(longest, 64), special.pad)
            found = _check_written(part, model, None if family is OWN else family, rows, num_tokens)
            number = rows["input_ids"].shape[0]
            card = f"{card.rstrip()}\n\nRead back after writing, on {number} rows of {on}: {found}."
        (part / CARD).write_text(f"{card}\n", encoding="utf-8")
    return folder


def _random_rows(num_tokens: int, length: int, pad: int) -> CheckRows:
    """Return a row of random ids without padding, always the same."""
    ids = torch.randint(num_tokens - 1, (1, length), generator=torch.Generator().manual_seed(0))
    ids += ids >= pad
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def _their_tensors(
    family: Family, model: Trained, num_tokens: int, position_offset: int
) -> dict[str, Tensor]:
    """Return copies of the weights as the family stores them."""
    result = {}
    state, offset = model.state_dict(), model.config.position_offset
    if offset != position_offset:  # the rows before the first token's are never read
        table = state[POSITIONS]
        state[POSITIONS] = torch.cat([table.new_zeros(position_offset, table.shape[1]), table[offset:]])
    for name, weight in state.items():
        theirs = family.their_names(name)
        for part, block in zip(theirs, weight.chunk(len(theirs)), strict=True):
            result[part] = block.to("cpu", torch.float32, copy=True).contiguous()
    if isinstance(model, MaskedLM):
        result[family.their_names("head.bias")[0]][num_tokens:] = UNUSED_ID_BIAS
    if not model.config.tie_word_embeddings:
        copies = family.untied_copies.items()
        result |= {copy: result[name].clone() for name, copy in copies if name in result}
    return result


def _untrained_pooler(family: Family, config: ModelConfig) -> dict[str, Tensor]:
    """Return random weights, always the same: without them every load would draw others, and warn."""
    size, generator = config.hidden_size, torch.Generator().manual_seed(0)
    weight = torch.randn(size, size, generator=generator) * config.initializer_range
    return {f"{family.pooler}.weight": weight, f"{family.pooler}.bias": torch.zeros(size)}


@torch.no_grad()
def _check_written(
    folder: Path, model: Trained, family: Family | None, rows: CheckRows, num_tokens: int
) -> str:
    """Compare a model, in float32 on the CPU, with the readers of its folder; return the differences.

    `family` is that of the class of transformers, if there is one. Padding is not compared, nor are ids from
    `num_tokens` on, which only pad the tables.
    """

    def compute(reader: Callable[..., Tensor]) -> Tensor:
        logits = reader(**rows)  # (B, S, V), or (B, C) of the texts
        return logits[rows["attention_mask"] > 0][:, :num_tokens] if logits.dim() == 3 else logits

    head = () if isinstance(model, MaskedLM) else (model.classifier_config,)
    with torch.device("meta"):  # a plain twin: the model may be compiled, on a GPU or in another precision
        twin = type(model)(model.config, *head)
    twin.to_empty(device="cpu")
    twin.load_state_dict(model.state_dict())
    expected = compute(twin.eval())
    if not expected.isfinite().all():
        hint = "try a lower optimizer.lr or optimizer.weight_decay"
        raise InputError(f"the model computes logits that are not finite, so it is not saved; {hint}")
    readers: dict[str, Callable[..., Tensor]] = {"mlm": load_pretrained(folder)}
    if family is not None:
        readers |= _stock_reader(folder, family.classifier if head else family.architecture)
    found = []
    for name, reader in readers.items():
        difference = (compute(reader) - expected).abs().max().item()
        if not difference <= MAX_DIFFERENCE:  # also if it is NaN
            raise InputError(f"read back by {name}, a logit differs by {difference:.1e}: not saved; {NEXT}")
        found.append(f"{difference:.1e} by {name}")
    return f"largest difference of a logit {' and '.join(found)}"


def _stock_reader(folder: Path, stock_class: str) -> dict[str, Callable[..., Tensor]]:
    """Return a function that computes logits with transformers, by its name; logged and empty without it."""
    if importlib.util.find_spec("transformers") is None:
        log.info("the saved model is read back and compared; with transformers installed, by its classes too")
        return {}
    import transformers

    kind: Any = getattr(transformers, stock_class, None)
    if kind is None:
        log.warning("transformers %s has no %s: not compared with it", transformers.__version__, stock_class)
        return {}
    messages = transformers.utils.logging
    with ExitStack() as restored:
        restored.callback(messages.set_verbosity, messages.get_verbosity())
        if messages.is_progress_bar_enabled():
            restored.callback(messages.enable_progress_bar)
        messages.set_verbosity_error()
        messages.disable_progress_bar()
        theirs, info = kind.from_pretrained(folder, output_loading_info=True)
    odd = {fault: {name for name in names if ".pooler." not in name} for fault, names in info.items()}
    if odd := {fault: names for fault, names in odd.items() if names}:
        raise InputError(f"transformers cannot read it ({odd}), so it is not saved; {NEXT}")
    theirs.eval()
    return {f"{stock_class} of transformers {transformers.__version__}": lambda **rows: theirs(**rows).logits}


def _describe_sentences(config: ModelConfig, longest: int, start: str | Path | None) -> dict[str, Any]:
    """Return the files by which sentence-transformers makes a vector of a text: of `start` or ours.

    Ours is the mean over the tokens, of length 1, as `mlm embed` computes it.
    """
    length = {"max_seq_length": longest, "do_lower_case": False}
    kept = Path(start, MODULES) if start else None
    if start and kept and kept.exists():
        pooling = read_settings(start, f"{POOLING}/config.json")
        modules = json.loads(kept.read_text(encoding="utf-8"))
        return {SENTENCES: length, MODULES: modules, f"{POOLING}/config.json": pooling}
    kinds = {"": "Transformer", POOLING: "Pooling", "2_Normalize": "Normalize"}
    modules = [
        {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for number, (path, kind) in enumerate(kinds.items())
    ]
    modes = {f"pooling_mode_{mode}_tokens": mode == "mean" for mode in ("mean", "max")}
    modes["pooling_mode_cls_token"] = False
    pooling = {"word_embedding_dimension": config.hidden_size, **modes}
    return {SENTENCES: length, MODULES: modules, f"{POOLING}/config.json": pooling}


def describe_tokenizer(
    tokenizer: Tokenizer,
    config: ModelConfig,
    model_max_length: int,
    start: str | Path | None = None,
    has_boundaries: bool = False,
) -> Json:
    """Return the content of tokenizer_config.json, with the CARRIED_SETTINGS of the model folder `start`."""
    special = SpecialTokens.from_tokenizer(tokenizer)
    tokens = {f"{name}_token": tokenizer.id_to_token(token) for name, token in asdict(special).items()}
    if has_boundaries or tokens["cls_token"] in OTHER_NAMES:  # RoBERTa has a second name for both
        tokens |= {f"{name}_token": tokens[f"{token}_token"] for name, token in BOUNDARIES.items()}
    written = read_settings(start, TOKENIZER_CONFIG) if start else {}
    types = ["token_type_ids"] * (config.type_vocab_size > 1)
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_input_names": ["input_ids", *types, "attention_mask"],
        "clean_up_tokenization_spaces": False,
        **tokens,
        **{name: written[name] for name in CARRIED_SETTINGS if name in written},
        "model_max_length": model_max_length,
    }


_STOCK_EXAMPLE = """from transformers import AutoTokenizer, {architecture}

path = "path/to/model"  # this folder, or OWNER/NAME on the hub
model = {architecture}.from_pretrained(path)
tokenizer = AutoTokenizer.from_pretrained(path)"""

_PIPELINE = """

from transformers import pipeline

label = pipeline("text-classification", path)({text}, truncation=True{options})"""

_OWN_EXAMPLE = """from mlm.hub import load_pretrained  # transformers has no class for this architecture

model = load_pretrained("path/to/model")  # this folder, or OWNER/NAME on the hub"""


def model_card(
    title: str,
    model_config: ModelConfig,
    facts: Mapping[str, object],
    classifier: ClassifierConfig | None = None,
    start: str | None = None,
    options: CardConfig | None = None,
    metrics: Mapping[str, float] | None = None,
    tokenizer: Tokenizer | None = None,
) -> str:
    """Return the card of a model folder as Markdown, in the form that the Hugging Face hub shows.

    It is published with the model, so give it no local paths. `facts` are about training; `start` is the
    model of the hub that training began from, see `pinned_name`; `metrics` are scores on `facts["task"]`.
    """
    architecture = architecture_of(model_config, classifier)
    example = _OWN_EXAMPLE if architecture in (OWN.architecture, OWN.classifier) else _STOCK_EXAMPLE
    counts = count_parameters(model_config, len(classifier.labels) if classifier else None)
    parameters = {part: f"{count:,}" for part, count in (counts | {"total": sum(counts.values())}).items()}
    task, head, how = "fill-mask", "masked-lm", "pretrained with masked language modelling"
    if classifier:
        task, head = "text-classification", "classifier"
        how = f"fine-tuned on labelled texts. Labels: {shorten(classifier.labels)}"
        if example is _STOCK_EXAMPLE:
            text = '{"text": "One text.", "text_pair": "Another."}' if classifier.text_pairs else '"A text."'
            several = ", top_k=None" if classifier.label_type == "multilabel" else ""
            example += _PIPELINE.replace("{text}", text).replace("{options}", several)
    front = ["library_name: transformers", f"pipeline_tag: {task}", f"tags: [{head}, encoder]"]
    if start:
        front.append(f"base_model: {start.partition('@')[0]}")
        facts = {"started from": start, **facts}
    chosen = {name: value for name, value in vars(options or CardConfig()).items() if value}
    front += [f"{name}: {json.dumps(value)}" for name, value in chosen.items()]
    if metrics:
        data = json.dumps(str(facts.get("task", "own data")))
        scores = [{"type": name, "value": round(value, 6)} for name, value in metrics.items()]
        where = f"task: {{type: {task}}}, dataset: {{name: {data}, type: {data}}}"
        results = f"{{{where}, metrics: {json.dumps(scores)}}}"
        front += ["model-index:", f"- {{name: {json.dumps(title)}, results: [{results}]}}"]
    use = f"```python\n{example.replace('{architecture}', architecture)}\n```"
    if tokenizer:
        case = "folded" if _folds_case(tokenizer) else "kept"
        use += f"\n\nUpper and lower case are {case}. Inputs longer than the tokenizer's `model_max_length` "
        use += "must be cut: `tokenizer(text, truncation=True)`, or `pipeline(...)(text, truncation=True)`."
    sections = {
        "Use": use,
        "Training": _table(("fact", "value"), facts),
        "Architecture": _table(("field", "value"), asdict(model_config)),
        "Parameters": _table(("part", "parameters"), parameters),
    }
    body = "\n\n".join(f"## {heading}\n\n{text}" for heading, text in sections.items())
    intro = f"A BERT-style encoder ({architecture}), {how}."
    return "\n".join(["---", *front, "---", "", f"# {title}", "", intro, "", body, ""])


def _folds_case(tokenizer: Tokenizer) -> bool:
    return tokenizer.normalizer is not None and tokenizer.normalizer.normalize_str("A") == "a"


def _table(header: tuple[str, str], rows: Mapping[str, object]) -> str:
    shown = {name: f"{value:.4g}" if isinstance(value, float) else str(value) for name, value in rows.items()}
    lines = [header, ("---", "---"), *shown.items()]
    return "\n".join(f"| {name} | {text} |" for name, text in lines)
