"""The faults that `labkit.check.hunt` plants, one module per chapter. Whoever reads them spoils their own hunt."""
