"""Chapter 18, exercise `18.hooks`: hooks(modules, scope) -> the modules whose hook is called ahead of a replay."""


def wrong_1(modules, scope):
    """Every module with parameters, the experts too, although Python calls these and their own hooks run."""
    return [name for name, own in modules.items() if own]


def wrong_2(modules, scope):
    """Only the parts that the scope names, although their parameters belong to the modules inside."""
    parts = [part for word in scope for part in PARTS[word]]
    return [name for name in modules if name in parts]


def wrong_3(modules, scope):
    """Every module inside a captured part, also those that own no parameter to wait for."""
    parts = [part for word in scope for part in PARTS[word]]
    return [name for name in modules if any(f"{name}.".startswith(f"{part}.") for part in parts)]
