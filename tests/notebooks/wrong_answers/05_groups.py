"""Chapter 05, exercise `05.groups`: best_group(layers, input_bytes, layer_bytes) -> layers in a recomputed group."""

import math


def _divisors(layers):
    return [n for n in range(1, layers + 1) if layers % n == 0]


def wrong_1(layers, input_bytes, layer_bytes):
    """Looks at the layers that run again at once alone: one is least, but every layer's input is kept."""
    return 1


def wrong_2(layers, input_bytes, layer_bytes):
    """Looks at the inputs alone: one group keeps one, but then all layers run again at once."""
    return layers


def wrong_3(layers, input_bytes, layer_bytes):
    """Takes Chen's root of the number of layers, which is right where a layer keeps no more than its input."""
    return min(_divisors(layers), key=lambda n: abs(n - math.sqrt(layers)))
