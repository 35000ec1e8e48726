"""Script that checks an installed wheel, in an environment without the development tools."""

import json
import subprocess
import sys
from pathlib import Path

import neuron_sched
from neuron_sched import BucketScheduler, NeuronConfig, PaddedInputs, Request

info = neuron_sched.build_info()
assert info["profile"] == "release", info

config = NeuronConfig(max_num_seqs=8, max_num_batched_tokens=2048, max_model_len=4096, block_size=32, num_blocks=1024)
scheduler = BucketScheduler(config)
scheduler.add(Request("a", prompt=range(1500), max_tokens=16))
step = scheduler.schedule()
assert step.num_scheduled_tokens_padded == {"a": 2048}
batch = PaddedInputs(config).fill(step)
assert (batch.shape, batch.slot_mapping[[0, 1499, 1500]].tolist()) == (("prefill", 2048), [32, 1531, -1])

# Only the tables of the command need an optional dependency; cost profiles and JSON do not.
command = Path(sys.executable).with_name("neuron-sched")
replay = [command, "replay", "--requests", "50", "--cost", "llama-3-8b-trn1", "--json", "-"]
summary = json.loads(subprocess.run(replay, capture_output=True, check=True).stdout)
assert summary["completed"] == 50, summary
print(f"neuron-sched {neuron_sched.__version__} for {info['target']} works")
