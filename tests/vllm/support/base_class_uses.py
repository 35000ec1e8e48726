"""Names of vLLM's scheduler that `neuron_sched.vllm` uses, read from the source.

A use is `self.name` or `super().name` in a subclass of vLLM's scheduler, or `scheduler.name` in a function with a
parameter `scheduler`. The name may also be a string: `getattr(scheduler, "name")`, `(scheduler, "name", value)`.
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
    """A call of a scheduler method."""

    where: str
    """File and line."""
    count: int
    """Number of positional arguments, without starred ones."""
    keywords: list[str]
    """Names of the keyword arguments, without double-starred ones."""
    starred: bool
    """Whether the call has starred or double-starred arguments too."""


@dataclass
class Uses:
    """Names that the subclasses define, and names of the scheduler that the package uses."""

    own_methods: set[str] = field(default_factory=set)
    """Methods that the subclasses define, overrides included."""
    own_attributes: set[str] = field(default_factory=set)
    """Attributes that the constructors of the subclasses set."""
    used: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    """File and line of each use, by name."""
    calls: dict[str, list[Call]] = field(default_factory=lambda: defaultdict(list))
    """Calls by method name."""
    strings: set[str] = field(default_factory=set)
    """All string constants. Some are names of attributes."""


def find_uses(package: Path) -> Uses:
    """Return the uses in all files of a package."""
    trees = {path: ast.parse(path.read_text()) for path in sorted(package.glob("*.py"))}
    classes = [node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    schedulers = set(BASES)
    while (
        grown := {node.name for node in classes if {ast.unparse(base) for base in node.bases} & schedulers} - schedulers
    ):
        schedulers |= grown
    found = Uses()
    for path, tree in trees.items():
        for class_name, function in functions(tree):
            is_method = class_name in schedulers
            if is_method:
                found.own_methods.add(function.name)
            names = scheduler_names(function, is_method)
            collect(function, names, path.name, found)
            if is_method and function.name == "__init__":
                # An attribute that only other methods set belongs to the base class.
                found.own_attributes |= {
                    part.attr for part in ast.walk(function) if is_store(part) and ast.unparse(part.value) == "self"
                }
    return found


def functions(tree: ast.Module) -> Iterator[tuple[str | None, ast.FunctionDef]]:
    """Yield (class name or `None`, function) for each function of a module and each method of its classes."""
    for node in tree.body:
        if isinstance(node, FUNCTIONS):
            yield None, node
        elif isinstance(node, ast.ClassDef):
            yield from ((node.name, item) for item in node.body if isinstance(item, FUNCTIONS))


def is_store(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)


def scheduler_names(function: ast.FunctionDef, is_method: bool) -> set[str]:
    """Return the expressions that are a scheduler in a function or in a method of a scheduler class."""
    names = {"self", "super()"} if is_method else {"self._scheduler"}
    if "scheduler" in {argument.arg for argument in [*function.args.posonlyargs, *function.args.args]}:
        names.add("scheduler")
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], (ast.Name, ast.Tuple)):
            targets, values = node.targets[0], node.value
            pairs = [(targets, values)] if isinstance(targets, ast.Name) else []
            if isinstance(targets, ast.Tuple) and isinstance(values, ast.Tuple):
                pairs = list(zip(targets.elts, values.elts, strict=True))
            names |= {ast.unparse(target) for target, value in pairs if ast.unparse(value) in names}
    return names


def collect(function: ast.AST, schedulers: set[str], file: str, found: Uses) -> None:
    """Add the uses in a function to `found`."""
    for node in ast.walk(function):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.strings.add(node.value)
        where = f"{file}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in schedulers:
            found.used[node.attr].add(where)
        elif isinstance(node, ast.Call) and len(node.args) > 1:
            collect_string_name(node.args[:2], schedulers, where, found)
        elif isinstance(node, ast.Tuple) and len(node.elts) > 1:
            collect_string_name(node.elts[:2], schedulers, where, found)
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and ast.unparse(node.func.value) in schedulers
        ):
            plain = [argument for argument in node.args if not isinstance(argument, ast.Starred)]
            keywords = [keyword.arg for keyword in node.keywords if keyword.arg]
            starred = len(plain) < len(node.args) or len(keywords) < len(node.keywords)
            found.calls[node.func.attr].append(Call(where, len(plain), keywords, starred))


def collect_string_name(pair: list[ast.expr], schedulers: set[str], where: str, found: Uses) -> None:
    """Add a use to `found` if the pair is a scheduler and a string."""
    owner, name = pair
    if ast.unparse(owner) in schedulers and isinstance(name, ast.Constant) and isinstance(name.value, str):
        found.used[name.value].add(where)
