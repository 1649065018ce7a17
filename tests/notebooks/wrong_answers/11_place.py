"""Chapter 11, exercise `11.place`: place(layer, layers, pp, vpp) -> (rank, chunk) of a layer."""


def wrong_1(layer, layers, pp, vpp):
    """Gives each rank neighbouring stages, as if a rank's chunks followed each other: then nothing is interleaved."""
    stage = layer // (layers // (pp * vpp))
    return stage // vpp, stage % vpp


def wrong_2(layer, layers, pp, vpp):
    """Deals out single layers: then every layer would be a message."""
    return layer % pp, layer // pp


def wrong_3(layer, layers, pp, vpp):
    """Goes back from the last rank to the first in every other chunk, as a V schedule does."""
    stage = layer // (layers // (pp * vpp))
    rank, chunk = stage % pp, stage // pp
    return (pp - 1 - rank if chunk % 2 else rank), chunk
