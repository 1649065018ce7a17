"""Chapter 09, exercise `09.bytes`: kept_bytes(weight, d, stage) -> the bytes of a parameter on a rank."""


def wrong_1(weight, d, stage):
    """Divides everything by d from stage 1 on, as only stage 3 does."""
    return solution(weight, d, 0) / (d if stage else 1)


def wrong_2(weight, d, stage):
    """Gives weights of 4 and 8 bytes a master, too, though Adam can update these weights themselves."""
    extra = 4 if weight >= 4 else 0
    return solution(weight, d, stage) + extra / (d if stage >= 1 else 1)


def wrong_3(weight, d, stage):
    """Forgets that Adam keeps two running means, of the gradient and of its square."""
    return solution(weight, d, stage) - max(4, weight) / (d if stage >= 1 else 1)
