"""The other side: the job of transformers' run_mlm example, done with its Trainer, for the benchmarks here.

`datasets` reads, tokenizes and cuts the text into full rows, the collator masks, `Trainer` trains a
BertForMaskedLM and saves it. The last line printed is JSON: when each step ended, and the tokens of a step.
"""

from __future__ import annotations

import argparse
import json
import time
from itertools import chain
from typing import Any

START = time.perf_counter()


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("text", "tokenizer", "cache", "output"):
        parser.add_argument(f"--{name}", required=True)
    for name, default in (("hidden", 256), ("layers", 4), ("heads", 4), ("seq_len", 128), ("rows", 32)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--save_every", type=int, default=500, help="the example's default")
    parser.add_argument("--lr", type=float, default=5e-5, help="the example's default")
    parser.add_argument("--warmup", type=float, default=0.0, help="share of the steps; the example's default")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument(
        "--vocab", type=int, default=None, help="entries of the model; default: the tokenizer's"
    )
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--compile", action="store_true")
    return parser.parse_args()


def read_rows(options: argparse.Namespace, tokenizer: Any) -> Any:
    """Return the training rows, from the library's cache where they were made before."""
    from datasets import load_dataset

    def tokenize(examples: dict[str, list[str]]) -> Any:
        return tokenizer(examples["text"], return_special_tokens_mask=True)

    def group(examples: dict[str, list[list[int]]]) -> dict[str, list[list[int]]]:
        joined = {key: list(chain.from_iterable(lists)) for key, lists in examples.items()}
        size = options.seq_len
        total = len(joined["input_ids"]) // size * size
        return {key: [ids[at : at + size] for at in range(0, total, size)] for key, ids in joined.items()}

    text = load_dataset("text", data_files=options.text, split="train", cache_dir=options.cache)
    return text.map(tokenize, batched=True, remove_columns=["text"]).map(group, batched=True)


def build_trainer(options: argparse.Namespace, tokenizer: Any, ends: list[float]) -> Any:
    import transformers

    class StepTimes(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            ends.append(time.perf_counter() - START)

    transformers.set_seed(options.seed)
    config = transformers.BertConfig(
        vocab_size=options.vocab or len(tokenizer),
        hidden_size=options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=options.heads,
        intermediate_size=4 * options.hidden,
        hidden_dropout_prob=options.dropout,
        attention_probs_dropout_prob=options.dropout,
    )
    arguments = transformers.TrainingArguments(
        output_dir=options.output,
        per_device_train_batch_size=options.rows,
        max_steps=options.steps,
        save_steps=options.save_every,
        learning_rate=options.lr,
        warmup_steps=round(options.warmup * options.steps),
        bf16=options.bf16,
        torch_compile=options.compile,
        seed=options.seed,
        use_cpu=True,
        dataloader_drop_last=True,
        dataloader_pin_memory=False,
        disable_tqdm=True,
        report_to="none",
    )
    return transformers.Trainer(
        model=transformers.BertForMaskedLM(config),
        args=arguments,
        train_dataset=read_rows(options, tokenizer),
        processing_class=tokenizer,
        data_collator=transformers.DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.15),
        callbacks=[StepTimes()],
    )


def main() -> None:
    options = parse_options()
    import torch
    from transformers import PreTrainedTokenizerFast

    names = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=f"{options.tokenizer}/tokenizer.json", **names)
    ends: list[float] = []
    trainer = build_trainer(options, tokenizer, ends)
    trainer.train()
    trainer.save_model(f"{options.output}/model")
    facts = {"ends_s": ends, "tokens_per_step": options.rows * options.seq_len}
    print(json.dumps(facts | {"threads": torch.get_num_threads()}))


if __name__ == "__main__":
    main()
