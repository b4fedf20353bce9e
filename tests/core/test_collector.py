"""The collector of reference cycles: off while a process starts, blind to what it started with."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import gc
from octavo.collector import collector_paused, resume_collector
with collector_paused():
    assert not gc.isenabled()
assert gc.isenabled()
with collector_paused():
    import octavo.server.wire
    resume_collector()
    assert gc.isenabled()
assert gc.isenabled() and gc.get_freeze_count() > 10_000
class Loop:
    alive = 0
    def __init__(self): self.me, Loop.alive = self, Loop.alive + 1
    def __del__(self): Loop.alive -= 1
for _ in range(100_000): Loop()
assert Loop.alive < 10_000
"""


def test_collector_forgets_what_a_process_starts_with_and_collects_what_comes_after() -> None:
    subprocess.run([sys.executable, "-c", CODE], check=True, timeout=60)
