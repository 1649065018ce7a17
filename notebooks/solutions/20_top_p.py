"""Chapter 20, exercise `20.top_p`: kept(probabilities, p) -> ids of the fewest most likely tokens that add up to p."""


def _most_likely_first(probabilities: list[float]) -> list[int]:
    return sorted(range(len(probabilities)), key=lambda each: -probabilities[each])


def solution(probabilities: list[float], p: float) -> list[int]:
    """A token stays if those before it add up to less than p; so the one that crosses p stays."""
    found, total = [], 0.0
    for each in _most_likely_first(probabilities):
        if total >= p:
            break
        found.append(each)
        total += probabilities[each]
    return found


def wrong_1(probabilities: list[float], p: float) -> list[int]:
    """Stops before the token that crosses p; a first token more likely than p would leave nothing at all."""
    found, total = [], 0.0
    for each in _most_likely_first(probabilities):
        total += probabilities[each]
        if total > p:
            break
        found.append(each)
    return found


def wrong_2(probabilities: list[float], p: float) -> list[int]:
    """Holds p against each single probability, where it bounds their sum."""
    return [each for each, probability in enumerate(probabilities) if probability >= p]


def wrong_3(probabilities: list[float], p: float) -> list[int]:
    """Adds up in the order of ids, and so keeps whatever the tokenizer happened to number first."""
    found, total = [], 0.0
    for each, probability in enumerate(probabilities):
        if total >= p:
            break
        found.append(each)
        total += probability
    return found
