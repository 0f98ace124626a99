"""What a worker says of its own speed."""

import pytest

from halfmoon.schemas.measurements import DecodeSample, PrefillSample
from halfmoon.worker.meters import MAX_SAMPLES, DecodeMeter, PrefillMeter


def test_a_prompt_is_not_charged_for_those_before_it() -> None:
    meter = PrefillMeter()
    meter.computed(0.0, 2.0, num_tokens=200, num_computed=200)
    meter.computed(0.5, 3.0, num_tokens=150, num_computed=100)
    meter.computed(10.0, 10.5, num_tokens=50, num_computed=50)
    assert meter.take() == (
        PrefillSample(num_tokens=200, num_reused=0, duration_s=2.0),
        PrefillSample(num_tokens=150, num_reused=50, duration_s=1.0),
        PrefillSample(num_tokens=50, num_reused=0, duration_s=0.5),
    )
    assert meter.take() == ()


def test_what_computed_nothing_is_no_sample_and_there_are_never_too_many() -> None:
    meter = PrefillMeter()
    meter.computed(0.0, 1.0, num_tokens=10, num_computed=0)
    assert meter.take() == ()
    for at in range(100):
        meter.computed(1.0 + at, 2.0 + at, num_tokens=10, num_computed=10)
    assert len(meter.take()) == MAX_SAMPLES


def test_gaps_tell_how_many_were_decoded_together() -> None:
    meter = DecodeMeter(0.0)
    assert meter.take(1.0, 0) == ()
    for _ in range(4 * 25):
        meter.gap(0.04)
    (sample,) = meter.take(2.0, 900)
    assert sample == DecodeSample(batch=4, context_tokens=900, step_s=sample.step_s)
    assert sample.step_s == pytest.approx(0.04)
    assert meter.take(3.0, 900) == ()
