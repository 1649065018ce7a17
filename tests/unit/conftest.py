"""Ranks of the few unit tests that launch some start with torch's compiler imported, which every optimizer imports."""

from labkit.launch import preload

preload("torch._dynamo")
