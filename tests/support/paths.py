"""Folders that tests read."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
"""Root of the checkout."""

TRACES = ROOT.parent / "shared" / "traces"
"""Folder of published traces. It exists only where they have been placed beside the checkout."""
