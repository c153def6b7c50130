import os
from dataclasses import replace

import pytest

from mlm.config.errors import InputError
from mlm.startup.command import RUN_NAME
from mlm.training.run_folder import keep_config, run_folder


def test_a_folder_is_made_with_its_configuration_and_stays(tiny):
    config = tiny()
    with run_folder(config) as folder:
        assert (folder / "config.yaml").exists()
        (folder / "metrics.csv").touch()
    assert folder.exists()


def test_what_fails_before_training_leaves_nothing(tiny, tmp_path):
    with pytest.raises(InputError, match="no text"), run_folder(tiny()):
        raise InputError("no text")
    assert not (tmp_path / "runs").exists()


def test_what_fails_after_the_first_step_keeps_everything(tiny):
    def fail(folder):
        (folder / "metrics.csv").touch()
        raise InputError("not finite")

    with pytest.raises(InputError, match="not finite"), run_folder(tiny()) as folder:
        fail(folder)
    assert (folder / "config.yaml").exists()


def test_a_name_belongs_to_one_run(tiny):
    with run_folder(tiny()), pytest.raises(InputError, match="exists"), run_folder(tiny()):
        pass


def test_runs_that_were_named_in_the_same_second_get_different_folders(tiny):
    name = "default-20200101-120000"
    with run_folder(tiny(name=name)) as first, run_folder(tiny(name=name)) as second:
        assert (first.name, second.name) == (name, f"{name}-2")
        assert RUN_NAME not in os.environ  # a second run of this process is named anew


def test_one_process_at_a_time_goes_on_with_a_run(tiny):
    config = tiny(resume=True)
    with run_folder(config), pytest.raises(InputError, match="another process"), run_folder(config):
        pass


def test_a_refused_resume_changes_nothing(tiny):
    with run_folder(tiny()) as folder:
        (folder / "metrics.csv").touch()
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(InputError), run_folder(replace(tiny(), resume=True, seed=3)):
        raise InputError("cannot resume")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_a_changed_configuration_keeps_the_earlier_one(tiny, caplog):
    config = tiny()
    with run_folder(config) as folder:
        first = (folder / "config.yaml").read_text()
        with caplog.at_level("INFO"):
            keep_config(replace(config, seed=7), folder)
        assert (folder / "config-1.yaml").read_text() == first
        assert "seed: 7" in (folder / "config.yaml").read_text()
        assert "config-1.yaml: seed: 0 -> 7\n" in caplog.text


def test_what_a_killed_process_left_is_removed(tiny):
    config = tiny(resume=True)
    with run_folder(config) as folder:
        pass
    (folder / ".config.new.yaml.123").touch()
    with run_folder(config):
        assert {path.name for path in folder.iterdir()} == {"config.yaml", ".lock"}
