"""Chapter 19, exercise `19.words`: own_words(tokens) -> the positions of each word of a sample."""


def wrong_1(tokens):
    """Takes each piece as a word, as the first BERT did; a masked piece is then guessed from its neighbour."""
    return [[position] for position, token in enumerate(tokens) if token not in ("[CLS]", "[SEP]")]


def wrong_2(tokens):
    """Forgets that [CLS] and [SEP] stand in the sample, too, and takes them as words."""
    found = []
    for position, token in enumerate(tokens):
        if token.startswith("##") and found:
            found[-1].append(position)
        else:
            found.append([position])
    return found


def wrong_3(tokens):
    """Drops the special tokens first, so that all positions behind them are too small."""
    return solution([token for token in tokens if token not in ("[CLS]", "[SEP]")])
