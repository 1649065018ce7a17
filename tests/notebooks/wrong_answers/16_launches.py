"""Chapter 16, exercise `16.launches`: end(durations, launch, graph) -> when the device has run all operations."""


def wrong_1(durations, launch, graph):
    """Lets the host wait for each operation, so that launches and operations add up."""
    return (launch if graph else launch * len(durations)) + sum(durations)


def wrong_2(durations, launch, graph):
    """Takes the larger of both sums, and forgets the last operation, which runs after the last launch."""
    return max(launch if graph else launch * len(durations), sum(durations))


def wrong_3(durations, launch, graph):
    """Pays for every launch of a graph, as if a graph only removed Python."""
    return solution(durations, launch, False)
