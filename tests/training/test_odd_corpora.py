"""Text at the edges of what people have: from the file to two steps of training, without losing a token."""

import csv
import json
import math
import random
from pathlib import Path

import numpy as np
import pytest

from mlm.config.data import MaskingConfig, TokenizerConfig
from mlm.config.errors import InputError
from mlm.data.corpus import prepare_corpus
from mlm.data.sources import read_documents
from mlm.tokenizer import encode_documents
from mlm.training.pretraining import pretrain

LETTERS = "".join(random.Random(0).choices("abcdefghij", k=8_000))
TEXTS = {
    "one sentence": "one sentence about a harbour",
    "one word": "harbour",
    "documents of one word": "\n".join(
        random.Random(0).choices(["lamp", "boat", "gull", "tide", "x", "7", "."], k=3000)
    ),
    "one long document": "the boat waits for the tide and " * 4_000,
    "no spaces": LETTERS,
    "arabic": "ينتظر القارب المد\nالميناء هادئ في المساء\nكل مصباح يتذكر رسالة\n",
    "german": "Das Boot wartet auf die Flut.\nÜber dem Hafen kreist eine Möwe.\nGrüße aus dem Süden\n",
    "hindi": "नाव ज्वार की प्रतीक्षा करती है\nबंदरगाह शाम को शांत है\nहर दीपक एक पत्र याद रखता है\n",
    "japanese": "舟は潮を待っている。\n夕方の港は静かだ。\nカモメが灯台の上を飛ぶ。\n",
    "chinese": "小船等待潮水。\n傍晚的港口很安静。\n每盏灯都记得一封信。\n",
    "signs": "\u200b \u00ad\nhi\u200dthere\x07\x00 😀👨\u200d👩\u200d👧\n[MASK] [SEP] ##ing <s>\n...\t---\n",
}


def odd(tiny, tmp_path, text, **options):
    path = tmp_path / "odd.txt"
    path.write_text(text, encoding="utf-8")
    config = tiny(trainer={"max_steps": 2, "micro_batch_size": 1, "global_batch_size": 4}, **options)
    config.data.sources[0].path = str(path)
    config.data.num_proc = 1
    return config


def ordinary_ids(*parts):
    ids = np.concatenate([part.render(np.arange(len(part)))[0].ravel() for part in parts])
    return np.sort(ids[~np.isin(ids, list(parts[0].special.ids))])


@pytest.mark.parametrize(
    ("name", "kind"),
    [(name, "wordpiece") for name in TEXTS]
    + [(name, "bpe") for name in ("one word", "no spaces", "arabic", "japanese", "signs")],
)
def test_every_text_is_trained_on_without_losing_a_token(tiny, tmp_path, name, kind):
    vocabulary = TokenizerConfig(type=kind, vocab_size=400)
    options = {"tokenizer": vocabulary, "masking": MaskingConfig("whole_word")}
    config = odd(tiny, tmp_path, TEXTS[name], **options)
    if (name, kind) == ("no spaces", "wordpiece"):
        with pytest.raises(
            InputError, match=r"odd\.txt: the vocabulary knows no token of the text; .*type bpe"
        ):
            pretrain(config)
        assert not Path(config.runs_dir, "run").exists()
        return
    assert pretrain(config) == 0
    folder = Path(config.runs_dir, "run")
    summary = json.loads((folder / "summary.json").read_text())
    with (folder / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))[1:]
    assert all(math.isfinite(float(row["train/loss"])) for row in rows)
    assert all(float(row["masking/rate"]) > 0 for row in rows)
    assert summary["loss_first"] == pytest.approx(math.log(summary["vocab_size"]), rel=0.08)
    corpus = prepare_corpus(config.data, config.tokenizer)
    documents = list(read_documents(config.data.sources[0], "line"))
    expected = np.sort(np.concatenate(encode_documents(corpus.tokenizer, documents)))
    expected = expected[~np.isin(expected, list(corpus.train.special.ids))]
    single = len(corpus.train) == 1 and np.array_equal(ordinary_ids(corpus.train), expected)
    found = ordinary_ids(corpus.train) if single else ordinary_ids(corpus.train, corpus.validation)
    assert np.array_equal(found, expected)


def test_an_empty_text_is_refused_and_leaves_nothing(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("MLM_CACHE", str(tmp_path / "cache"))
    config = odd(tiny, tmp_path, "")
    with pytest.raises(InputError, match=r"odd\.txt: has no documents"):
        pretrain(config)
    assert not Path(config.runs_dir, "run").exists()
    left = [path.name for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert not [name for name in left if name != "digests.json" and not name.endswith(".lock")]


def test_a_vocabulary_is_never_larger_than_the_text_gives_and_the_model_follows_it(tiny, tmp_path):
    """30,000 entries asked for, of two sentences; then a folder whose tokenizer grew by three tokens."""
    config = odd(
        tiny, tmp_path, "the boat waits\nthe gull answers", tokenizer=TokenizerConfig(vocab_size=30_000)
    )
    assert pretrain(config) == 0
    model = Path(config.runs_dir, "run", "model")
    size = json.loads((Path(config.runs_dir, "run", "summary.json")).read_text())["vocab_size"]
    rows = json.loads((model / "config.json").read_text())["vocab_size"]
    assert size < 60
    assert rows == -(-size // 64) * 64
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary.update({f"new{number}": len(vocabulary) + number for number in range(rows - size + 3)})
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    grown = odd(tiny, tmp_path, "the boat waits", name="grown", init=str(model))
    with pytest.raises(
        InputError, match=f"vocab_size={rows} is smaller than the tokenizer, which has {rows + 3}"
    ):
        pretrain(grown)
    assert not Path(config.runs_dir, "grown").exists()
