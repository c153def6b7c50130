import pytest

from mlm.config.commands import PretrainConfig
from mlm.config.data import CorpusConfig, SourceConfig, TokenizerConfig
from mlm.config.model import ModelConfig
from mlm.config.training import LoggingConfig, OptimizerConfig, ScheduleConfig, TrainerConfig


@pytest.fixture
def text(tmp_path, documents):
    path = tmp_path / "text.txt"
    path.write_text("\n".join(documents))
    return path


@pytest.fixture
def tiny(tmp_path, text):
    """Builds a configuration of seconds; keywords replace parts of it."""

    def build(name="run", model=None, trainer=None, optimizer=None, data=None, **options):
        sizes = {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 48,
        }
        budget = {
            "max_steps": 8,
            "global_batch_size": 8,
            "precision": "32-true",
            "accelerator": "cpu",
            "val_every": 4,
            "save_every": 4,
        }
        corpus = {"sources": [SourceConfig(str(text))], "document": "line", "seq_len": 32}
        return PretrainConfig(
            name=name,
            runs_dir=str(tmp_path / "runs"),
            data=CorpusConfig(**corpus | (data or {})),
            tokenizer=options.pop("tokenizer", TokenizerConfig(vocab_size=120)),
            model=ModelConfig(**sizes | (model or {})),
            optimizer=OptimizerConfig(**{"name": "adamw", "lr": 5e-3} | (optimizer or {})),
            schedule=options.pop("schedule", ScheduleConfig(name="linear")),
            trainer=TrainerConfig(**budget | (trainer or {})),
            logging=options.pop("logging", LoggingConfig(wandb="disabled")),
            **options,
        )

    return build
