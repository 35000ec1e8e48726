"""Runs the examples of documentation pages and docstrings."""

import doctest
from pathlib import Path

from tests.support.pages import NEEDS_VLLM_TOO, blocks

OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def run_doctest(text: str, names: dict, file: Path, line: int) -> int:
    """Run the examples in `text`, which starts at `line` of `file`, and return their number.

    Names that the examples define are added to `names`.
    """
    test = doctest.DocTestParser().get_doctest(text, names, file.name, str(file), line)
    output: list[str] = []
    doctest.DocTestRunner(optionflags=OPTIONS).run(test, out=output.append, clear_globs=False)
    names.update(test.globs)  # doctest works on a copy
    assert not output, "".join(output)
    return len(test.examples)


def run_blocks(page: Path, names: dict) -> None:
    """Run the Python blocks of a page in order, except those that import vLLM."""
    found = [(line, text) for line, text in blocks(page, "python") if not NEEDS_VLLM_TOO.search(text)]
    assert found or page.name != "README.md", "the README shows no Python"
    for line, text in found:
        if ">>>" in text:
            run_doctest(text, names, page, line)
        else:
            exec(compile("\n" * line + text, page, "exec"), names)
