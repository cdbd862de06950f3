"""The simulated device refuses what CUDA refuses, computes what a CPU computes, and counts right."""

import copy

import pytest
import torch
import torch.nn.functional as F

from simulated import SimulatedDevice, SimulatedTensor, on_host
from simulated.shapes import ShapesOnlyDevice


@pytest.fixture
def device():
    with SimulatedDevice() as simulated:
        yield simulated


def counts(device) -> tuple[int, int, int]:
    return device.launches, device.reads, device.uploads


def test_tensors_say_they_are_on_cuda_and_hold_the_numbers(device):
    numbers = torch.arange(6.0).view(2, 3)
    for moved in (numbers.cuda(), numbers.to("cuda"), numbers.to("cuda:0"), numbers.to(torch.device("cuda"))):
        assert moved.device == torch.device("cuda:0") and moved.is_cuda and not moved.is_meta
        assert moved.shape == (2, 3) and torch.equal(moved.cpu(), numbers)
    assert torch.zeros(2, device="cuda").is_cuda and moved.new_zeros(2).is_cuda
    assert torch.tensor([1, 2], device="cuda").is_cuda and torch.arange(3, device=moved.device).is_cuda
    assert torch.ones(2).type_as(moved).is_cuda and torch.cuda.is_available()
    assert not torch.empty(2, device="meta").is_cuda


def test_results_and_views_are_those_of_a_cpu(device):
    x, weight = torch.randn(4, 8), torch.randn(3, 8)
    expected = F.linear(x, weight).softmax(-1)
    ours = F.linear(x.cuda(), weight.cuda()).softmax(-1)
    torch.testing.assert_close(ours.cpu(), expected)
    written = x.cuda()
    written.view(2, 2, 8)[1, :, 2:4] = 7.0
    assert torch.equal(written.cpu()[2:, 2:4], torch.full((2, 2), 7.0)) and torch.equal(x, x.cuda().cpu())


def test_modules_move_with_shared_parameters_and_half_precision(device):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    model[1].weight = model[0].weight
    names = set(model.state_dict())
    model.cuda().half()
    assert isinstance(model[0].weight, torch.nn.Parameter) and model[0].weight is model[1].weight
    assert set(model.state_dict()) == names
    assert model(torch.ones(1, 4, device="cuda", dtype=torch.half)).dtype == torch.half
    copied = copy.deepcopy(model)
    assert copied[0].weight.is_cuda and copied[0].weight.data_on_host is not model[0].weight.data_on_host
    model.cpu()
    assert not model[0].weight.is_cuda


@pytest.mark.parametrize(
    "mistake",
    [
        lambda x, host: x + host,
        lambda x, host: torch.cat([x, host]),
        lambda x, host: F.linear(x, host),
        lambda x, host: x.masked_fill(host > 0, 0.0),
        lambda x, host: host[x > 0],
        lambda x, host: torch.masked_select(x, host > 0),
        lambda x, host: F.scaled_dot_product_attention(x[None], host[None], x[None]),
        lambda x, host: x.numpy(),
        lambda x, host: x.data_ptr(),
        lambda x, host: torch.ops.mkldnn._linear_pointwise(x, x, None, "none", [], ""),
    ],
    ids=["add", "cat", "linear", "masked_fill", "index", "masked_select", "attention", "numpy", "data_ptr", "oneDNN"],
)
def test_what_cuda_refuses_raises(device, mistake):
    host = torch.ones(4, 4)
    with pytest.raises((RuntimeError, TypeError)):
        mistake(host.cuda(), host)


def test_what_cuda_allows_does_not_raise(device):
    x = torch.arange(4.0).cuda()
    assert on_host(x + torch.tensor(1.0)).tolist() == [1, 2, 3, 4]
    assert on_host(x[torch.tensor([2, 0])]).tolist() == on_host(x[[2, 0]]).tolist() == [2, 0]
    x[torch.tensor([True, False, False, True])] = torch.tensor(9.0)
    assert on_host(x).tolist() == [9, 1, 2, 9]


def test_a_known_function_gives_known_counts(device):
    x, weight, bias = torch.randn(2, 8).cuda(), torch.randn(16, 8).cuda(), torch.randn(16).cuda()
    device.reset()
    y = F.linear(x, weight, bias)  # one launch; the transposed weight is a view
    top = y.relu().max().item()  # two launches and a read
    assert counts(device) == (3, 1, 0) and isinstance(top, float)
    assert device.flops == 2 * 2 * 8 * 16
    linear, relu, largest = 4 * (2 * 8 + 16 * 8 + 16 + 2 * 16), 4 * 2 * 32, 4 * (32 + 1)
    assert device.bytes == linear + relu + largest


@pytest.mark.parametrize(
    "call, expected",
    [
        (lambda x: x[0], (0, 0, 0)),
        (lambda x: x.transpose(0, 1).reshape(16), (1, 0, 0)),
        (lambda x: bool((x > 0).any()), (2, 1, 0)),
        (lambda x: x.tolist(), (0, 1, 0)),
        (lambda x: x[x > 0], (2, 1, 0)),
        (lambda x: x.__setitem__(x > 0, 0.0), (2, 0, 0)),  # ATen makes it masked_fill
        (lambda x: x.__setitem__(x > 0, torch.tensor(0.0).to(x)), (2, 1, 1)),
        (lambda x: x.__setitem__((slice(None), 1), 0.0), (1, 0, 0)),
        (lambda x: x[[0, 1]], (1, 0, 1)),
        (lambda x: torch.empty(0).to(x), (0, 0, 0)),
        (lambda x: x.half(), (1, 0, 0)),
        (lambda x: x.logsumexp(-1), (9, 0, 0)),
        (lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None]), (1, 0, 0)),
        (lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None], (x > 0)[None]), (4, 0, 0)),
    ],
)
def test_launches_reads_and_uploads(device, call, expected):
    x = torch.randn(4, 4).cuda()
    device.reset()
    call(x)
    assert counts(device) == expected


def test_expanded_and_indexed_tensors_move_only_what_is_read(device):
    table, rows = torch.randn(1000, 8).cuda(), torch.tensor([3, 5]).cuda()
    device.reset()
    F.embedding(rows, table)
    assert device.bytes == 2 * (2 * 8 * 4) + 2 * 8
    device.reset()
    table[:1].expand(50, 8) + 1
    assert device.bytes == 4 * 8 + 4 * 50 * 8


def test_counts_name_the_line_they_come_from(device):
    torch.ones(3, device="cuda").sum().item()
    (line,) = device.where("read")
    assert line.startswith("cuda/test_simulated_device.py:")
    from fairseq.utils import strip_pad

    strip_pad(torch.tensor([5, 1]).cuda(), 1)
    assert any(line.startswith("fairseq/utils.py:") for line in device.where("read"))


def test_random_numbers_are_those_of_a_cpu(device):
    weights = torch.rand(3, 10)
    expected = torch.multinomial(weights, 4, generator=torch.Generator().manual_seed(3))
    torch.manual_seed(3)
    assert torch.equal(torch.multinomial(weights.cuda(), 4).cpu(), expected)


def test_half_precision_softmax_computes_in_single(device):
    x = torch.randn(3, 50).half()
    torch.testing.assert_close(F.softmax(x.cuda(), -1, dtype=torch.float32).cpu(), x.float().softmax(-1))


def test_shapes_alone_give_the_same_counts():
    def work(x):
        y = F.linear(x, x).softmax(-1)
        assert bool((y > 0).all()) and not bool((y < 0).any())
        return y[:2].cpu()

    found = []
    for kind in (SimulatedDevice, ShapesOnlyDevice):
        with kind() as device:
            x, lengths = torch.rand(6, 6).cuda(), torch.tensor([3, 5]).cuda()
            device.reset()
            assert work(x).shape == (2, 6) and int(lengths.max()) == 5
            found.append((*counts(device), device.flops, device.bytes, device.peak))
    assert found[0] == found[1]


def test_memory_is_counted_once_a_storage_and_freed(device):
    assert device.allocated == 0
    x = torch.zeros(10, 10, device="cuda")
    view = x.view(100)[:50]
    assert device.allocated == 400
    del x
    assert device.allocated == 400
    del view
    assert (device.allocated, device.peak) == (0, 400)


def test_tensors_are_of_no_use_outside():
    with SimulatedDevice():
        x = torch.ones(2, device="cuda")
    assert isinstance(x, SimulatedTensor) and not torch.cuda.is_available()
    with pytest.raises(RuntimeError, match="outside"):
        x + x
