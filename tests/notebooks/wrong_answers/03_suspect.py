"""Chapter 03, exercise `03.suspect`: suspect(name) -> the all-reduce that was left out, by the first difference."""


def wrong_1(name):
    """Blames f for everything, although f does nothing forward."""
    place, _kind = name.split()
    return place.removesuffix(".norm.bias"), "f"


def wrong_2(name):
    """Takes the norm for a part of its own, and names it instead of the sub-layer that follows."""
    place, kind = name.split()
    return place.removesuffix(".bias"), "g" if kind == "output" else "f"


def wrong_3(name):
    """Thinks of forward: the norm follows the sub-layer before it, so its gradient is wrong because of that one."""
    place, kind = name.split()
    if kind == "output":
        return place, "g"
    _, layer, part, *_ = place.split(".")
    return (f"layers.{layer}.attention" if part == "mlp" else f"layers.{int(layer) - 1}.mlp"), "f"
