"""What the default budget sees: what is left below the limits of control groups, in made-up trees and a real group."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest
from kits.groups import joining, memory_group

from pagestone.reader import budget
from pagestone.reader.memory import available_memory

GIB = 1 << 30
MAX = "max\n"
V2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = (
    "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw\n"
    "32 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
    "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"
)


class Machine:
    """A root with the files the kernel would show."""

    def __init__(self, root: Path, *, cgroup: str, mounts: str, free: int | None = 20 * GIB) -> None:
        self.root = root
        self.write("proc/self/cgroup", cgroup)
        self.write("proc/self/mountinfo", mounts)
        if free is not None:
            self.write(
                "proc/meminfo", f"MemTotal: 1 kB\nMemFree: 2 kB\nMemAvailable:   {free // 1024} kB\nBuffers: 3 kB\n"
            )

    def write(self, name: str, text: str | int) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(str(text))

    def group(self, place: str, files: Mapping[str, str | int]) -> Machine:
        for name, text in files.items():
            self.write(f"sys/fs/cgroup/{place}/memory.{name}", text)
        return self

    def v2(self, place: str, most: int | str, used: int, idle: int = 0, high: int | str = MAX) -> Machine:
        stat = f"anon 5\nfile {idle + 77}\ninactive_file {idle}\nactive_file 77\n"
        return self.group(place, {"max": most, "high": high, "current": used, "stat": stat})

    def v1(self, place: str, most: int, used: int, idle: int = 0, hierarchy: int = 1) -> Machine:
        stat = f"cache 5\ninactive_file 1\ntotal_cache {idle}\ntotal_inactive_file {idle}\ntotal_active_file 77\n"
        files = {"limit_in_bytes": most, "usage_in_bytes": used, "stat": stat, "use_hierarchy": hierarchy}
        return self.group(place, files)

    def left(self) -> int | None:
        return available_memory(self.root)


UNLIMITED = 9223372036854771712
"""What version 1 says for no limit."""


# -- without limits ---------------------------------------------------------------------------------------------------


def test_without_groups_it_is_the_kernels_estimate(tmp_path: Path) -> None:
    """No files at all, lines that mean nothing, and no meminfo either."""
    assert Machine(tmp_path / "a", cgroup="", mounts="").left() == 20 * GIB
    assert Machine(tmp_path / "b", cgroup="junk\n0:\n0::/\n", mounts="a b\n1 2 3 / /x - \n\n").left() == 20 * GIB
    (tmp_path / "c/proc").mkdir(parents=True)
    (tmp_path / "c/proc/meminfo").write_text(f"MemAvailable: {7 * 1024} kB\n")
    assert available_memory(tmp_path / "c") == 7 << 20
    left = available_memory(tmp_path / "nothing")
    assert left is None or left > 0


def test_no_limit_is_no_limit(tmp_path: Path) -> None:
    """ "max" in version 2, a huge number in version 1."""
    assert Machine(tmp_path / "2", cgroup="0::/a\n", mounts=V2).v2("a", MAX, 19 * GIB).left() == 20 * GIB
    one = Machine(tmp_path / "1", cgroup="4:memory:/a\n", mounts=V1).v1("memory/a", UNLIMITED, GIB)
    assert one.left() == 20 * GIB


# -- version 2 --------------------------------------------------------------------------------------------------------


def test_version_2_at_its_root_and_below(tmp_path: Path) -> None:
    """Own namespace ("/"), and a group below: the limit of the process's own group was not seen before."""
    for name, cgroup, place in (("a", "0::/\n", ""), ("b", "0::/user/job\n", "user/job")):
        made = Machine(tmp_path / name, cgroup=cgroup, mounts=V2).v2(place, 4 * GIB, GIB)
        assert made.left() == 3 * GIB


def test_the_page_cache_is_not_used_memory(tmp_path: Path) -> None:
    """3.9 GiB of 4 are used, but 3.5 of them are inactive file pages: 3.6 are free, not 0.1."""
    made = Machine(tmp_path, cgroup="0::/job\n", mounts=V2).v2("job", 40 * GIB // 10, 39 * GIB // 10, 35 * GIB // 10)
    assert made.left() == 40 * GIB // 10 - (39 * GIB // 10 - 35 * GIB // 10)


@pytest.mark.parametrize("tight", ["a/b/c", "a/b", "a", ""])
def test_every_ancestor_of_version_2(tmp_path: Path, tight: str) -> None:
    """The tightest of all groups up to the mount decides; a group beside them does not."""
    made = Machine(tmp_path, cgroup="0::/a/b/c\n", mounts=V2)
    for place in ("a/b/c", "a/b", "a", ""):
        made.v2(place, 2 * GIB if place == tight else 8 * GIB, GIB)
    made.v2("a/b/c/below", GIB // 8, 0).v2("a/beside", GIB // 8, 0)
    assert made.left() == GIB


def test_high_is_a_limit_too(tmp_path: Path) -> None:
    """Above memory.high a group is throttled until it hardly runs."""
    assert Machine(tmp_path / "a", cgroup="0::/j\n", mounts=V2).v2("j", MAX, GIB, high=3 * GIB).left() == 2 * GIB
    assert Machine(tmp_path / "b", cgroup="0::/j\n", mounts=V2).v2("j", 2 * GIB, GIB, high=3 * GIB).left() == GIB
    only = Machine(tmp_path / "c", cgroup="0::/j\n", mounts=V2).group("j", {"high": 3 * GIB, "current": GIB})
    assert only.left() == 2 * GIB, "without memory.max and memory.stat"


def test_more_used_than_allowed_is_none_left(tmp_path: Path) -> None:
    """Never below 0; and idle pages beyond the usage do not make room beyond the limit."""
    assert Machine(tmp_path / "a", cgroup="0::/j\n", mounts=V2).v2("j", GIB, 2 * GIB).left() == 0
    assert Machine(tmp_path / "b", cgroup="0::/j\n", mounts=V2).v2("j", GIB, GIB // 2, GIB).left() == GIB


# -- version 1, and both ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tight", ["a/b", "a", ""])
def test_every_ancestor_of_version_1(tmp_path: Path, tight: str) -> None:
    """The same in the hierarchy of the memory controller, wherever it stands among the controllers."""
    made = Machine(tmp_path, cgroup="9:cpu:/x\n4:hugetlb,memory:/a/b\n0::/\n", mounts=V1)
    for place in ("a/b", "a", ""):
        made.v1(f"memory/{place}", 4 * GIB if place == tight else UNLIMITED, 3 * GIB, 2 * GIB)
    assert made.left() == 3 * GIB


def test_groups_of_version_1_without_hierarchy(tmp_path: Path) -> None:
    """`memory.use_hierarchy` 0: an ancestor's limit is not for those below it; a group's own always is."""
    made = Machine(tmp_path, cgroup="4:memory:/a/b\n", mounts=V1)
    made.v1("memory/a/b", 6 * GIB, GIB, hierarchy=0).v1("memory/a", 2 * GIB, GIB, hierarchy=0)
    assert made.left() == 5 * GIB


def test_both_versions_at_once(tmp_path: Path) -> None:
    """A hybrid machine mounts both; the tighter one counts, and one without the controller says nothing."""
    both = "0::/two\n4:memory:/one\n"
    mounts = V1 + V2.replace("/sys/fs/cgroup ", "/sys/fs/cgroup/unified ")
    made = Machine(tmp_path / "a", cgroup=both, mounts=mounts).v1("memory/one", 5 * GIB, GIB)
    made.write("sys/fs/cgroup/unified/two/cgroup.procs", "1\n")
    assert made.left() == 4 * GIB
    assert made.v2("unified/two", 2 * GIB, GIB).left() == GIB


# -- mounts -----------------------------------------------------------------------------------------------------------


def test_a_mount_whose_top_is_the_containers_group(tmp_path: Path) -> None:
    """Without a namespace of its own a container sees the host's path, and a mount that begins at its own group."""
    mounts = V1.replace("0:32 / /sys", "0:32 /docker/abc /sys")
    made = Machine(tmp_path / "a", cgroup="4:memory:/docker/abc\n", mounts=mounts).v1("memory", 4 * GIB, GIB)
    assert made.left() == 3 * GIB
    below = Machine(tmp_path / "b", cgroup="4:memory:/docker/abc/sub\n", mounts=mounts)
    assert below.v1("memory/sub", 2 * GIB, GIB).v1("memory", 4 * GIB, GIB).left() == GIB
    aside = Machine(tmp_path / "c", cgroup="4:memory:/docker/abcd\n", mounts=mounts).v1("memory", 4 * GIB, GIB)
    assert aside.left() == 3 * GIB, "not below it: what is mounted is all that can be seen"


def test_a_process_outside_its_namespaces_root(tmp_path: Path) -> None:
    """ "/../other" is no path to walk: nothing above the mount is read."""
    made = Machine(tmp_path, cgroup="0::/../other\n", mounts=V2).v2("", 4 * GIB, GIB)
    made.write("sys/fs/other/memory.max", 5)
    made.write("sys/fs/other/memory.current", 0)
    assert made.left() == 3 * GIB


def test_mount_points_with_spaces(tmp_path: Path) -> None:
    """The kernel writes a space as \\040; and of two mounts the one that shows more of the path is taken."""
    mounts = V2.replace("/ /sys/fs/cgroup ", "/ /sys/fs/cgroup/my\\040groups ")
    assert Machine(tmp_path / "a", cgroup="0::/j\n", mounts=mounts).v2("my groups/j", GIB, 0).left() == GIB
    two = V2 + V2.replace("/ /sys/fs/cgroup ", "/j /sys/fs/cgroup/mine ")
    assert Machine(tmp_path / "b", cgroup="0::/j\n", mounts=two).v2("mine", GIB, 0).left() == GIB


# -- the real thing ---------------------------------------------------------------------------------------------------


def test_the_default_budget_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of what is left beside the dense tensors."""
    monkeypatch.setattr(budget, "available_memory", lambda: 3 * GIB)
    monkeypatch.setattr(budget, "all_records", lambda _: 50 * GIB)
    monkeypatch.setattr(budget, "largest_record", lambda _: 1)
    assert budget.default_budget(None, GIB) == GIB  # type: ignore[arg-type]


@pytest.fixture
def group() -> Iterator[Path]:
    """A group of our own below this process's, limited to 300 MiB, where this user may make one."""
    with ExitStack() as stack:
        try:
            made = stack.enter_context(memory_group(300 << 20))
        except OSError as error:
            pytest.skip(f"no group of version 1 can be made here: {error}")
        yield made


def test_a_real_group_of_version_1(group: Path, tmp_path: Path) -> None:
    """A process in it sees its limit, and 200 MiB of page cache that it filled do not count as used."""
    data = tmp_path / "data"
    with data.open("wb") as file:
        for _ in range(200):
            file.write(os.urandom(1 << 20))
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    code = (
        f"{joining(group)}f = open({str(data)!r}, 'rb')\nwhile f.read(1 << 20): pass\n"
        "from pagestone.reader.memory import available_memory as left; print(left())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    data.unlink()
    assert 200 << 20 < int(done.stdout) <= 300 << 20
