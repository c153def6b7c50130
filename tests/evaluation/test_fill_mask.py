import pytest
from transformers import pipeline

from mlm.__main__ import main
from mlm.config.commands import FillMaskConfig
from mlm.config.errors import InputError
from mlm.evaluation.commands import fill_mask
from mlm.evaluation.predictor import Predictor
from mlm.tokenizer import load_tokenizer


def test_candidates_equal_those_of_transformers(model_folder):
    theirs = pipeline("fill-mask", model=str(model_folder), tokenizer=str(model_folder))
    text = "the old [MASK] remembers the lighthouse ."
    ours = Predictor(model_folder).fill_mask(text, top_k=5)
    assert [c.token for c in ours[0]] == [found["token_str"].replace(" ", "") for found in theirs(text)]
    assert [c.probability for c in ours[0]] == pytest.approx([f["score"] for f in theirs(text)], abs=1e-5)


def test_every_mask_of_every_text_is_filled(model_folder, capsys):
    texts = ["the [MASK] waits for [MASK] .", "[MASK]"]
    assert main(["fill-mask", "--model", str(model_folder), *texts, "--top_k", "2"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in out if line.startswith("  mask")] == ["1", "1", "2", "2", "1", "1"]
    assert [line for line in out if not line.startswith("  ")] == texts


@pytest.mark.parametrize(
    ("text", "message"), [("no hidden word", r"write \[MASK\]"), ("[MASK] " + "boat " * 70, "at most 64")]
)
def test_texts_that_cannot_be_filled_are_refused(model_folder, text, message):
    with pytest.raises(InputError, match=message):
        Predictor(model_folder).fill_mask(text)


def test_a_folder_without_a_model_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["fill-mask", "--model", str(tmp_path), "the [MASK]"])
    assert stop.value.code == 2
    assert "config.json" in capsys.readouterr().err


def test_a_tokenizer_larger_than_the_model_is_told_with_both_sizes(model_folder):
    path = model_folder / "tokenizer.json"
    tokenizer = load_tokenizer(path)
    tokenizer.add_tokens([f"word{number}" for number in range(100)])
    tokenizer.save(str(path))
    with pytest.raises(
        InputError, match=r"vocab_size=128 is smaller than the tokenizer, which has 220 entries"
    ):
        fill_mask(FillMaskConfig(str(model_folder), ["word99 [MASK]"]))


def test_ids_without_a_token_are_no_candidates(model_folder, capsys):
    fill_mask(FillMaskConfig(str(model_folder), ["a [MASK]"], top_k=1000))
    lines = capsys.readouterr().out.splitlines()[1:]
    assert len(lines) == 120
    assert not any(line.endswith("None") for line in lines)
