"""Chapter 06, exercise `06.seeds`: seed(place, tp_rank, pp_rank, sequence_parallel) -> the seed of dropout there."""


def wrong_1(place, tp_rank, pp_rank, sequence_parallel):
    """Gives each rank its own state everywhere: without sequence parallelism the ranks' hidden states part."""
    return 1234 + 100 * pp_rank + tp_rank


def wrong_2(place, tp_rank, pp_rank, sequence_parallel):
    """Forgets that sequence parallelism changes what a rank holds between the regions: other positions, one mask."""
    return solution(place, tp_rank, pp_rank, False)


def wrong_3(place, tp_rank, pp_rank, sequence_parallel):
    """Adds the two ranks up, so that neighbours in both share a seed."""
    return 1234 + pp_rank if place == "between" and not sequence_parallel else 5000 + pp_rank + tp_rank
