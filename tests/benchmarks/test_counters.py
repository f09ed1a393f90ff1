"""CPU time of a server and of everything else on the machine."""

import subprocess
import sys
import time

from serving.counters import CpuTime


def test_cpu_time_counts_the_server_and_not_this_process():
    program = "x = 0\nwhile True: x += 1"
    with subprocess.Popen([sys.executable, "-c", program]) as busy:
        try:
            before = CpuTime.read(busy.pid)
            deadline = time.monotonic() + 60
            while (used := CpuTime.read(busy.pid) - before).server_s < 0.2 and time.monotonic() < deadline:
                time.sleep(0.02)
        finally:
            busy.kill()
    assert used.server_s >= 0.2


def test_what_another_process_uses_counts_as_others():
    idle = ["sleep", "300"]  # whose start takes next to no time
    busy = [sys.executable, "-c", "while True: pass"]
    with subprocess.Popen(idle) as server, subprocess.Popen(busy) as other:
        try:
            before = CpuTime.read(server.pid)
            deadline = time.monotonic() + 60
            while (used := CpuTime.read(server.pid) - before).others_s < 0.2 and time.monotonic() < deadline:
                time.sleep(0.02)
        finally:
            server.kill()
            other.kill()
    assert used.others_s >= 0.2
    assert used.server_s < 0.2
