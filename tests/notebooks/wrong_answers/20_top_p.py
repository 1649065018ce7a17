"""Chapter 20, exercise `20.top_p`: kept(probabilities, p) -> ids of the fewest most likely tokens that add up to p."""


def wrong_1(probabilities, p):
    """Stops before the token that crosses p; a first token more likely than p would leave nothing at all."""
    found, total = [], 0.0
    for each in _most_likely_first(probabilities):
        total += probabilities[each]
        if total > p:
            break
        found.append(each)
    return found


def wrong_2(probabilities, p):
    """Holds p against each single probability, where it bounds their sum."""
    return [each for each, probability in enumerate(probabilities) if probability >= p]


def wrong_3(probabilities, p):
    """Adds up in the order of ids, and so keeps whatever the tokenizer happened to number first."""
    found, total = [], 0.0
    for each, probability in enumerate(probabilities):
        if total >= p:
            break
        found.append(each)
        total += probability
    return found
