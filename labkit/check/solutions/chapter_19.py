"""Solutions of chapter 19, BERT, T5 and where LayerNorm goes."""

from labkit.check.solution_source import solves


@solves("19.words")
def own_words(tokens):
    """A piece with ## joins the word before it; special tokens are no words."""
    found = []
    for place, token in enumerate(tokens):
        if token.startswith("##") and found:
            found[-1].append(place)
        elif token not in ("[CLS]", "[SEP]"):
            found.append([place])
    return found


@solves("19.norms")
def stack(x, halves, norms, placement):
    """In pre the norms are on the branches, and one comes after all; in post on the stream."""
    x = norms[0](x) if placement == "post" else x
    for half, before, behind in zip(halves, norms, norms[1:]):
        x = behind(x + half(x)) if placement == "post" else x + half(before(x))
    return x if placement == "post" else norms[-1](x)


@solves("19.copies")
def copies(tp, pp, dp, split):
    """Both halves read words and positions; the last stage scores words."""
    rows = range(dp * tp)
    words = [[stage * dp * tp + row for stage in sorted({0, split, pp - 1})] for row in rows]
    return words, [[row, split * dp * tp + row] for row in rows]
