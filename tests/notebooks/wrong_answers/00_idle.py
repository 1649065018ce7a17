"""Exercise `00.idle`: idle_share(rows) -> the share of the step in which stages are idle."""


def wrong_1(rows):
    """Returns the share in which stages work."""
    return 1 - solution(rows)


def wrong_2(rows):
    """Trusts the formula of equal stages, whatever the rows say."""
    stages, count = len(rows), len(rows[0]) // 2
    return (stages - 1) / (count + stages - 1)


def wrong_3(rows):
    """Counts the idle time between a stage's own first and last action only, so that a late start costs nothing."""
    busy = sum(end - start for row in rows for start, end in row)
    return 1 - busy / sum(row[-1][1] - row[0][0] for row in rows)
