import pytest
import torch

from mlm.config.model import ModelConfig
from mlm.hub.saving import save_pretrained
from mlm.model.heads import MaskedLM


@pytest.fixture
def model_folder(tmp_path, tokenizer):
    """A random tiny model with weights large enough for its opinions to differ."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    torch.manual_seed(0)
    config = ModelConfig(**sizes, initializer_range=0.3).resolve(tokenizer.get_vocab_size(), 64)
    return save_pretrained(tmp_path / "model", MaskedLM(config), tokenizer, 64, "# tiny")
