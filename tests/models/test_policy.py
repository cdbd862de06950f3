"""Costs are those of the paper's Table 1, and the policy follows from them."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from fairseq_el.kernels import ops
from fairseq_el.kernels.formats import NO_PADDING
from fairseq_el.models.attention import ELAttention, collapse_context, expand_query
from fairseq_el.models.costs import Cost, Machine, Shape, largest_batch, measure_machine
from fairseq_el.models.policy import AttentionPolicy, PolicyState

SHAPE = Shape(batch=3, beam=4, length=50, heads=8, width=64)
GPU = Machine(flops_per_second=100e12, bytes_per_second=900e9, el_flops_per_second=100e12)
CPU = Machine(flops_per_second=140e9, bytes_per_second=26e9, el_flops_per_second=140e9)


def counted(work) -> int:
    with FlopCounterMode(display=False) as counter:
        work()
    return counter.get_total_flops()


@pytest.fixture
def attention():
    return ELAttention(64, 8, encoder_decoder_attention=True).eval()


@pytest.fixture
def states():
    return torch.randn(3, 50, 64)


@pytest.fixture
def queries():
    return torch.randn(3, 4, 64)


def test_arithmetic_of_building_keys_and_values(attention, states):
    assert counted(lambda: attention.build_key_values(states)) == SHAPE.build_key_value().flops


def test_arithmetic_of_attending_to_keys_and_values(attention, states, queries):
    key_values = attention.build_key_values(states)
    work = counted(lambda: ops.decoder_attention(queries, 8, 1.0, key_values, NO_PADDING, need_weights=True))
    assert work == SHAPE.attend_multi_head().flops


def test_arithmetic_of_el_attention(attention, states, queries):
    """Scores and sums over H, and the two projections that moved to the query side."""
    split = queries.view(3, 4, 8, 8)
    moved = counted(lambda: expand_query(split, attention.k_proj.weight))
    moved += counted(lambda: collapse_context(torch.randn(3, 32, 64), attention.v_proj.weight, 8))
    rest = counted(lambda: attention.q_proj(queries)) + counted(lambda: attention.out_proj(queries))
    assert moved + rest == SHAPE.project_el().flops
    assert rest == SHAPE.project_multi_head().flops
    whole = counted(lambda: attention.attend_to_states(queries, states, NO_PADDING, need_weights=True))
    assert whole - moved == SHAPE.attend_el().flops


def doubling(cost, field: str) -> Cost:
    """By how much a cost grows when one dimension of a large shape is doubled."""
    large = {"batch": 1, "beam": 4, "length": 2**20, "heads": 16, "width": 1024}
    one, two = cost(Shape(**large)), cost(Shape(**large | {field: 2 * large[field]}))
    return Cost(two.flops / one.flops, two.bytes / one.bytes)


@pytest.mark.parametrize(
    ("cost", "flops", "bytes_"),
    [  # exponents of n, d, h, x in the paper's Table 1; bytes in the limit of long sources
        (Shape.build_key_value, {"length": 1, "width": 2, "heads": 0, "beam": 0}, {"length": 1, "width": 1}),
        (Shape.project_multi_head, {"length": 0, "width": 2, "heads": 0, "beam": 1}, {"length": 0}),
        (Shape.project_el, {"length": 0, "width": 2, "heads": 0, "beam": 1}, {"length": 0}),
        (lambda s: s.attend_multi_head(copied=True),
         {"length": 1, "width": 1, "heads": 0, "beam": 1}, {"length": 1, "beam": 1}),
        (Shape.attend_el, {"length": 1, "width": 1, "heads": 1, "beam": 1}, {"length": 1}),
    ],
    ids=["build K and V", "project, multi-head", "project, EL", "attend, multi-head", "attend, EL"],
)  # fmt: skip
def test_growth_is_that_of_table_1(cost, flops, bytes_):
    for field, exponent in flops.items():
        assert doubling(cost, field).flops == pytest.approx(2**exponent, rel=0.01)
    for field, exponent in bytes_.items():
        assert doubling(cost, field).bytes == pytest.approx(2**exponent, rel=0.1)


def test_el_attention_reads_the_source_once_whatever_the_beam_size():
    copied = [Shape(1, x, 1024, 16, 1024).attend_multi_head(copied=True).bytes for x in (1, 8)]
    el = [Shape(1, x, 1024, 16, 1024).attend_el().bytes for x in (1, 8)]
    assert copied[1] / copied[0] == pytest.approx(8, rel=0.01)
    assert el[1] / el[0] < 2.5


BART = Shape(8, 4, 1024, 16, 1024)


def step_of_switching(machine: Machine, expected_steps: float = 0, shape: Shape = BART) -> int | None:
    policy, state = AttentionPolicy("auto"), PolicyState(expected_steps)
    for step in range(1000):
        if policy.wants_key_values(shape, lambda: machine, state):
            return step
    return None


def test_a_gpu_stays_with_el_attention_and_a_cpu_switches():
    half = Shape(8, 4, 1024, 16, 1024, element_size=2)
    assert step_of_switching(GPU, shape=half) is None
    assert 5 < step_of_switching(CPU) < 60


def test_switching_without_a_forecast_costs_at_most_twice_the_best_choice():
    rent = CPU.el_step(BART) - CPU.multi_head_step(BART)
    price = CPU.build(BART)
    switch = step_of_switching(CPU)
    for length in range(1, 200):
        paid = rent * min(length, switch + 1) + (price if length > switch else 0)
        assert paid <= 2 * min(rent * length, price) + 2 * rent


def test_a_forecast_of_a_long_output_switches_at_once_and_of_a_short_one_does_not():
    assert step_of_switching(CPU, expected_steps=100) == 0
    assert step_of_switching(CPU, expected_steps=5) > 5


def test_always_and_never_need_no_measurement():
    def unmeasured():
        raise AssertionError("the machine was measured")

    assert not AttentionPolicy("always").wants_key_values(BART, unmeasured, PolicyState())
    assert AttentionPolicy("never").wants_key_values(BART, unmeasured, PolicyState())


def test_this_machine_is_measured_once():
    machine = measure_machine(torch.device("cpu"), torch.float32)
    assert machine is measure_machine(torch.device("cpu"), torch.float32)
    assert 1e8 < machine.bytes_per_second < 1e13
    assert 1e8 < machine.flops_per_second < 1e16


@pytest.mark.parametrize("form", ["always", "never"])
def test_the_largest_batch_fits_and_one_more_does_not(form):
    budget, layers, steps = 3 * 2**30, 12, 140
    most = largest_batch(BART, layers, budget, steps, form=form)

    def needed(batch):
        shape = Shape(batch, 4, 1024, 16, 1024)
        key_values = layers * shape.kept_key_values() if form == "never" else 0
        return shape.kept_states() + key_values + 2 * layers * batch * 4 * steps * 1024 * 4

    assert needed(most) <= budget < needed(most + 1)
    assert largest_batch(BART, layers, 0, steps, form=form) == 0
