"""Exercises on the layers of a rank: f and g, the vocabulary, memory, the sequence."""
