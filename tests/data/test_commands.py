from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mlm.__main__ import main
from mlm.tokenizer import load_tokenizer


@pytest.fixture
def text(tmp_path: Path, documents: list[str]) -> str:
    path = tmp_path / "text.txt"
    different = list(dict.fromkeys(documents))[:249]
    path.write_text("\n".join([*different, different[0]]))
    return str(path)


SMALL = ["--tokenizer.vocab_size", "120", "--data.document", "line", "--data.seq_len", "32"]


def run(*words: str) -> int:
    return main(["prepare", "--data.num_proc", "1", *words, *SMALL])


def test_prepare_says_what_there_is_and_where(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--data.sources", text) == 0
    out = capsys.readouterr().out
    assert any(line.split()[:2] == [text, "250"] for line in out.splitlines())
    folder = Path(out.partition("token store")[2].split()[0])
    assert (folder / "manifest.json").exists()
    assert "0.40%" in out, "the share of duplicates"
    assert "rows of 32" in out
    assert "120 entries" in out


def test_train_py_uses_what_was_prepared(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    run("--data.sources", text)
    caplog.clear()
    words = ["--data.sources", text, *SMALL, "--trainer.max_steps", "1", "--trainer.global_batch_size", "8"]
    words += [
        "--runs_dir",
        str(tmp_path / "runs"),
        "--model.hidden_size",
        "32",
        "--model.num_hidden_layers",
        "1",
    ]
    words += [
        "--model.intermediate_size",
        "32",
        "--trainer.accelerator",
        "cpu",
        "--logging.wandb",
        "disabled",
    ]
    assert main(["pretrain", *words]) == 0
    assert caplog.text.count("reusing") == 2


def test_prepare_mix_shows_shares(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other.txt"
    other.write_text("the market\n" * 10 + "heavy rain\n" * 5)
    mix = [f"{{path: {text}, weight: 0.7}}", f"{{path: {other}, weight: 0.3}}"]
    assert run("--data.sources", ",".join(mix)) == 0
    out = capsys.readouterr().out
    assert "all sources" in out
    assert out.count("times in the longest pass") == 2


def test_prepare_in_shares(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--data.sources", text, "--shard", "2/2") == 0
    assert "shard 2/2 is done; the machine that ends last finishes" in capsys.readouterr().out
    assert run("--data.sources", text, "--shard", "1/2") == 0
    assert "token store  " in capsys.readouterr().out


def test_cache_is_listed_and_cleaned(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    run("--data.sources", text)
    capsys.readouterr()
    assert main(["prepare", "--list"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{os.environ['MLM_CACHE']}: ")
    assert "token store" in out
    assert "vocabulary" in out
    assert text in out
    assert main(["prepare", "--clean", "1"]) == 0
    assert "removed 0 B" in capsys.readouterr().out
    assert main(["prepare", "--clean", "all"]) == 0
    assert text in capsys.readouterr().out
    main(["prepare", "--list"])
    assert capsys.readouterr().out.splitlines() == [f"{os.environ['MLM_CACHE']}: 0 B"]


# ------------------------------------------------------------------------------------------- tokenizer


def test_tokenizer_is_trained_to_the_same_bytes_every_time(text: str, tmp_path: Path) -> None:
    files = []
    for number in range(3):
        command = [sys.executable, "-m", "mlm", "tokenizer", "train", "--data.sources", text]
        command += ["--output", str(tmp_path / str(number)), "--tokenizer.vocab_size", str(60)]
        subprocess.run(command, check=True, capture_output=True)
        files.append((tmp_path / str(number) / "tokenizer.json").read_bytes())
    assert len(set(files)) == 1


def train(*words: str) -> int:
    return main(["tokenizer", "train", "--tokenizer.vocab_size", "300", *words])


def test_rows_without_text_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "rows.jsonl"
    texts = ["quiet harbour", None, "old stone wall", "", "two boats"]
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    assert train("--data.sources", str(path), "--output", str(tmp_path / "t")) == 0
    assert "2 of 5 rows had no text" in caplog.text
    assert load_tokenizer(tmp_path / "t").get_vocab_size() > 20


def test_empty_text_trains_no_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty.txt").touch()
    with pytest.raises(SystemExit) as stop:
        train("--data.sources", str(tmp_path / "empty.txt"), "--output", str(tmp_path / "t"))
    assert stop.value.code == 2
    assert "empty.txt: has no documents" in capsys.readouterr().err
    assert not (tmp_path / "t").exists()


def test_amount_of_text_is_bounded_and_logged(
    text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out = str(tmp_path / "t")
    assert train("--data.sources", text, "--output", out, "--tokenizer.max_bytes", "1e4") == 0
    assert "learnt from 10.0 kB of the text" in caplog.text


def test_existing_tokenizer_is_not_overwritten(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train("--data.sources", text, "--output", str(tmp_path))
    with pytest.raises(SystemExit):
        train("--data.sources", text, "--output", str(tmp_path))
    assert "holds a tokenizer.json already" in capsys.readouterr().err


def test_tokenizer_is_shown(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train("--data.sources", text, "--output", str(tmp_path))
    strange = tmp_path / "strange.txt"
    strange.write_text("the \u03c8 harbour\n")
    capsys.readouterr()
    words = ["--path", str(tmp_path), "the harbour [MASK]", "--sources", f"{text},{strange}"]
    assert main(["tokenizer", "inspect", *words]) == 0
    out = capsys.readouterr().out
    assert "WordPiece" in out
    assert "[MASK] 4" in out
    assert "tokens: the harbour " in out
    rates = {line.split()[-1]: line.split()[0] for line in out.splitlines()[-2:]}
    assert rates == {text: "0.00%", str(strange): "33.33%"}
