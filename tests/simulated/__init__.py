"""A simulated CUDA device for machines without one.

Its tensors say that they are on `cuda:0` and hold their numbers in host memory. Inside `with SimulatedDevice()`

- `model.cuda()`, `x.to("cuda")`, `torch.zeros(3, device="cuda")` and the like work as on a machine with a GPU;
- mixing devices raises, as do other uses that real CUDA refuses: `numpy()`, `data_ptr()` handed to a CPU kernel,
  operations that only CPUs have;
- kernel launches, host reads (where the host waits for the device), uploads (copies from the host), bytes and FLOPs
  are counted, with the line of fairseq or fairseq_el that each of them comes from.

One operation of ATen counts as one launch, which is what most are on CUDA. Those known to be several, and that we
rather than stock fairseq use, count as several, so a comparison errs to our disadvantage.
"""

from simulated.device import SimulatedDevice
from simulated.tensor import SimulatedTensor, on_host

__all__ = ["SimulatedDevice", "SimulatedTensor", "on_host"]
