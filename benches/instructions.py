"""Count the instructions of the core's hot functions under callgrind, and compare them with the committed baseline.

The exit status is 1 if a function executes over 3 % more instructions than the baseline. Counts depend on compiler and
target, so `instructions.json` has a baseline for each. Without a baseline for the installed compiler, or without
valgrind, the comparison is skipped with a message. `--update` writes the new counts into the baseline.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "rust/core/examples/hot.rs"
BASELINE = Path(__file__).with_suffix(".json")
TOLERANCE = 0.03


def output(*command: str | Path) -> str:
    """Run a command in the checkout and return its output, standard error included; exit if the command fails."""
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))} failed:\n{done.stdout}")
    return done.stdout


def build() -> Path:
    """Build the cases with the release optimisations and debug symbols; return the path of the program."""
    output("cargo", "build", "--locked", "-p", "neuron-sched-core", "--profile", "profiling", "--example", "hot")
    return ROOT / os.environ.get("CARGO_TARGET_DIR", "target") / "profiling/examples/hot"


def count(program: Path, case: str) -> int:
    """Return the number of instructions that the case executes inside `measured`."""
    options = ["--tool=callgrind", "--toggle-collect=hot::measured*", "--callgrind-out-file=/dev/null"]
    text = output("valgrind", *options, program, case)
    found = re.search(r"Collected : (\d+)", text)
    if not found or found[1] == "0":
        sys.exit(f"{case}: callgrind counted no instructions:\n{text}")
    return int(found[1])


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    arguments.add_argument("--update", action="store_true", help="write the counts into the baseline")
    update = arguments.parse_args().update

    if not shutil.which("valgrind"):
        print("instruction counts: SKIPPED, valgrind is not installed")
        return
    version = dict(re.findall(r"^(release|host): (.+)$", output("rustc", "-vV"), re.MULTILINE))
    compiler = f"rustc {version['release']} {version['host']}"
    baselines = json.loads(BASELINE.read_text()) if BASELINE.exists() else {}
    if compiler not in baselines and not update:
        print(f"instruction counts: SKIPPED, no baseline for {compiler}, only for {', '.join(baselines)}")
        return

    program = build()
    baseline = baselines.get(compiler, {})
    counts = {
        case: count(program, case) for case in re.findall(r'^        "(\w+)" =>', SOURCE.read_text(), re.MULTILINE)
    }
    worse = []
    for case, now in counts.items():
        change = now / baseline[case] - 1 if case in baseline else 0.0
        if case not in baseline or change > TOLERANCE:
            worse.append(case)
        print(f"{case:24} {now:14,} instructions {change:+8.2%}" if case in baseline else f"{case:24} {now:14,} new")
    if update:
        BASELINE.write_text(json.dumps({**baselines, compiler: counts}, indent=2, sort_keys=True) + "\n")
    elif worse or baseline.keys() - counts.keys():
        names = ", ".join([*worse, *sorted(baseline.keys() - counts.keys())])
        sys.exit(f"over {TOLERANCE:.0%} above the baseline, or missing on one side: {names} (`--update` accepts them)")


if __name__ == "__main__":
    main()
