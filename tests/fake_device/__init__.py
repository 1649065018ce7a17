"""A CUDA device that computes nothing, for labkit's own tests: streams, captures and memory without a GPU.

`guard.cpp` makes torch's CPU wheel believe in cuda:0 (`library.py` builds it), and FakeTensorMode gives every tensor a
shape and no numbers. labkit's code runs as on a GPU, with the real autograd engine. What it does in which order is then
known: `clocks.py` finds accesses that race, and memory that is freed while another stream uses it; `audit.py` counts
waits of the host and copies from pageable memory, and looks at the operands of GEMMs. `streams.py` stands in for
`torch.cuda` and its captures, `fake_groups.py` for NCCL.

No numbers are computed here; other tests check that results are right. tests/unit/test_fake_device.py runs `cases.py`
(steps of training) and `plants.py` (mistakes that must be found).

To add
- a case: a line in `cases.CASES` with what differs from `SMALL`, which is a gpt in bf16. `waits` is exact, `copies` is
  an upper bound. Waits, copies and GEMMs are counted in the last step only; races are looked for in all steps.
- a plant: a function in `plants.py` with the mistake and without it, under a name in both tables of its kind.
- a rule: what an operation does with its tensors belongs in `operations.py`, what the host then does in `Audit._look`,
  what `torch.cuda` does in `streams.py`. Each rule needs a plant. A new kind of finding needs a table in
  `plants.KINDS`, and in the test file an entry of `PLANTS` that says what must hold for it.

Known limits
- An access is a range of bytes, so two streams on the left and right columns of one matrix look like a race.
- All threads of the host are one place, so races between threads of the host are not found.
- Events that are recorded inside a capture and waited for outside, or the reverse, are not checked.
- An input that is freed while a replay on another stream reads it is not found.
- Graphs of one pool may share memory. Two that are replayed at once race here only if they share a tensor.
- Operations that wait inside ATen are not known: `x[mask] = y` waits on a GPU and not here. `x[mask]` and `nonzero`,
  whose shapes depend on numbers, raise an error.
"""
