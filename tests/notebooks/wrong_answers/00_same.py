"""Exercise `00.same`: first_apart(losses, reference, tolerance) -> the first step that differs by more, or None."""


def wrong_1(losses, reference, tolerance):
    """Compares final losses alone, as tables in papers do; runs can part and come together again."""
    last = len(losses) - 1
    return last if abs(losses[last] - reference[last]) > tolerance * reference[last] else None


def wrong_2(losses, reference, tolerance):
    """Takes the tolerance for a difference in nats instead of a share of the loss."""
    return next((step for step, (a, b) in enumerate(zip(losses, reference)) if abs(a - b) > tolerance), None)


def wrong_3(losses, reference, tolerance):
    """Looks for the largest difference, which is an effect; the first one is nearer to the cause."""
    gaps = [abs(a - b) / b for a, b in zip(losses, reference)]
    return gaps.index(max(gaps)) if max(gaps) > tolerance else None
