"""Imported once by the fork server: what every rank needs. It makes no tensor, so no thread and no GPU is touched."""
# ruff: noqa: F401  (imported for the ranks that are forked from here)

import gc

import cloudpickle
import numpy
import torch
import torch.distributed

import labkit.events
import labkit.launch.worker

if not torch.backends.cuda.is_built():  # untried with drivers of GPUs, which must not be touched before a fork
    import torch._dynamo  # torch.optim imports it at first use, which took 0.9 s of processor time in every rank

gc.collect()
gc.freeze()  # a collection in a rank then does not write into the pages that all ranks share
