"""Imported once by the fork server: what every rank needs. It makes no tensor, so no thread and no GPU is touched."""

import gc

import cloudpickle  # noqa: F401
import numpy  # noqa: F401

import labkit.events
import labkit.launch.worker  # noqa: F401

gc.collect()
gc.freeze()  # a collection in a rank then does not write into the pages that all ranks share
