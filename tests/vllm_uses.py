"""What our vLLM classes use of vLLM's scheduler, read from their sources.

A use is `self.name` or `super().name` in a class below vLLM's scheduler, `scheduler.name` in a function that is given
a scheduler, or the same spelled as a string: `getattr(scheduler, "name")`, `(scheduler, "name", value)`.
"""

import ast
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

BASES = {"Scheduler", "AsyncScheduler"}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass
class Call:
    """One call of a method of the scheduler: `count` positional arguments and these keywords, or more by stars."""

    where: str
    count: int
    keywords: list[str]
    open: bool


@dataclass
class Uses:
    """Names of the scheduler: those that our classes bring, and those that are used, with the places."""

    methods: set[str] = field(default_factory=set)
    attributes: set[str] = field(default_factory=set)
    used: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    calls: dict[str, list[Call]] = field(default_factory=lambda: defaultdict(list))
    strings: set[str] = field(default_factory=set)
    """What functions spell as a string: it may be the name of an attribute, or not."""


def uses(package: Path) -> Uses:
    """Reads every file of the package."""
    trees = {path: ast.parse(path.read_text()) for path in sorted(package.glob("*.py"))}
    classes = [node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    schedulers = set(BASES)
    while (
        grown := {node.name for node in classes if {ast.unparse(base) for base in node.bases} & schedulers} - schedulers
    ):
        schedulers |= grown
    found = Uses()
    for path, tree in trees.items():
        for node, within, function in functions(tree):
            ours = within is not None and within.name in schedulers
            if ours and function in within.body:
                found.methods.add(function.name)
            names = scheduler_names(function, ours)
            read(node, names, path.name, found)
            if ours and function.name == "__init__":
                # What the constructor sets is ours. Set elsewhere, it is the base's.
                found.attributes |= {
                    part.attr for part in ast.walk(function) if is_store(part) and ast.unparse(part.value) == "self"
                }
    return found


def functions(tree: ast.Module) -> Iterator[tuple[ast.AST, ast.ClassDef | None, ast.FunctionDef]]:
    """Outermost functions, twice named, with the class around each."""
    for node in tree.body:
        if isinstance(node, FUNCTIONS):
            yield node, None, node
        elif isinstance(node, ast.ClassDef):
            yield from ((item, node, item) for item in node.body if isinstance(item, FUNCTIONS))


def is_store(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)


def scheduler_names(function: ast.FunctionDef, ours: bool) -> set[str]:
    """The expressions that are a scheduler within the function."""
    names = {"self", "super()"} if ours else {"self._scheduler"}
    if "scheduler" in {argument.arg for argument in [*function.args.posonlyargs, *function.args.args]}:
        names.add("scheduler")
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], (ast.Name, ast.Tuple)):
            targets, values = node.targets[0], node.value
            both = [(targets, values)] if isinstance(targets, ast.Name) else []
            if isinstance(targets, ast.Tuple) and isinstance(values, ast.Tuple):
                both = list(zip(targets.elts, values.elts, strict=True))
            names |= {ast.unparse(target) for target, value in both if ast.unparse(value) in names}
    return names


def read(function: ast.AST, schedulers: set[str], file: str, found: Uses) -> None:
    for node in ast.walk(function):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.strings.add(node.value)
        where = f"{file}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in schedulers:
            found.used[node.attr].add(where)
        elif isinstance(node, ast.Call) and len(node.args) > 1:
            spelled(node.args[:2], schedulers, where, found)
        elif isinstance(node, ast.Tuple) and len(node.elts) > 1:
            spelled(node.elts[:2], schedulers, where, found)
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and ast.unparse(node.func.value) in schedulers
        ):
            plain = [argument for argument in node.args if not isinstance(argument, ast.Starred)]
            keywords = [keyword.arg for keyword in node.keywords if keyword.arg]
            more = len(plain) < len(node.args) or len(keywords) < len(node.keywords)
            found.calls[node.func.attr].append(Call(where, len(plain), keywords, more))


def spelled(pair: list[ast.expr], schedulers: set[str], where: str, found: Uses) -> None:
    owner, name = pair
    if ast.unparse(owner) in schedulers and isinstance(name, ast.Constant) and isinstance(name.value, str):
        found.used[name.value].add(where)
