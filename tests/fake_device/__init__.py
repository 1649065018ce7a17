"""A CUDA device that computes nothing, for labkit's own tests: streams, captures and memory without a GPU.

`guard.cpp` makes torch's CPU wheel believe in cuda:0 (`library.py` builds it), and FakeTensorMode gives every tensor a
shape and no numbers. labkit's code runs as on a GPU, with the real autograd engine. What it does in which order is then
known: `clocks.py` finds accesses that race, and memory that is freed while another stream uses it; `audit.py` counts
waits of the host and copies from pageable memory, and looks at the operands of GEMMs. `streams.py` stands in for
`torch.cuda` and its captures, `fake_groups.py` for NCCL.

Nothing here knows a number: that results are right, other tests say.
tests/unit/test_fake_device.py runs `cases.py` (steps of training) and `plants.py` (mistakes that must be found).
"""
