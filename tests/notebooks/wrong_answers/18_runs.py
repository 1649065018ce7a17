"""Chapter 18, exercise `18.runs`: computed(scope, call) -> the steps whose work Python starts at that call."""


def wrong_1(scope, call):
    """At a replay the whole forward computes again, as if no step found its result in the store."""
    return list(STEPS) if call == "replay" else solution(scope, call)


def wrong_2(scope, call):
    """The capture goes on behind the graph's last step, as if nobody raised a signal."""
    right = solution(scope, call)
    return STEPS[STEPS.index(right[0]) :] if call == "capture" else right


def wrong_3(scope, call):
    """The signal comes ahead of the last captured step, so that neither the graph nor a capture has its work."""
    return solution(scope, call)[:-1] if call == "capture" else solution(scope, call)
