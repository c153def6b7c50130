from __future__ import annotations

from dataclasses import replace

import pytest

from mlm.config.errors import InputError
from mlm.config.model import ClassifierConfig, ModelConfig


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"global_attn_every_n_layers": 0}, "model.global_attn_every_n_layers=0 must be at least 1"),
        ({"local_attention": 0}, "model.local_attention=0 must be at least 1"),
        ({"position_offset": -1}, "model.position_offset=-1 must be at least 0"),
        ({"embedding_size": 0}, "model.embedding_size=0 must be at least 1, or null"),
        ({"num_hidden_layers": None}, "model.num_hidden_layers: expected a whole number, got null"),
        ({"local_rotary_theta": 0.0}, "model.local_rotary_theta=0.0 must be above 0"),
        ({"rotary_theta": float("nan")}, "model.rotary_theta=nan must be finite"),
        ({"hidden_dropout": 1.0}, r"model.hidden_dropout=1.0 must be in \[0, 1\)"),
        ({"norm": "rmsnorm", "norm_bias": True}, "model.norm_bias=True needs model.norm=layernorm"),
        ({"position_embedding": "sinusoidal", "embedding_size": 5}, "width 5 must be even"),
        ({"embedding_size": 8, "head_transform": False}, "needs model.head_transform=True"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(values, message):
    with pytest.raises(InputError, match=message) as caught:
        ModelConfig(**values)
    assert "\n" not in str(caught.value)


def test_one_model_has_one_spelling():
    assert ModelConfig(embedding_size=256) == ModelConfig(embedding_size=None)
    assert ModelConfig(final_norm=True) == ModelConfig()
    post = ModelConfig(norm_position="post")
    assert replace(post, final_norm=False) == post
    assert replace(post, final_norm=True) != post


def test_switches_that_follow_from_others():
    pre, post = ModelConfig(), ModelConfig(norm_position="post")
    assert (pre.has_final_norm, post.has_final_norm) == (True, False)
    assert replace(post, final_norm=True).has_final_norm
    assert not replace(pre, final_norm=False).has_final_norm
    assert [config.has_attention_norm(0) for config in (pre, post)] == [False, True]
    assert pre.has_attention_norm(1)
    assert replace(pre, first_attention_norm=True).has_attention_norm(0)
    assert not any(pre.is_local(layer) for layer in range(6))
    third = replace(pre, global_attn_every_n_layers=3)
    assert [third.is_local(layer) for layer in range(6)] == [False, True, True, False, True, True]


def test_width_of_the_output_matrix():
    narrow = ModelConfig(embedding_size=64)
    assert (narrow.embedding_width, narrow.output_width) == (64, 64)
    direct = replace(narrow, head_transform=False, tie_word_embeddings=False)
    assert direct.output_width == 256


def test_rows_of_the_position_table():
    learned = ModelConfig(position_embedding="learned", max_position_embeddings=512, position_offset=2)
    assert learned.position_rows == 514
    assert replace(learned, position_embedding="sinusoidal").position_rows == 514
    assert replace(learned, position_embedding="rotary").position_rows == 0
    assert replace(learned, position_embedding="none").position_rows == 0


@pytest.mark.parametrize(
    ("own", "wanted", "order"),
    [
        (("no", "yes"), ("yes", "no"), [1, 0]),
        (("No", "Yes"), ("YES", "no"), [1, 0]),
        (("a", "A", "b"), ("a", "A", "b"), [0, 1, 2]),
        (("a", "A", "b"), ("b", "A", "a"), [2, 1, 0]),
        (("a", "A"), ("a",), None),
        (("a",), ("a", "A"), None),
        (("Yes", "yes", "no"), ("YES", "yes", "no"), None),
        (("no", "yes"), ("no", "maybe"), None),
    ],
)
def test_classes_are_matched_by_name_past_capitals_where_no_name_is_lost(own, wanted, order):
    assert ClassifierConfig(own).order_of(wanted) == order


def test_class_whose_name_no_file_can_hold_is_refused():
    with pytest.raises(InputError, match=r"labels=\['a\\ud800'\] has half a surrogate pair in it"):
        ClassifierConfig(("a\ud800", "b"))
