"""Fitting counts into buckets, against the standard library's bisection."""

from bisect import bisect_left

from neuron_sched import Buckets


def test_fit(ratio):
    sizes = [128, 256, 512, 1024, 2048, 4096, 8192]
    fit = Buckets(sizes).fit
    assert [fit(n) for n in range(1, 8193)] == [sizes[bisect_left(sizes, n)] for n in range(1, 8193)]
    ratio(lambda: sizes[bisect_left(sizes, 1500)], lambda: fit(1500))
