"""Run with an installed wheel, in an environment without the development tools: does it work there?"""

import neuron_sched
from neuron_sched import Buckets

info = neuron_sched.build_info()
assert info["profile"] == "release", info
assert Buckets([128, 512, 2048]).fit(1500) == 2048
print(f"neuron-sched {neuron_sched.__version__} for {info['target']} works")
