"""Law 3: the core knows no device, no array library and no wall clock."""

import ast
import sys
from pathlib import Path

import pytest

import octavo

ROOT = Path(octavo.__file__).parent
CORE = ["request.py", "plan.py", "scheduler.py", "policies.py", "engine.py", "clock.py", "events.py"]
CORE += [f"{name}.py" for name in ("counters", "line", "draft", "chunks", "admission", "outcomes")]
CORE += [f"kv/{name}.py" for name in ("pool", "prefix", "sizing", "tables")]
# Features that the core meets in one seam each; each is counted for itself (docs/adr/0004-a-larger-core.md).
FEATURES = [
    "foresight.py",
    "victims.py",
    "preemption.py",
    "forks.py",
    "beams.py",
    "searches.py",
    "constraint.py",
    "kv/partial.py",
    "kv/retention.py",
    "kv/trees.py",
    "explain.py",
]
PURE = [*CORE, *FEATURES]
OF_THE_PROJECT = {"octavo.backends.base", "octavo.config", "octavo.errors", "octavo.units"}
OF_THE_PROJECT |= {f"octavo.{name[:-3].replace('/', '.')}" for name in PURE}


def imports_of(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module


@pytest.mark.parametrize("name", PURE)
def test_core_imports_only_core_and_the_standard_library(name):
    for module in imports_of(ROOT / name):
        if module.startswith("octavo"):
            assert module in OF_THE_PROJECT
        else:
            assert module.split(".")[0] in sys.stdlib_module_names
            assert module not in ("time", "datetime") or name == "clock.py"


def test_core_stays_small():
    assert sum(len((ROOT / name).read_text().splitlines()) for name in CORE) <= 2400  # docs/adr/0004-a-larger-core.md


@pytest.mark.parametrize("name", FEATURES)
def test_features_stay_small(name):
    assert len((ROOT / name).read_text().splitlines()) <= 320
