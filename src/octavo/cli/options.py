"""Flags that several commands share, their groups in --help, and how they become options of the engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import click

from octavo.config import (
    ADMISSIONS,
    DTYPES,
    KV_CACHE_DTYPES,
    LOAD_FORMATS,
    PREEMPTION_MODES,
    SCHEDULING_POLICIES,
    EngineOptions,
)
from octavo.request import SamplingParams

F = TypeVar("F", bound=Callable[..., Any])

DEFAULT_MODEL = "smollm2-135m"


class GroupedOption(click.Option):
    """An option with the heading under which --help shows it."""

    def __init__(self, *args: Any, group: str = "Options", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.group = group


class GroupedCommand(click.Command):
    """A command whose --help shows its options under their headings."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx) if isinstance(param, click.Option) else None
            if record is not None:
                groups.setdefault(getattr(param, "group", "Other"), []).append(record)
        for heading, records in groups.items():
            with formatter.section(heading):
                formatter.write_dl(records)


def option(*names: str, group: str, **kwargs: Any) -> Callable[[F], F]:
    """click.option under a heading of --help, which shows the default where there is one."""
    kwargs.setdefault("show_default", kwargs.get("default") is not None)
    return click.option(*names, cls=GroupedOption, group=group, **kwargs)


def together(*decorators: Callable[[F], F]) -> Callable[[F], F]:
    """Applies decorators so that --help lists them in the order given."""

    def apply(f: F) -> F:
        for decorator in reversed(decorators):
            f = decorator(f)
        return f

    return apply


# ---------------------------------------------------------------------------- engine

MODEL, MEMORY, STEPS, MACHINE = "Model", "Memory", "Scheduling", "Machine"

engine_options = together(
    option(
        "--load-format",
        type=click.Choice(LOAD_FORMATS),
        default="auto",
        group=MODEL,
        help="Where weights come from; dummy makes random ones for any configuration.",
    ),
    option("--tokenizer", metavar="PATH", group=MODEL, help="Directory or .gguf to take the tokenizer from."),
    option(
        "--chat-template", metavar="FILE", group=MODEL, help="Jinja template of the chat, instead of the model's own."
    ),
    option(
        "--dtype",
        type=click.Choice(DTYPES),
        default="auto",
        group=MODEL,
        help="Of KV and dummy weights; stored weights keep their format. auto: bfloat16.",
    ),
    option(
        "--dummy-format",
        metavar="FORMAT",
        default="auto",
        group=MODEL,
        help="Weight format of --load-format dummy: F32, BF16, Q4_1, Q6_K …",
    ),
    option("--seed", type=int, metavar="N", group=MODEL, help="For dummy weights and for requests without a seed."),
    option(
        "--max-model-len",
        type=int,
        metavar="TOKENS",
        group=MEMORY,
        help="Longest prompt plus answer. Default: the model's, as far as memory allows.",
    ),
    option(
        "--kv-cache-memory",
        metavar="SIZE",
        group=MEMORY,
        help="Memory of the KV cache, such as 2GiB. Default: at most 4 GiB and a quarter of what is free.",
    ),
    option(
        "--memory-utilization",
        "--gpu-memory-utilization",
        "memory_utilization",
        type=float,
        metavar="SHARE",
        group=MEMORY,
        help="Instead: share (0 to 1) of the memory left beside the weights.",
    ),
    option(
        "--kv-cache-dtype",
        type=click.Choice(KV_CACHE_DTYPES),
        default="auto",
        group=MEMORY,
        help="Type of stored keys and values. auto: that of --dtype. int8: twice the tokens of bfloat16.",
    ),
    option("--block-size", type=int, default=16, metavar="TOKENS", group=MEMORY, help="Per KV block."),
    option(
        "--enable-prefix-caching/--no-enable-prefix-caching",
        default=True,
        group=MEMORY,
        help="Reuse the KV of prompts that begin alike.",
    ),
    option(
        "--cache-pin-limit",
        type=float,
        default=0.5,
        metavar="SHARE",
        group=MEMORY,
        help="Share (0 to 1) of the KV cache that pinned prefixes may hold.",
    ),
    option(
        "--tenant-cache-quota",
        type=float,
        default=1.0,
        metavar="SHARE",
        group=MEMORY,
        help="Share (0 to 1) of it that one tenant may keep cached while no request uses it.",
    ),
    option("--max-num-seqs", type=int, default=128, metavar="N", group=STEPS, help="Most sequences in one step."),
    option(
        "--max-num-batched-tokens",
        type=int,
        default=512,
        metavar="TOKENS",
        group=STEPS,
        help="Most tokens in one step; longer prompts go in chunks.",
    ),
    option(
        "--max-num-waiting",
        type=int,
        default=1024,
        metavar="N",
        group=STEPS,
        help="Most requests that wait; more are answered with 429.",
    ),
    option(
        "--scheduling-policy",
        type=click.Choice(SCHEDULING_POLICIES),
        default="fcfs",
        group=STEPS,
        help="First come first served, or by the priority of the request.",
    ),
    option(
        "--admission",
        type=click.Choice(ADMISSIONS),
        default="foresight",
        group=STEPS,
        help="Admit while the answers are expected to fit in the KV cache, or as long as the prompts do.",
    ),
    option(
        "--max-preemptions",
        type=int,
        default=4,
        metavar="N",
        group=STEPS,
        help="How often one sequence may lose its KV blocks; after that it keeps them.",
    ),
    option(
        "--preemption-mode",
        type=click.Choice(PREEMPTION_MODES),
        default="tail",
        group=STEPS,
        help="What a preempted sequence loses: all its KV blocks, or from the end as many as others need.",
    ),
    option(
        "--long-prefill-token-threshold",
        type=int,
        default=0,
        metavar="TOKENS",
        group=STEPS,
        help="Most tokens of one prompt in a step that others share; 0: what the step has left.",
    ),
    option(
        "--threads",
        type=int,
        metavar="N",
        group=MACHINE,
        help="Compute threads. Default: OCTAVO_THREADS, else the cores granted to this process.",
    ),
    option(
        "--pin-threads",
        is_flag=True,
        group=MACHINE,
        help="Keep each thread on a core of its own. For machines that nothing else computes on.",
    ),
    option(
        "--isa",
        metavar="NAME",
        default="auto",
        group=MACHINE,
        help="Kernels to use: scalar, avx2, avx512 … Default: OCTAVO_ISA, else the best of this CPU.",
    ),
    option("--tensor-parallel-size", type=int, default=1, metavar="N", group=MACHINE, help="Only 1 in this version."),
)


def take_engine_options(values: dict[str, Any]) -> EngineOptions:
    """Removes the engine's flags from a command's keyword arguments and builds EngineOptions of them."""
    names = {f.name for f in dataclasses.fields(EngineOptions)}
    return EngineOptions(**{name: values.pop(name) for name in list(values) if name in names})


# ---------------------------------------------------------------------------- sampling

SAMPLING = "Sampling (default: what the model's authors recommend)"

sampling_options = together(
    option("--temperature", type=float, metavar="T", group=SAMPLING, help="0 is greedy; higher is more varied."),
    option("--top-p", type=float, metavar="P", group=SAMPLING, help="Keep the most probable tokens up to this mass."),
    option("--top-k", type=int, metavar="K", group=SAMPLING, help="Keep the K most probable tokens; 0: all."),
    option("--min-p", type=float, metavar="P", group=SAMPLING, help="Drop tokens below P times the best one."),
    option(
        "--repetition-penalty", type=float, metavar="X", group=SAMPLING, help="Above 1 discourages tokens seen before."
    ),
    option("--presence-penalty", type=float, metavar="X", group=SAMPLING, help="Against tokens already generated."),
    option("--frequency-penalty", type=float, metavar="X", group=SAMPLING, help="The same, by how often."),
    option("--max-tokens", type=int, metavar="N", group=SAMPLING, help="Longest answer. Default: the room left."),
    option("--stop", multiple=True, metavar="TEXT", group=SAMPLING, help="Stop before this text; repeatable."),
    option("--sampling-seed", type=int, metavar="N", group=SAMPLING, help="The same seed gives the same answer."),
)

_SAMPLING_NAMES = (
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("max_tokens", "stop", "sampling_seed"),
)


def take_sampling(values: dict[str, Any]) -> dict[str, Any]:
    """Removes the sampling flags from a command's keyword arguments; those given, as fields of SamplingParams."""
    given = {name: values.pop(name) for name in _SAMPLING_NAMES}
    fields = {name: value for name, value in given.items() if value is not None and value != ()}
    if "sampling_seed" in fields:
        fields["seed"] = fields.pop("sampling_seed")
    SamplingParams(**fields)  # a bad value is refused before the model is loaded
    return fields
