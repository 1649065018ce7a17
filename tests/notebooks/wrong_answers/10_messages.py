"""Chapter 10, exercise `10.messages`: program(pp, rank, microbatches) -> a row of 1F1B with its messages."""


def wrong_1(pp, rank, microbatches):
    """Sends and receives one by one, as if a send did not wait for its receive."""
    return one_by_one(pp, rank, microbatches)


def wrong_2(pp, rank, microbatches):
    """Forgets that the pipeline has ends: the first rank receives no activation, the last sends none."""
    middle = solution(pp + 2, rank + 1, microbatches)
    actions = iter(step for step in solution(pp, rank, microbatches) if step[0] in "FB")
    return [next(actions) if step[0] in "FB" else step for step in middle]


def wrong_3(pp, rank, microbatches):
    """Believes that the gradient of a microbatch comes back at once, so it is awaited beside the activation."""
    steps = []
    for step in one_by_one(pp, rank, microbatches):
        if step.startswith("send F"):
            step += step.replace("send F", " + recv B")
        if not step.startswith("recv B"):
            steps.append(step)
    return steps
