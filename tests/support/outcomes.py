"""Outcomes of a step in a form that can be compared."""


def as_tuples(outcomes):
    """Return id, token and finish reason of each outcome."""
    return [(o.id, o.token, o.finish_reason) for o in outcomes]
