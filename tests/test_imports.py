"""Imports point one way: core knows the standard library only, and nothing brings torch."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import octavo

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "octavo"

# What each core module may import of Octavo besides other core modules: nothing.
CORE = [
    *(
        "errors",
        "clock",
        "constraint",
        "request",
        "plan",
        "events",
        "config",
        "units",
        "system",
        "policies",
        "scheduler",
        "engine",
    ),
    *("counters", "line", "draft", "chunks", "admission", "preemption", "victims", "forks", "searches", "outcomes"),
    *("beams", "explain", "foresight"),
    *(
        "kv.partial",
        "kv.pool",
        "kv.prefix",
        "kv.retention",
        "kv.sizing",
        "kv.tables",
        "kv.trees",
        "backends.base",
        "models.spec",
    ),
]
HEAVY = {"numpy", "torch", "transformers", "click", "rich", "starlette", "uvicorn", "tokenizers", "huggingface_hub"}


def path_of(module: str) -> Path:
    return SOURCE / (module.replace(".", "/") + ".py")


def imports_of(path: Path, *, runtime_only: bool = True) -> set[str]:
    """Modules that a file imports anywhere, except under `if TYPE_CHECKING`."""
    tree = ast.parse(path.read_text())
    skipped: set[int] = set()
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            skipped.update(id(inner) for statement in node.body for inner in ast.walk(statement))
    for node in ast.walk(tree):
        if runtime_only and id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            found.add(node.module)
    return found


def modules_loaded_by(statement: str) -> set[str]:
    code = f"import sys\n{statement}\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    return set(done.stdout.split())


@pytest.mark.parametrize("module", CORE)
def test_core_imports_only_the_standard_library_and_core(module: str) -> None:
    for name in imports_of(path_of(module)):
        if name == "octavo" or name.startswith("octavo."):
            assert name.removeprefix("octavo.") in CORE, f"{module} imports {name}"
        else:
            assert name.partition(".")[0] in sys.stdlib_module_names, f"{module} imports {name}"


def test_core_has_no_device_words() -> None:
    for module in CORE:
        if module in ("backends.base", "system"):  # the seam names its implementations; system asks the machine
            continue
        names = {
            node.id if isinstance(node, ast.Name) else node.arg if isinstance(node, ast.arg) else node.name
            for node in ast.walk(ast.parse(path_of(module).read_text()))
            if isinstance(node, ast.Name | ast.arg | ast.FunctionDef | ast.ClassDef)
        }
        bad = {name for name in names if {"gpu", "cuda", "page"} & set(name.lower().split("_"))}
        assert not bad, f"{module}: {bad}"


def test_engine_runs_without_any_third_party_module() -> None:
    loaded = {name.partition(".")[0] for name in modules_loaded_by("import octavo.engine, octavo.scheduler")}
    assert not loaded & HEAVY


def test_import_octavo_is_light() -> None:
    loaded = modules_loaded_by("import octavo; octavo.SamplingParams(temperature=0)")
    assert not {name.partition(".")[0] for name in loaded} & HEAVY
    assert "octavo.llm" not in loaded


def test_what_comes_before_the_engine_process_is_light() -> None:
    """`octavo serve` starts it first and reads the application meanwhile."""
    loaded = modules_loaded_by("import octavo.cli, octavo.cli.serve, octavo.server.serve")
    late = {"octavo.server.app", "octavo.server.http_server", "octavo.text.tokenizer", "octavo.cli.bench"}
    assert not loaded & late
    assert not {name.partition(".")[0] for name in loaded} & {"numpy", "rich", "uvicorn", "tokenizers", "jinja2"}


@pytest.mark.parametrize(
    "statement",
    ["import octavo; octavo.LLM", "import octavo.cli", "import octavo.assemble", "import octavo.models.loading"],
)
def test_nothing_brings_torch(statement: str) -> None:
    assert not {name.partition(".")[0] for name in modules_loaded_by(statement)} & {"torch", "transformers"}


def test_server_brings_neither_torch_nor_numpy() -> None:
    loaded = modules_loaded_by("import octavo.server.app")
    # numpy is the engine process's: here it would cost a tenth of a second at the start.
    assert not {name.partition(".")[0] for name in loaded} & {"torch", "transformers", "numpy"}


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda p: str(p.relative_to(SOURCE)))
def test_layers_point_one_way(path: Path) -> None:
    """Inner layers never import outer ones; only assemble picks a backend."""
    outer = {
        "text": ("server", "cli", "llm", "offline", "assemble", "engine", "backends"),
        "weights": ("server", "cli", "llm", "offline", "assemble", "engine", "backends", "text"),
        "models": ("server", "cli", "llm", "offline", "assemble", "engine", "backends", "text"),
        "ops": ("server", "cli", "llm", "offline", "assemble", "engine", "backends", "text", "weights"),
        "backends": ("server", "cli", "llm", "offline", "assemble", "engine", "text"),
        "server": ("cli", "llm"),
        "kv": ("server", "cli", "llm", "offline", "assemble", "engine", "backends", "text", "weights", "ops"),
    }
    layer = path.relative_to(SOURCE).parts[0].removesuffix(".py")
    for name in imports_of(path):
        first = name.removeprefix("octavo.").partition(".")[0]
        if name.startswith("octavo.") and name != "octavo.backends.base":
            assert first not in outer.get(layer, ()), f"{path.name} imports {name}"
        assert name.partition(".")[0] not in ("torch", "transformers", "triton"), f"{path.name} imports {name}"


def test_one_function_reads_octavo_variables() -> None:
    for path in SOURCE.rglob("*.py"):
        if path.name != "config.py":
            strings = [n.value for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Constant)]
            assert not [s for s in strings if isinstance(s, str) and s.isupper() and s.startswith("OCTAVO_")], path


def test_exported_names() -> None:
    assert octavo.__all__ == [
        "LLM",
        "BeamSearchParams",
        "Engine",
        "Request",
        "SamplingParams",
        "StructuredOutputsParams",
        "__version__",
    ]
    for name in octavo.__all__:
        assert getattr(octavo, name) is not None
        assert name in dir(octavo)
    with pytest.raises(AttributeError, match="no attribute 'LMM'"):
        _ = octavo.LMM


def test_version_is_that_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert octavo.__version__ == project["version"]
    requirements = [r.partition(">")[0].partition("=")[0].lower() for r in project["dependencies"]]
    assert not {"torch", "transformers", "triton", "ray"} & set(requirements)
