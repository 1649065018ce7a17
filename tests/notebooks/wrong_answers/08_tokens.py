"""Chapter 08, exercise `08.tokens`: mean_gradient(gradients, tokens) -> the gradient of the mean over all tokens."""


def _weighted(gradients, weights, divisor):
    return [sum(weight * g for weight, g in zip(weights, column)) / divisor for column in zip(*gradients)]


def wrong_1(gradients, tokens):
    """Takes the mean of the ranks' means, so that a token among few counts more than a token among many."""
    return _weighted(gradients, [1] * len(tokens), len(tokens))


def wrong_2(gradients, tokens):
    """Adds up sums over tokens, but divides by the number of replicas, as if the sums were means."""
    return _weighted(gradients, tokens, len(tokens))


def wrong_3(gradients, tokens):
    """Divides by all tokens what was divided by each rank's tokens already."""
    return _weighted(gradients, [1] * len(tokens), sum(tokens))
