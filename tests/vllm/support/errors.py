"""Injected errors."""

import functools


def raise_on_call(function, error, call=1):
    """Return a wrapper of `function` that raises `error` on call number `call`. Its `calls` counts the calls."""

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        wrapper.calls += 1
        if wrapper.calls == call:
            raise error
        return function(*args, **kwargs)

    wrapper.calls = 0
    return wrapper
