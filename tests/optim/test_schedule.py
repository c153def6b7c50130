import math

import pytest

from mlm.config.errors import InputError
from mlm.config.training import ScheduleConfig
from mlm.optim import learning_rate_factor


def curve(total=40, **options):
    config = ScheduleConfig(**options)
    return [learning_rate_factor(config, step, total) for step in range(total)]


@pytest.mark.parametrize("name", ["linear", "cosine", "wsd", "constant"])
def test_warmup_rises_to_the_peak_at_its_last_step(name):
    factors = curve(name=name, warmup_steps=10, decay_fraction=0.2)
    assert factors[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert max(factors) == factors[9] == 1.0
    assert min(factors) > 0


def test_closed_forms():
    after = range(10, 40)
    assert curve(name="linear", warmup_steps=10)[10:] == pytest.approx([(40 - s) / 30 for s in after])
    assert curve(name="cosine", warmup_steps=10)[10:] == pytest.approx(
        [(1 + math.cos(math.pi * (s - 10) / 30)) / 2 for s in after]
    )
    assert curve(name="constant", warmup_steps=10)[10:] == [1.0] * 30
    wsd = curve(name="wsd", warmup_steps=10, decay_fraction=0.25)
    assert wsd[10:30] == [1.0] * 20
    assert wsd[30:] == pytest.approx([1 - math.sqrt((s - 30) / 10) for s in range(30, 40)])


def test_fraction_of_the_run_and_no_warmup():
    assert curve(100, name="constant", warmup_fraction=0.06)[4:7] == pytest.approx([5 / 6, 1.0, 1.0])
    assert curve(name="linear", warmup_steps=0)[0] == 1.0
    assert curve(1, name="wsd") == [1.0]


def test_wsd_decay_never_cuts_into_the_warmup():
    factors = curve(10, name="wsd", warmup_steps=6, decay_fraction=1.0)
    assert factors[:6] == pytest.approx([(step + 1) / 6 for step in range(6)])
    assert factors[6] == 1.0
    assert factors[6:] == sorted(factors[6:], reverse=True)


def test_decay_starts_at_the_peak_and_has_no_warmup():
    factors = curve(name="decay", warmup_fraction=0.5)
    assert factors == pytest.approx([1 - math.sqrt(step / 40) for step in range(40)])
    assert factors[0] == 1.0
    assert factors[-1] > 0
    with pytest.raises(InputError, match=r"schedule\.warmup_steps=3 does not go with schedule\.name=decay"):
        ScheduleConfig(name="decay", warmup_steps=3)
