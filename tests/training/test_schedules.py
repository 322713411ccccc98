"""Learning rates: golden values and their first and last steps."""

from __future__ import annotations

import pytest

from mesh_mpi import config_schema as schema
from mesh_mpi.optimize import make_schedule
from mesh_mpi.optimize.schedules import linear_decay, linear_warmup, noam, slanted_triangular, truncated_rsqrt, warmup_rsqrt_decay


@pytest.mark.parametrize(("step", "rate"), [(0, 0.01), (10_000, 0.01), (40_000, 0.005), (95_000, 0.00162221), (99_999, 3.16229e-7)])
def test_noam(step, rate):
    assert noam(step, 1.0, 100_000) == pytest.approx(rate, rel=3e-6)


@pytest.mark.parametrize(("step", "rate"), [(0, 0.0003125), (500, 0.00515625), (1000, 0.01), (5000, 0.00569444), (10_000, 0.0003125)])
def test_slanted_triangular(step, rate):
    assert slanted_triangular(step, 0.01, 10_000) == pytest.approx(rate, rel=1e-6)


@pytest.mark.parametrize(("step", "rate"), [(0, 0.001), (50, 0.0005), (100, 0.0), (101, 0.0)])
def test_linear_decay(step, rate):
    assert linear_decay(step, 0.001, 100) == pytest.approx(rate, rel=1e-12, abs=0)


def test_linear_warmup_rises_to_the_full_rate_and_stays():
    assert linear_warmup(1000) == pytest.approx(0.1) and linear_warmup(10_000) == linear_warmup(1e9) == 1.0


def test_truncated_rsqrt_is_constant_and_then_falls():
    assert truncated_rsqrt(1) == truncated_rsqrt(10_000) == pytest.approx(0.01) and truncated_rsqrt(40_000) == pytest.approx(0.005)


def test_the_schedule_of_the_paper_is_a_product_of_three():
    f = make_schedule(schema.WarmupRsqrtDecay(decay_steps=13_600), 136_000)
    assert f(1) == pytest.approx(1e-4 * 0.01)
    assert f(10_000) == pytest.approx(0.01)
    assert f(40_000) == pytest.approx(0.005)
    assert f(136_000 - 6_800) == pytest.approx(0.5 * (136_000 - 6_800) ** -0.5)
    assert f(136_000) == 0.0
    assert warmup_rsqrt_decay(5000, 2.0, 1) == pytest.approx(0.01)


@pytest.mark.parametrize("section", [schema.Constant(), schema.LinearWarmup(), schema.Noam(), schema.TruncatedRsqrt(), schema.LinearDecay(),
                                     schema.SlantedTriangular(), schema.WarmupRsqrtDecay()], ids=lambda s: s.name)
def test_every_schedule_of_the_configuration_is_made_and_positive_at_the_first_step(section):
    assert make_schedule(section, 1000)(1) > 0
