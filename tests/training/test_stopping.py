"""Signals around a run: who has the handlers when."""

import os
import signal
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop

from mlm.training.machine import SIGNALS, GracefulStop
from mlm.training.pretraining import prepare, train
from mlm.training.run_folder import run_folder


@pytest.fixture(autouse=True)
def own_handlers():
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def handlers():
    return [signal.getsignal(number) for number in SIGNALS]


def test_what_was_there_before_lightning_comes_back():
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    stop = GracefulStop()
    signal.signal(signal.SIGTERM, lambda number, frame: None)  # as Lightning does when training begins
    stop._install()
    assert signal.SIG_DFL not in handlers()
    stop.restore()
    assert handlers() == [signal.SIG_DFL] * 3


@pytest.mark.parametrize("number", SIGNALS)
def test_signals_are_noted_while_something_is_brought_to_its_end(number):
    stop, before = GracefulStop(), handlers()
    with stop.noting():
        os.kill(os.getpid(), number)
    assert stop.signal == number
    assert handlers() == before


def test_handlers_come_back_after_an_error_before_the_first_step(tiny):
    config, before, during = tiny(), handlers(), []

    def fail(model, inputs):
        during.append(handlers())
        raise ZeroDivisionError

    corpus, model = prepare(config)
    model.register_forward_pre_hook(fail)  # the first pass is one of validation
    with run_folder(config) as folder, pytest.raises(ZeroDivisionError):
        train(config, folder, corpus, model)
    assert during[0] != before
    assert handlers() == before


def test_what_is_switched_off_is_there_in_lightning():
    assert callable(_TrainingEpochLoop._broadcast_sigterm_tensor)


def test_with_several_ranks_a_run_ends_on_what_all_agreed_on_only():
    stop = GracefulStop()
    stop._alone = False
    with stop.noting():
        os.kill(os.getpid(), signal.SIGTERM)
    assert stop.signal is None
    stop._largest = lambda number, is_last: int(number)
    trainer = SimpleNamespace(should_stop=False)
    stop.on_step_end(trainer, SimpleNamespace(device=torch.device("cpu")))
    assert stop.signal == signal.SIGTERM
    assert trainer.should_stop
