"""Real processes on this host: they find each other, and end together, with the reason."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from launch import local
from launch.local import Local, devices, environments, shown, together

BOTH = """
import jax
import numpy as np
from jax.experimental.multihost_utils import process_allgather
from jax.sharding import NamedSharding, PartitionSpec

known = os.environ
jax.distributed.initialize(
    known["JAX_COORDINATOR_ADDRESS"], int(known["JAX_NUM_PROCESSES"]), int(known["JAX_PROCESS_ID"])
)
mesh = jax.make_mesh((4,), ("data",))
rows = np.arange(8.0).reshape(4, 2)
held = jax.make_array_from_callback((4, 2), NamedSharding(mesh, PartitionSpec("data")), lambda part: rows[part])
total = jax.jit(lambda x: x.sum(0), out_shardings=NamedSharding(mesh, PartitionSpec()))(held)
print("local devices", jax.local_device_count(), file=sys.stderr)
print(json.dumps({"process": jax.process_index(), "devices": jax.device_count(), "total": total.tolist()}))
"""


def test_two_processes_compute_one_sum(program, capfd):
    code, came = together(program(BOTH), environments(Local(processes=2, cpu_devices=2)), grace=60)
    shown = capfd.readouterr()
    assert (code, came) == (0, [])
    assert json.loads(shown.out) == {"process": 0, "devices": 4, "total": [12.0, 16.0]}
    assert {"[0] local devices 2", "[1] local devices 2"} <= set(shown.err.splitlines())
    assert '[1] {"process": 1, "devices": 4, "total": [12.0, 16.0]}' in shown.err


def test_processes_go_on_when_nobody_listens(program):
    command = program("for _ in range(3000):\n    print('a line of sixty-four characters or so' * 2, file=sys.stderr)")
    launcher = f"from launch.local import together\nimport os\nos._exit(together({command!r}, [{{}}, {{}}], 60)[0])"
    process = subprocess.Popen([sys.executable, "-c", launcher], stderr=subprocess.PIPE)
    assert process.stderr is not None and process.stderr.readline().startswith(b"[")
    process.stderr.close()
    assert process.wait(60) == 0


def numbered(count: int) -> list[dict[str, str]]:
    return [{"NUMBER": str(number)} for number in range(count)]


def test_one_that_fails_ends_the_others_with_the_reason(program, capfd):
    command = program("""
if os.environ["NUMBER"] == "1":
    print("the disk is full", file=sys.stderr)
    sys.exit(3)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(print("told to end", file=sys.stderr) or 75))
time.sleep(60)
""")
    start = time.monotonic()
    code, came = together(command, numbered(3), grace=30)
    said = capfd.readouterr().err
    assert (code, came) == (3, []) and time.monotonic() - start < 20
    last = "process 1 of 3 ended with exit code 3, and so all do; its last line: the disk is full"
    assert said.splitlines()[-1] == last and "[1] the disk is full" in said


def test_one_that_does_not_end_is_killed_with_what_it_started(program, tmp_path):
    child = tmp_path / "child"
    command = program(f"""
import subprocess
if os.environ["NUMBER"] == "0":
    while not Path({str(child)!r}).exists():
        time.sleep(0.02)
    os.kill(os.getpid(), signal.SIGKILL)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
Path({str(child)!r} + ".new").write_text(str(other.pid))
os.replace({str(child)!r} + ".new", {str(child)!r})
other.wait()
""")
    start = time.monotonic()
    assert together(command, numbered(2), grace=0.3)[0] == 137
    assert time.monotonic() - start < 20
    for _ in range(100):
        if not os.path.exists(f"/proc/{child.read_text()}") or " Z " in status(child.read_text()):
            return
        time.sleep(0.05)
    raise AssertionError("the child lives on")


def status(pid: str) -> str:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read()
    except FileNotFoundError:
        return " Z "


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 75), (signal.SIGUSR1, 75), (signal.SIGINT, 130), (signal.SIGHUP, 75)]
)
def test_signals_are_passed_on(program, tmp_path, number, code):
    command = program(f"""
def handle(number, _):
    Path(os.environ["NUMBER"] + ".got").write_text(str(number))
    sys.exit(130 if number == signal.SIGINT else 75)
for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
    signal.signal(number, handle)
os.chdir({str(tmp_path)!r})
Path(os.environ["NUMBER"] + ".ready").touch()
time.sleep(60)
""")

    def send() -> None:
        while len(list(tmp_path.glob("*.ready"))) < 2:
            time.sleep(0.02)
        os.kill(os.getpid(), number)

    before = signal.getsignal(number)
    sender = threading.Thread(target=send, daemon=True)
    sender.start()
    assert together(command, numbered(2), grace=30) == (code, [number])
    assert signal.getsignal(number) == before
    got = [int((tmp_path / f"{process}.got").read_text()) for process in range(2)]
    assert got == [signal.SIGTERM if number == signal.SIGHUP else number] * 2


def test_preempted_processes_begin_again_where_that_is_asked(program, tmp_path, monkeypatch, capfd):
    count = tmp_path / "count"
    count.write_text("0")
    command = program(f"""
count = Path({str(count)!r})
count.write_text(str(int(count.read_text()) + 1))
sys.exit(0 if int(count.read_text()) == 3 else 75)
""")
    monkeypatch.setattr(local, "program", lambda words: command)
    assert local.main(["--processes", "1", "--restarts", "1", "--", "doctor"]) == 75
    assert count.read_text() == "2" and "process 0 of 1 was preempted" in capfd.readouterr().err
    assert local.main(["--processes", "1", "--restarts", "1", "--", "doctor"]) == 0


def test_what_is_shown_does_the_same(program, nasty):
    text = "said = json.dumps([os.environ['JAX_PROCESS_ID'], sys.argv[1:]])\nos.write(1, said.encode() + b'\\n')"
    command = [*program(text), *nasty]
    text = shown(command, environments(Local(processes=2)))
    done = subprocess.run(["bash", "-c", text], capture_output=True, text=True, check=True)
    assert sorted(map(json.loads, done.stdout.splitlines())) == [["0", nasty], ["1", nasty]]


@pytest.mark.parametrize(("ending", "code"), [("3", 3), ("75", 75), ("os.kill(os.getpid(), 9)", 137), ("0", 0)])
def test_what_is_shown_ends_with_the_same_code(program, tmp_path, ending, code):
    """The other process is told to end, unless the first was preempted: then it is saving."""
    told = tmp_path / "told"
    command = program(f"""
if os.environ["NUMBER"] == "1":
    while not Path({str(told)!r} + ".ready").exists():
        time.sleep(0.01)
    sys.exit({ending})
signal.signal(signal.SIGTERM, lambda *_: sys.exit(Path({str(told)!r}).touch() or 75))
Path({str(told)!r} + ".ready").touch()
time.sleep(0.5 if {code} in (0, 75) else 30)
""")
    done = subprocess.run(["bash", "-c", shown(command, numbered(2))], capture_output=True)
    assert (done.returncode, told.exists()) == (code, code in (3, 137))
    assert together(command, numbered(2), grace=30)[0] == code


def test_who_ends_before_it_can_answer_is_begun_again(program, tmp_path):
    command = program(f"Path({str(tmp_path / 'ready')!r} + os.environ['NUMBER']).touch()\ntime.sleep(30)")

    def send() -> None:
        while len(list(tmp_path.glob("ready*"))) < 2:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=send, daemon=True).start()
    assert together(command, numbered(2), grace=30) == (75, [signal.SIGTERM])


def test_each_process_has_its_own_devices(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert [devices(number, None, 2) for number in range(2)] == [
        {"CUDA_VISIBLE_DEVICES": "0,1"},
        {"CUDA_VISIBLE_DEVICES": "2,3"},
    ]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,6,7")
    assert devices(2, None, 1) == {"CUDA_VISIBLE_DEVICES": "7"}
    with pytest.raises(ValueError, match="process 1 is to have 2 GPUs, but CUDA_VISIBLE_DEVICES is 5,6,7"):
        devices(1, None, 2)
    monkeypatch.setenv("XLA_FLAGS", "--xla_a=1 --xla_force_host_platform_device_count=8")
    assert devices(0, 3, None)["XLA_FLAGS"] == "--xla_a=1 --xla_force_host_platform_device_count=3"
    assert environments(Local(processes=1)) == [{}]
