from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import yaml

from mlm.config.commands import EvaluateConfig, FillMaskConfig, PrepareConfig, PretrainConfig
from mlm.config.data import CorpusConfig, MaskingConfig, SourceConfig
from mlm.config.errors import InputError
from mlm.config.files import config_folder
from mlm.config.finetune import FinetuneConfig
from mlm.config.model import ModelConfig
from mlm.config.parse import Keys, dump_config, from_plain, read_file, to_plain
from mlm.config.training import OptimizerConfig, ScheduleConfig, TrainerConfig
from mlm.startup.command import parse_config

SHIPPED = sorted(config_folder().glob("*/*.yaml"))


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def parse(*words, cls=PretrainConfig):
    """Parse as a process of its own would: no name handed over from an earlier one."""
    os.environ.pop("MLM_RUN_NAME", None)
    return parse_config(cls, list(words), prog="train.py")


def refusal(capsys, *words, cls=PretrainConfig):
    """Return the one line that refuses this command line."""
    with pytest.raises(SystemExit) as stop:
        parse(*words, cls=cls)
    out, err = capsys.readouterr()
    assert stop.value.code == 2
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("train.py: error: ")
    return err.removeprefix("train.py: error: ").rstrip("\n")


def named(config, name="same"):
    config.name = name
    return config


def test_no_argument_gives_the_defaults():
    config = parse()
    assert config.name.startswith("default-")
    assert named(config) == PretrainConfig(name="same")


def test_default_file_lists_every_key_and_equals_the_defaults():
    path = config_folder() / "pretrain" / "default.yaml"
    assert yaml.safe_load(path.read_text()).keys() == to_plain(PretrainConfig()).keys()
    assert read_file(path, Keys.of(PretrainConfig)).keys() == Keys.of(PretrainConfig).types.keys()
    assert named(parse("--config", "default")) == PretrainConfig(name="same")


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_shipped_file_parses(path):
    if path.parent.name == "pretrain":
        Path("config.json").write_text("{}")
        start = ["--init", "."] if path.stem == "adapt" else []
        assert parse("--config", str(path), *start).name.startswith(path.stem)
    elif path.parent.name == "finetune":
        Path("config.json").write_text("{}")
        config = parse("--config", str(path), "--model", ".", cls=FinetuneConfig)
        assert config.name.startswith(path.stem)
    else:
        assert path.parent.name in Keys.of(PretrainConfig).groups, f"no test knows what {path} is"
        parse(f"--{path.parent.name}", str(path))


def test_bert_mini_is_the_classic_recipe():
    config = parse("--config", "bert-mini")
    assert config.model == ModelConfig(
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=1024,
        max_position_embeddings=512,
        norm_position="post",
        norm_eps=1e-12,
        norm_bias=True,
        position_embedding="learned",
        activation="gelu",
        attention_bias=True,
        mlp_bias=True,
        head_bias=True,
        type_vocab_size=2,
        pooling="cls_tanh",
        embedding_dropout=0.1,
        attention_dropout=0.1,
        hidden_dropout=0.1,
    )
    assert config.optimizer == OptimizerConfig(
        "adamw", lr=1e-3, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.01
    )
    assert config.schedule == ScheduleConfig("linear", warmup_fraction=0.06)


def test_flags_win_over_files_and_later_files_over_earlier_ones():
    Path("a.yaml").write_text("seed: 1\noptimizer:\n  lr: 1\n  eps: 1e-3\n")
    Path("b.yaml").write_text("optimizer:\n  lr: 2\ndata:\n")
    config = parse("--seed", "3", "-c", "a.yaml", "--config=b.yaml")
    assert (config.seed, config.optimizer.lr, config.optimizer.eps) == (3, 2.0, 1e-3)
    assert config.name.startswith("b-")


def test_scientific_numbers_in_yaml_and_as_flags():
    Path("102.yaml").write_text(
        "optimizer:\n  lr: 1e-4\n  eps: 5e-5\ntrainer:\n  max_steps: null\n  max_tokens: 1e4\n"
        "schedule:\n  warmup_steps: 1_000\n"
    )
    words = ["--optimizer.lr", "1e-4", "--optimizer.eps", "5e-5", "--trainer.max_steps", "null"]
    words += ["--trainer.max_tokens", "1e4", "--schedule.warmup_steps", "1_000"]
    for config in (parse("-c", "102.yaml"), parse(*words)):
        values = (
            config.optimizer.lr,
            config.optimizer.eps,
            config.trainer.max_tokens,
            config.schedule.warmup_steps,
        )
        assert values == (0.0001, 5e-05, 10000, 1000)
        assert list(map(type, values)) == [float, float, int, int]


def test_yaml_words_keep_their_meaning():
    Path("no/007").mkdir(parents=True)
    Path("no/007/config.yaml").write_text("seed: 1\n")
    Path("x.yaml").write_text("name: 007\nruns_dir: no\nseed: 0010\nresume: yes\n")
    config = parse("-c", "x.yaml")
    assert (config.name, config.runs_dir, config.seed, config.resume) == ("007", "no", 10, True)


@pytest.mark.parametrize(
    "words",
    [
        ["--data.sources", "a b.txt,{path: c.csv, text_column: t}"],
        ["--data.sources", "[a b.txt, {path: c.csv, text_column: t}]"],
        ["--data.sources", "a b.txt", "{path: c.csv, text_column: t}"],
        ["-c", "list.yaml"],
    ],
)
def test_sources(words):
    Path("a b.txt").write_text("x")
    Path("c.csv").write_text("t\nx")
    Path("list.yaml").write_text("data:\n  sources:\n    - a b.txt\n    - {path: c.csv, text_column: t}\n")
    assert parse(*words).data.sources == [SourceConfig("a b.txt"), SourceConfig("c.csv", text_column="t")]


ODD = PretrainConfig(
    name="same",
    runs_dir="#odd: [folder]",
    data=CorpusConfig(
        sources=[
            SourceConfig("python-docs"),
            SourceConfig("a,b.txt"),
            SourceConfig("{x}.txt", document="line", text_column="null", encoding="latin-1"),
            SourceConfig("*.txt"),
            SourceConfig("hub:owner/name@config:train[:1%]"),
        ],
        validation_fraction=1e-4,
        max_documents=7,
    ),
    masking=MaskingConfig("span", mask_rate=1 / 3),
    model=ModelConfig(norm_eps=1e-12, vocab_size=None),
    optimizer=OptimizerConfig(betas=(0.1 + 0.2, 0.999), eps=5e-324, lr=1e22),
    schedule=ScheduleConfig(warmup_steps=0),
    trainer=TrainerConfig(max_steps=None, max_time="00:01:00:00", devices=2),
)


@pytest.mark.parametrize("config", [PretrainConfig(name="same"), ODD], ids=["defaults", "odd"])
def test_saved_file_reads_back_equal(config):
    for name in ("a,b.txt", "{x}.txt"):
        Path(name).write_text("x")
    Path("saved.yaml").write_text(dump_config(config))
    if config is ODD:
        # A text that spells null is null where a field may be.
        config.data.sources[2].text_column = None
    assert parse("--config", "saved.yaml") == config
    assert {path.name for path in Path().iterdir()} == {"saved.yaml", "a,b.txt", "{x}.txt"}


@pytest.mark.parametrize(
    "text", ["&x", "#x", "*x", "'x'", "1e4", "true", "a: b", "[x]", "%x", "é", "x y", "-x", "!x"]
)
def test_names_reach_the_run_and_the_file_unchanged(text):
    config = parse("--name", text)
    assert config.name == text
    Path("saved.yaml").write_text(dump_config(config))
    assert parse("--config", "saved.yaml") == config


def test_plain_types():
    plain = to_plain(ODD)
    assert json.loads(json.dumps(plain)) == plain
    assert plain["data"]["sources"][0] == "python-docs"
    assert plain["data"]["sources"][2]["encoding"] == "latin-1"
    assert plain["optimizer"]["betas"] == [0.1 + 0.2, 0.999]


def test_commands_with_required_and_positional_keys(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    words = ["the [MASK], of", "--model", str(tmp_path), "- [MASK]", "--top_k", "3"]
    config = parse(*words, cls=FillMaskConfig)
    assert config == FillMaskConfig(str(tmp_path), ["the [MASK], of", "- [MASK]"], 3)
    Path("x.yaml").write_text(f"model: {tmp_path}\ntext: ['a [MASK]']\n")
    assert parse("-c", "x.yaml", cls=FillMaskConfig).text == ["a [MASK]"]
    config = parse("--model", str(tmp_path), "--data.sources", "python-docs", cls=EvaluateConfig)
    assert config == EvaluateConfig(str(tmp_path))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--model.hiden_size 3", "unknown key --model.hiden_size; did you mean --model.hidden_size?"),
        ("--optimizer.lr fast", "--optimizer.lr: expected a number, got 'fast'"),
        ("--model.hidden_size 250 --model.num_attention_heads 4", "model.hidden_size=250 must be a multiple"),
        ("--data.sources nowhere.txt", "data.sources: no file, folder or glob match 'nowhere.txt'"),
        ("--trainer.global_batch_size 7 --trainer.micro_batch_size 2", "trainer.global_batch_size=7 must be"),
        ("--trainer.max_steps 0", "trainer.max_steps=0 must be at least 1"),
        ("--data.seq_len 1024 --model.max_position_embeddings 512", "data.seq_len=1024 is longer than"),
        ("--masking.mask_rate 15", "masking.mask_rate=15 must be in (0, 1]"),
        ("--optimizer.lr nan", "optimizer.lr=nan must be finite"),
        ("--optimizer.betas 0.9", "--optimizer.betas: expected 2 numbers, got '0.9'"),
        ("--data.packing sideways", "--data.packing: expected isolate, concat or none, got 'sideways'"),
        ("--trainer.max_time soon", "trainer.max_time=soon is not a duration"),
        ("--tokenizer.path nowhere", "tokenizer.path=nowhere: there is no file"),
        ("--init nowhere", "init=nowhere is not a model folder"),
        ("--config nowhere", "no configuration file nowhere"),
        (
            "--data.sources hub:name",
            "data.sources: hub:name is not of the form hub:OWNER/NAME[@CONFIG][:SPLIT]",
        ),
        ("--resume maybe", "--resume: expected true, false or auto, got 'maybe'"),
        ("--name a/b", "name=a/b must be a plain folder name"),
        ("--seed", "--seed: a value is missing"),
        ("stray", "unexpected argument 'stray'"),
        (
            "--schedule.warmup_steps 200 --trainer.max_steps 20",
            "schedule.warmup_steps=200 is longer than the run",
        ),
    ],
)
def test_mistakes_on_the_command_line(capsys, tmp_path, line, message):
    assert refusal(capsys, *line.split()).startswith(message)
    assert list(tmp_path.iterdir()) == []


def test_mistakes_in_the_value_of_a_key_of_a_file_name_its_line(capsys, tmp_path):
    Path("my.yaml").write_text("seed: 1\ndata:\n  seq_len: 3\n  sources: nowhere.txt\n")
    assert refusal(capsys, "--config", "my.yaml").startswith("my.yaml:3: data.seq_len=3 must be at least 8")
    assert refusal(capsys, "--config", "my.yaml", "--data.seq_len", "4").startswith("data.seq_len=4 must be")
    found = refusal(capsys, "--config", "my.yaml", "--data.seq_len", "8")
    assert found.startswith("my.yaml:4: data.sources: no file, folder or glob match 'nowhere.txt'")
    Path("part.yaml").write_text("# rates\nmask_rate: 1.5\n")
    Path("my.yaml").write_text("masking: part.yaml\n")
    assert refusal(capsys, "--config", "my.yaml").startswith("part.yaml:2: masking.mask_rate=1.5 must be in")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "model:\n  hiden_size: 64\n",
            "my.yaml:2: unknown key model.hiden_size; did you mean model.hidden_size?",
        ),
        (
            "trainer:\n  max_steps: 20\nschedule:\n  warmup_steps: 200\n",
            "my.yaml:4: schedule.warmup_steps=200 is longer than",
        ),
        ("optimizer:\n  lr: fast\n", "my.yaml:2: optimizer.lr: expected a number, got 'fast'"),
        ("optimizer:\n  lr:\n", "my.yaml:2: optimizer.lr: expected a number, got null"),
        ("seed: 1\nseed: 2\n", "my.yaml:2: seed is given twice (first in my.yaml:1); keep one"),
        ("seed: [1\n", "my.yaml:2: not valid YAML: "),
        ("- 1\n", "my.yaml:1: expected lines of the form key: value"),
        (
            "data:\n  sources: [{path: x, colum: y}]\n",
            "my.yaml:2: data.sources: unknown key colum; did you mean",
        ),
    ],
)
def test_mistakes_in_a_file(capsys, tmp_path, text, message):
    (tmp_path / "my.yaml").write_text(text)
    assert refusal(capsys, "--config", "my.yaml").startswith(message)
    assert [path.name for path in tmp_path.iterdir()] == ["my.yaml"]


def test_required_keys_are_named(capsys):
    assert refusal(capsys, cls=EvaluateConfig).startswith("--model is missing")
    message = refusal(capsys, "--model", "x", cls=FillMaskConfig)
    assert message.startswith("--text is missing")


def test_resume_auto_starts_a_run_or_goes_on_with_it(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    first = parse("--name", "mine", "--resume", "auto", "--seed", "3")
    assert (first.resume, first.seed) == (False, 3)
    Path("runs/mine").mkdir(parents=True)
    Path("runs/mine/config.yaml").write_text(dump_config(first))
    again = parse("--name", "mine", "--resume", "auto")
    assert (again.resume, again.seed) == (True, 3)
    assert "needs a --name" in refusal(capsys, "--resume", "auto")


def test_existing_run_is_refused_unless_resumed(capsys, tmp_path):
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    (tmp_path / "runs" / "mine" / "config.yaml").write_text("seed: 1\n")
    assert "--resume" in refusal(capsys, "--name", "mine")
    assert parse("--name", "mine", "--resume").resume


@pytest.mark.parametrize("content", [None, ""])
def test_a_folder_without_a_configuration_is_no_run(capsys, content):
    folder = Path("runs/empty")
    folder.mkdir(parents=True)
    if content is not None:
        (folder / "config.yaml").write_text(content)
    told = refusal(capsys, "--resume", "--name", "empty")
    assert "runs/empty is not a run folder, because it has no config.yaml, or an empty one" in told


def test_the_recipe_that_adapts_needs_a_model(capsys):
    told = refusal(capsys, "--config", "adapt")
    assert told.endswith("adapt.yaml:4: init_required=true needs a model to adapt; give one with --init")


def test_preparing_takes_the_files_of_training(capsys):
    config = parse_config(
        PrepareConfig, ["--config", "bert-mini", "--data.seq_len", "64"], prog="mlm prepare"
    )
    assert config.data.seq_len == 64
    Path("x.yaml").write_text("model:\n  hidden_size: 64\ntokenizer:\n  vocab_size: 300\nnam: x\n")
    with pytest.raises(SystemExit):
        parse_config(PrepareConfig, ["--config", "x.yaml"], prog="mlm prepare")
    assert "x.yaml:5: unknown key nam" in capsys.readouterr().err


def test_configuration_made_plain_comes_back():
    for name in ("a.txt", "b.txt"):
        Path(name).touch()
    config = parse("--data.sources", "{path: a.txt, weight: 2},{path: b.txt, weight: 1}", "--seed", "3")
    assert from_plain(PretrainConfig, to_plain(config)) == config
    assert from_plain(PretrainConfig, config) is config
    with pytest.raises(InputError, match="optimizer: unknown key rate"):
        from_plain(PretrainConfig, {"optimizer": {"rate": 1}})
