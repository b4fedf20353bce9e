"""Memory and CPUs from made-up /proc and cgroup trees."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.system import CpuInfo, cpu_features, cpu_info, cpu_model, memory_info, peak_rss

MIB = 1 << 20


class Tree:
    """Writes files under a fake root."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.write("proc/meminfo", "MemTotal:       8388608 kB\nMemFree:   1 kB\nMemAvailable:   4194304 kB\n")

    def write(self, path: str, text: object) -> None:
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(f"{text}\n")

    def v2(self, group: str, *, mount_root: str = "/") -> None:
        self.write("proc/self/cgroup", f"0::{group}")
        self.write(
            "proc/self/mountinfo", f"30 25 0:26 {mount_root} /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw"
        )

    def v1(self, controller: str, group: str, *, mount_root: str = "/") -> None:
        self.write("proc/self/cgroup", f"4:{controller}:{group}\n1:name=systemd:/")
        mount = f"/sys/fs/cgroup/{controller}"
        self.write("proc/self/mountinfo", f"35 31 0:32 {mount_root} {mount} rw - cgroup cgroup rw,{controller}")


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def test_without_cgroups_meminfo_decides(tree: Tree) -> None:
    info = memory_info(tree.root)
    assert (info.total, info.available) == (8192 * MIB, 4096 * MIB)
    assert info.source == "memory of the machine"


def test_v2_limit_of_own_group(tree: Tree) -> None:
    tree.v2("/user/app")
    tree.write("sys/fs/cgroup/user/app/memory.max", 1024 * MIB)
    tree.write("sys/fs/cgroup/user/app/memory.current", 700 * MIB)
    tree.write("sys/fs/cgroup/user/app/memory.stat", f"anon 5\ninactive_file {200 * MIB}")
    info = memory_info(tree.root)
    assert info.total == 1024 * MIB
    assert info.available == (1024 - 500) * MIB  # page cache is given back on demand
    assert info.source == "cgroup limit (/sys/fs/cgroup/user/app)"


def test_v2_the_tightest_ancestor_counts(tree: Tree) -> None:
    tree.v2("/a/b")
    tree.write("sys/fs/cgroup/a/b/memory.max", "max")
    tree.write("sys/fs/cgroup/a/b/memory.high", "max")
    tree.write("sys/fs/cgroup/a/memory.max", 512 * MIB)
    tree.write("sys/fs/cgroup/a/memory.current", 12 * MIB)
    assert memory_info(tree.root).available == 500 * MIB


def test_v2_high_throttles_before_max(tree: Tree) -> None:
    tree.v2("/a")
    tree.write("sys/fs/cgroup/a/memory.max", 900 * MIB)
    tree.write("sys/fs/cgroup/a/memory.high", 600 * MIB)
    tree.write("sys/fs/cgroup/a/memory.current", 0)
    assert memory_info(tree.root).total == 600 * MIB


def test_v2_container_sees_only_its_own_group(tree: Tree) -> None:
    # Without a cgroup namespace the path is the host's and the mount shows only the container's part of it.
    tree.v2("/docker/abc", mount_root="/docker/abc")
    tree.write("sys/fs/cgroup/memory.max", 256 * MIB)
    tree.write("sys/fs/cgroup/memory.current", 56 * MIB)
    assert memory_info(tree.root).available == 200 * MIB


@pytest.mark.parametrize("mount_root", ["/", "/docker/abc"])
def test_v1_limit(tree: Tree, mount_root: str) -> None:
    tree.v1("memory", "/docker/abc", mount_root=mount_root)
    directory = "sys/fs/cgroup/memory" + ("/docker/abc" if mount_root == "/" else "")
    tree.write(f"{directory}/memory.limit_in_bytes", 300 * MIB)
    tree.write(f"{directory}/memory.usage_in_bytes", 250 * MIB)
    tree.write(f"{directory}/memory.stat", f"cache 1\ntotal_inactive_file {50 * MIB}")
    assert memory_info(tree.root).available == 100 * MIB


def test_v1_group_outside_the_mount_falls_back_to_the_mount_point(tree: Tree) -> None:
    tree.v1("memory", "/elsewhere", mount_root="/docker/abc")
    tree.write("sys/fs/cgroup/memory/memory.limit_in_bytes", 128 * MIB)
    tree.write("sys/fs/cgroup/memory/memory.usage_in_bytes", 0)
    assert memory_info(tree.root).total == 128 * MIB


def test_v1_without_limit(tree: Tree) -> None:
    tree.v1("memory", "/")
    tree.write("sys/fs/cgroup/memory/memory.limit_in_bytes", 9223372036854771712)
    assert memory_info(tree.root).available == 4096 * MIB


def test_limit_above_the_machine_is_no_limit(tree: Tree) -> None:
    tree.v2("/a")
    tree.write("sys/fs/cgroup/a/memory.max", 64 * 1024 * MIB)
    tree.write("sys/fs/cgroup/a/memory.current", 0)
    info = memory_info(tree.root)
    assert (info.total, info.available) == (8192 * MIB, 4096 * MIB)


def test_usage_above_the_limit_leaves_nothing(tree: Tree) -> None:
    tree.v2("/a")
    tree.write("sys/fs/cgroup/a/memory.max", 10 * MIB)
    tree.write("sys/fs/cgroup/a/memory.current", 11 * MIB)
    assert memory_info(tree.root).available == 0


def test_affinity_bounds_the_threads(tree: Tree) -> None:
    assert cpu_info(tree.root, affinity={0, 3, 5}).num_threads == 3


def test_hyperthreads_count_once(tree: Tree) -> None:
    for cpu in range(8):
        tree.write(f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list", f"{cpu % 4},{cpu % 4 + 4}")
    info = cpu_info(tree.root, affinity=range(8))
    assert (info.num_logical, info.num_cores, info.num_threads) == (8, 4, 4)
    assert info.cores == ((0, 4), (1, 5), (2, 6), (3, 7))


def test_two_siblings_of_a_small_machine_are_taken_as_two(tree: Tree) -> None:
    for cpu in range(2):
        tree.write(f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list", "0-1")
    assert cpu_info(tree.root, affinity=range(2)).num_threads == 2


@pytest.mark.parametrize(("quota", "threads"), [("150000 100000", 1), ("400000 100000", 4), ("20000 100000", 1)])
def test_v2_quota(tree: Tree, quota: str, threads: int) -> None:
    tree.v2("/a")
    tree.write("sys/fs/cgroup/a/cpu.max", quota)
    info = cpu_info(tree.root, affinity=range(16))
    assert info.num_threads == threads
    assert info.source.startswith("cgroup quota of")


def test_v2_quota_of_an_ancestor(tree: Tree) -> None:
    tree.v2("/a/b")
    tree.write("sys/fs/cgroup/a/b/cpu.max", "max 100000")
    tree.write("sys/fs/cgroup/a/cpu.max", "300000 100000")
    assert cpu_info(tree.root, affinity=range(16)).quota == 3.0


def test_v1_quota(tree: Tree) -> None:
    tree.v1("cpu,cpuacct", "/x")
    tree.write("sys/fs/cgroup/cpu,cpuacct/x/cpu.cfs_quota_us", 250000)
    tree.write("sys/fs/cgroup/cpu,cpuacct/x/cpu.cfs_period_us", 100000)
    tree.write("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", -1)
    tree.write("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", 100000)
    assert cpu_info(tree.root, affinity=range(8)) == CpuInfo(cores=tuple((cpu,) for cpu in range(8)), quota=2.5)


def test_quota_above_the_cpus_changes_nothing(tree: Tree) -> None:
    tree.v2("/a")
    tree.write("sys/fs/cgroup/a/cpu.max", "1600000 100000")
    info = cpu_info(tree.root, affinity=range(4))
    assert info.num_threads == 4
    assert info.source == "4 cores, 4 logical CPUs"


def test_garbage_in_every_file_is_no_limit(tree: Tree) -> None:
    tree.v2("/a/../b")
    tree.write("sys/fs/cgroup/memory.max", "banana")
    tree.write("sys/fs/cgroup/cpu.max", "")
    assert memory_info(tree.root).available == 4096 * MIB
    assert cpu_info(tree.root, affinity=range(3)).num_threads == 3


def test_features_and_model_of_the_cpu(tree: Tree) -> None:
    tree.write("proc/cpuinfo", "model name\t: Fast CPU\nflags\t\t: fpu avx2 avx512f avx512_bf16\n")
    assert cpu_features(tree.root) == ["avx2", "avx512f", "avx512_bf16"]
    assert cpu_model(tree.root) == "Fast CPU"


def test_this_machine() -> None:
    assert 0 < memory_info().available <= memory_info().total
    assert cpu_info().num_threads >= 1
    assert peak_rss() > MIB
