"""What this process may use of the machine: memory and CPUs, with cgroup limits and affinity respected."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

# cgroup v1 writes "no limit" as the largest multiple of the page size below 2**63.
_UNLIMITED = 2**60

_FEATURES = (
    *("avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512bw", "avx512vl", "avx512_vnni", "avx512_bf16"),
    *("amx_bf16", "amx_int8", "asimd", "asimddp", "i8mm", "bf16", "sve"),
)


@dataclass(frozen=True, slots=True)
class MemoryInfo:
    """Bytes that this process may hold in all, bytes it can still take, and what sets the limit."""

    total: int
    available: int
    source: str


@dataclass(frozen=True, slots=True)
class CpuInfo:
    """Logical CPUs of the affinity mask, by core, and the CPUs' worth of time that the cgroup grants (None: all)."""

    cores: tuple[tuple[int, ...], ...]
    quota: float | None

    @property
    def num_cores(self) -> int:
        return len(self.cores)

    @property
    def num_logical(self) -> int:
        return sum(len(core) for core in self.cores)

    @property
    def num_threads(self) -> int:
        """How many compute threads to run.

        Two threads of one core share its vector units, so kernels count cores; small virtual machines
        invent their topology, so up to two CPUs are taken at their word. A quota is rounded down:
        a thread that is throttled in the middle of a step makes all others wait for it.
        """
        count = max(self.num_cores, min(self.num_logical, 2))
        if self.quota is not None:
            count = min(count, int(self.quota))
        return max(1, count)

    @property
    def source(self) -> str:
        if self.quota is not None and int(self.quota) < max(self.num_cores, min(self.num_logical, 2)):
            return f"cgroup quota of {self.quota:g} CPUs"
        return f"{self.num_cores} cores, {self.num_logical} logical CPUs"


@dataclass(frozen=True, slots=True)
class _Cgroup:
    """One controller's directories, from this process's own group up to the mount point."""

    version: int
    directories: tuple[Path, ...]


def memory_info(root: Path = Path("/")) -> MemoryInfo:
    """Reads /proc/meminfo and the memory cgroups (v1 and v2) under `root`."""
    total, available, source = _meminfo(root)
    for group in _cgroups(root, "memory"):
        for directory in group.directories:
            limit, usage = _memory_limit(group.version, directory)
            if limit is None or limit >= _UNLIMITED:
                continue
            if limit < total:
                total, source = limit, f"cgroup limit ({'/' + str(directory.relative_to(root))})"
            available = min(available, max(0, limit - usage))
    return MemoryInfo(total, available, source)


def cpu_info(root: Path = Path("/"), affinity: Iterable[int] | None = None) -> CpuInfo:
    """`affinity` is the set of CPUs this process may run on (default: asked from the kernel)."""
    cpus = set(affinity) if affinity is not None else _affinity()
    cores: dict[str, list[int]] = {}
    for cpu in sorted(cpus):
        siblings = _read(root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") or str(cpu)
        cores.setdefault(siblings, []).append(cpu)
    quotas = [
        quota
        for group in _cgroups(root, "cpu")
        for directory in group.directories
        if (quota := _cpu_quota(group.version, directory)) is not None
    ]
    return CpuInfo(tuple(map(tuple, cores.values())), min(quotas, default=None))


def peak_rss() -> int:
    """The most memory that this process ever held, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB


def cpu_model(root: Path = Path("/")) -> str:
    """The processor's name as the kernel gives it."""
    for line in (_read(root / "proc/cpuinfo") or "").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "unknown"


def cpu_features(root: Path = Path("/")) -> list[str]:
    """The instruction sets that matter to the kernels, by the kernel's names for them."""
    for line in (_read(root / "proc/cpuinfo") or "").splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            flags = set(value.split())
            return [feature for feature in _FEATURES if feature in flags]
    return []


def _affinity() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def _read_int(path: Path) -> int | None:
    text = _read(path)
    return int(text) if text is not None and text.lstrip("-").isdigit() else None


def _meminfo(root: Path) -> tuple[int, int, str]:
    fields: dict[str, int] = {}
    for line in (_read(root / "proc/meminfo") or "").splitlines():
        name, _, rest = line.partition(":")
        number = rest.split()
        if number and number[0].isdigit():
            fields[name] = int(number[0]) * 1024
    if "MemTotal" in fields:
        total = fields["MemTotal"]
        return total, fields.get("MemAvailable", fields.get("MemFree", total)), "memory of the machine"
    # No /proc (macOS): physical memory, of which half is a careful guess at what is free.
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return total, total // 2, "memory of the machine"


def _memory_limit(version: int, directory: Path) -> tuple[int | None, int]:
    """Limit of one group (None: none) and what of it is in use and cannot be reclaimed at will."""
    if version == 2:
        limits = [_read_int(directory / name) for name in ("memory.max", "memory.high")]
        limit = min((x for x in limits if x is not None), default=None)
        usage, cache = _read_int(directory / "memory.current") or 0, "inactive_file"
    else:
        limit = _read_int(directory / "memory.limit_in_bytes")
        usage, cache = _read_int(directory / "memory.usage_in_bytes") or 0, "total_inactive_file"
    for line in (_read(directory / "memory.stat") or "").splitlines():
        name, _, value = line.partition(" ")
        if name == cache and value.isdigit():
            usage -= int(value)  # page cache that the kernel drops when it needs room
    return limit, max(0, usage)


def _cpu_quota(version: int, directory: Path) -> float | None:
    if version == 2:
        quota, _, period = (_read(directory / "cpu.max") or "max").partition(" ")
        if not (quota.isdigit() and period.isdigit()):
            return None
        return int(quota) / max(1, int(period))
    quota_us, period_us = _read_int(directory / "cpu.cfs_quota_us"), _read_int(directory / "cpu.cfs_period_us")
    if quota_us is None or quota_us <= 0 or not period_us:
        return None
    return quota_us / period_us


def _cgroups(root: Path, controller: str) -> Iterator[_Cgroup]:
    """The groups of this process that may limit `controller`, in v1 and v2 hierarchies.

    /proc/self/cgroup gives paths as the host sees them, /proc/self/mountinfo says which of them is
    mounted where; inside a container the two overlap only partly (see cgroups(7)).
    """
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        number, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        version = 2 if number == "0" and not names else 1
        if version == 1 and controller not in names.split(","):
            continue
        for mount_root, mount_point in _cgroup_mounts(root, version, controller):
            yield _Cgroup(version, _walk_up(root, mount_root, mount_point, path))


def _cgroup_mounts(root: Path, version: int, controller: str) -> Iterator[tuple[str, str]]:
    for line in (_read(root / "proc/self/mountinfo") or "").splitlines():
        left, _, right = line.partition(" - ")
        fields, kind = left.split(), right.split()
        if len(fields) < 5 or len(kind) < 3:
            continue
        if (version == 2 and kind[0] == "cgroup2") or (
            version == 1 and kind[0] == "cgroup" and controller in kind[2].split(",")
        ):
            yield fields[3], fields[4]


def _walk_up(root: Path, mount_root: str, mount_point: str, path: str) -> tuple[Path, ...]:
    own = PurePosixPath(path)
    try:
        relative = own.relative_to(mount_root)
    except ValueError:
        relative = PurePosixPath()  # the group lies outside what is mounted: its mount point is all we see
    if ".." in relative.parts:
        relative = PurePosixPath()
    base = root / mount_point.lstrip("/")
    return tuple(base / p for p in (relative, *relative.parents))
