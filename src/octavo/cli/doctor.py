"""`octavo doctor`: what this machine is, what Octavo would do with it, and where a model's memory goes."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from octavo import __version__
from octavo.cli.options import GroupedCommand, engine_options, take_engine_options
from octavo.cli.tables import print_rows
from octavo.config import read_environment
from octavo.kv.sizing import blocks_for, format_bytes
from octavo.system import cpu_features, cpu_info, cpu_model, memory_info

if TYPE_CHECKING:
    from octavo.assemble import Assembly


@click.command(cls=GroupedCommand)
@click.argument("model", required=False)
@engine_options
def doctor(model: str | None, **values: Any) -> None:
    """Show CPU features, memory limits and, with MODEL, its kernels, memory and resolved configuration."""
    options = take_engine_options(values)
    environment = read_environment()
    cpu, memory = cpu_info(), memory_info()
    print_rows(
        [
            ("Octavo", __version__),
            ("Python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
            ("CPU", cpu_model()),
            ("CPU features", " ".join(cpu_features()) or "none that matter here"),
            ("CPUs", f"{cpu.num_logical} logical, {cpu.num_cores} cores"),
            ("CPU quota", "none" if cpu.quota is None else f"{cpu.quota:g} CPUs (cgroup)"),
            ("Threads", f"{options.threads or environment.threads or cpu.num_threads} ({cpu.source})"),
            ("Memory", f"{format_bytes(memory.total)} ({memory.source}), {format_bytes(memory.available)} available"),
            ("Kernels", _native()),
            ("Cache", _cache_line()),
        ]
    )
    if model is None:
        click.echo("\nWith a model (octavo doctor smollm2-135m) this also shows its kernels, memory and configuration.")
        return

    from octavo.assemble import assemble
    from octavo.progress import StageProgress

    with StageProgress() as progress:
        assembly = assemble(model, options, progress=progress)
    _print_model(assembly)
    assembly.close()


def _native() -> str:
    """The instruction sets that the compiled kernels can use here, or what keeps them from loading."""
    try:
        from octavo import _native
    except ImportError as error:
        return f"not usable: {' '.join(str(error).split())[:200]}"
    available = _native.available_isas()
    missing = [isa for isa in _native.known_isas() if isa not in available]
    return ", ".join(available) + (f" (this CPU cannot run {', '.join(missing)})" if missing else "")


def _cache_line() -> str:
    from octavo.weights.hub import cache_directory

    directory = cache_directory()
    existing = next((path for path in (directory, *directory.parents) if path.exists()), Path("/"))
    return f"{directory}" + ("" if os.access(existing, os.W_OK) else " (not writable)")


def _print_model(assembly: Assembly) -> None:
    spec, capabilities = assembly.model.spec, assembly.backend.capabilities
    print_rows(
        [
            ("architecture", spec.architecture),
            ("layers", f"{spec.num_layers}"),
            ("hidden size", f"{spec.hidden_size}, feed-forward {spec.intermediate_size}"),
            ("heads", f"{spec.num_heads}, {spec.num_kv_heads} of KV, {spec.head_dim} wide"),
            ("vocabulary", f"{spec.vocab_size:,}"),
            ("positions", f"{spec.max_position:,}"),
            ("weight formats", _formats(assembly)),
        ],
        title=f"Model {assembly.model.name}",
    )
    print_rows([(name, value) for name, value in capabilities.details.items()] or [("-", "-")], title="Kernels")
    click.echo("\nMemory")
    for line in assembly.report:
        click.echo(f"  {line}")
    config, bytes_per_block = assembly.config, capabilities.kv_bytes_per_block
    lengths = sorted({n for n in (256, 1024, 4096, 16384, 65536) if n < config.max_model_len} | {config.max_model_len})
    rows = [("tokens each", "KV of one", "fit at once")]
    for length in lengths:
        blocks = blocks_for(length, config.block_size)
        rows.append((f"{length:,}", format_bytes(blocks * bytes_per_block), f"{config.num_blocks // blocks:,}"))
    print_rows(rows, title="Requests that fit")
    print_rows([(s.name, s.value, s.source) for s in assembly.settings], title="Resolved configuration")


def _formats(assembly: Assembly) -> str:
    sizes: dict[str, int] = {}
    for view in assembly.model.tensors.values():
        sizes[view.format] = sizes.get(view.format, 0) + view.data.nbytes
    return ", ".join(f"{name} {format_bytes(size)}" for name, size in sorted(sizes.items(), key=lambda kv: -kv[1]))
