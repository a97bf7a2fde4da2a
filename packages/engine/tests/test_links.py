"""Transports and what rides on them: order, fullness, wrap-around, losses, dead peers. Both transports keep the same promises."""

import subprocess
import sys
import tempfile
import textwrap
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo_core.errors import ConfigError, FrameError
from octavo_core.testing.patience import PATIENCE_S
from octavo_core.wire import FrameKind
from octavo_engine._src.process import transport
from octavo_engine._src.process.bell import Bell, Ringer
from octavo_engine._src.process.folders import user_folder
from octavo_engine._src.process.link import PART_BYTES, Incoming, Outgoing
from octavo_engine._src.process.transport import NUM_SLOTS, SLOT_BYTES, choose, open_transport


@pytest.fixture(params=["iceoryx2", "sockets"])
def ends(request, tmp_path):
    """Both ends of a direction."""
    made = open_transport(request.param, tmp_path)
    name = f"test-{time.monotonic_ns()}"
    sender, receiver = made.sender(name), made.receiver(name)
    wait_for(lambda: sender.send(b"hello"))
    assert wait_for(receiver.receive) == b"hello"
    yield sender, receiver
    sender.close()
    receiver.close()
    made.close()


def wait_for(what, timeout_s=PATIENCE_S):
    deadline = time.monotonic() + timeout_s
    while not (found := what()):
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.001)
    return found


def fill(sender) -> int:
    """Send until there is no room; how many frames the system keeps of sockets is its own affair."""
    count = 0
    while sender.send(count.to_bytes(4, "little") * (SLOT_BYTES // 4)):
        count += 1
        assert count < 100 * NUM_SLOTS
    return count


def test_a_full_receiver_is_told_and_nothing_is_overwritten(ends) -> None:
    sender, receiver = ends
    count = fill(sender)
    assert count >= 4
    assert not sender.send(b"one more")
    frames = [wait_for(receiver.receive) for _ in range(count)]
    assert [int.from_bytes(frame[:4], "little") for frame in frames] == list(range(count))
    assert receiver.receive() is None
    wait_for(lambda: sender.send(b"room again"))
    assert wait_for(receiver.receive) == b"room again"


def test_the_ring_wraps_around_many_times_and_keeps_the_order(ends) -> None:
    sender, receiver = ends
    for number in range(NUM_SLOTS * 20):
        wait_for(lambda n=number: sender.send(n.to_bytes(4, "little")))
        assert int.from_bytes(wait_for(receiver.receive), "little") == number


def test_a_lapped_reader_gets_everything_in_order_once_it_reads_again(ends) -> None:
    sender, receiver = ends
    outgoing, incoming = Outgoing(sender), Incoming(receiver)
    incoming._sequence = outgoing._sequence = 0
    texts = [bytes([n % 251]) * (n * 97 % (3 * PART_BYTES)) for n in range(200)]
    for text in texts:
        outgoing.post(FrameKind.ABORT, text)
    assert outgoing.backlog_bytes > 0
    got = []
    deadline = time.monotonic() + PATIENCE_S
    while len(got) < len(texts):
        assert time.monotonic() < deadline
        got += [payload for _, payload in incoming.messages()]
        outgoing.flush()
    assert got == texts
    assert (outgoing.backlog_bytes, outgoing.stalled_s) == (0, 0.0)


class _Memory:
    """A transport end in memory that loses or damages what it is told to."""

    def __init__(self, room=10**9):
        self.frames, self.room = [], room

    def send(self, frame):
        if len(self.frames) >= self.room:
            return False
        self.frames.append(frame)
        return True

    def receive(self):
        return self.frames.pop(0) if self.frames else None

    def close(self):
        pass


@settings(max_examples=30)
@given(st.lists(st.binary(max_size=3 * PART_BYTES // 64).map(lambda b: b * 64), min_size=1, max_size=6), st.integers(1, 4))
def test_messages_of_any_length_come_back_whole_however_little_room_there_is(payloads, room) -> None:
    memory = _Memory(room)
    outgoing, incoming = Outgoing(memory), Incoming(memory)
    got = []
    for payload in payloads:
        outgoing.post(FrameKind.ABORT, payload, request=7, step=9)
    while len(got) < len(payloads):
        for header, payload in incoming.messages():
            assert (header.request, header.step) == (7, 9)
            got.append(payload)
        outgoing.flush()
    assert got == payloads


@given(st.integers(0, 8), st.booleans())
def test_a_lost_or_repeated_frame_is_an_error_never_a_wrong_message(at, is_lost) -> None:
    memory = _Memory()
    outgoing, incoming = Outgoing(memory), Incoming(memory)
    for number in range(10):
        outgoing.post(FrameKind.ABORT, bytes([number]))
    memory.frames[at : at + 1] = [] if is_lost else [memory.frames[at]] * 2
    got = []
    with pytest.raises(FrameError, match="frames were lost"):
        got.extend(payload[0] for _, payload in incoming.messages())
    assert got in ([], list(range(at)), list(range(at + 1)))


def test_a_message_without_end_is_refused(monkeypatch) -> None:
    monkeypatch.setattr("octavo_engine._src.process.link.MAX_MESSAGE_BYTES", 4 * PART_BYTES)
    memory = _Memory()
    Outgoing(memory).post(FrameKind.ABORT, bytes(5 * PART_BYTES))
    with pytest.raises(FrameError, match="at most"):
        list(Incoming(memory).messages())


def test_a_bell_wakes_a_sleeper_and_tells_when_it_is_gone(tmp_path) -> None:
    import select

    bell, ringer = Bell(tmp_path / "bell"), Ringer(tmp_path / "bell")
    assert all(ringer.ring() for _ in range(10_000)), "a bell nobody listens to is no dead peer"
    assert select.select([bell], [], [], 0)[0]
    bell.silence()
    assert not select.select([bell], [], [], 0)[0]
    threading.Timer(0.05, ringer.ring).start()
    assert select.select([bell], [], [], PATIENCE_S)[0]
    bell.close()
    assert not ringer.ring()
    ringer.close()


def test_shared_memory_of_a_killed_process_is_given_back_at_the_next_start(monkeypatch) -> None:
    with tempfile.TemporaryDirectory(prefix="octavo-", dir="/tmp") as name:
        monkeypatch.setenv("XDG_RUNTIME_DIR", name)
        _kill_and_clean()


def _kill_and_clean() -> None:
    program = textwrap.dedent("""
        import os, signal
        from octavo_engine._src.process.transport import Iceoryx
        made = Iceoryx()
        ends = made.sender("doomed"), made.receiver("doomed")
        assert ends[0].send(b"x")
        os.kill(os.getpid(), signal.SIGKILL)
    """)
    assert subprocess.run([sys.executable, "-c", program]).returncode == -9
    nodes = user_folder() / "nodes"
    assert list(nodes.iterdir())
    cleaner = transport.Iceoryx()
    cleaner.clean()
    cleaner.close()
    del cleaner
    assert not [path for path in nodes.iterdir() if path.is_dir()]


def test_without_iceoryx2_the_other_transport_is_used_and_said_so(monkeypatch) -> None:
    assert choose("auto") == ("iceoryx2", "lock-free shared memory")
    assert choose("sockets") == ("sockets", "--ipc")
    monkeypatch.setitem(sys.modules, "iceoryx2", None)
    kind, why = choose("auto")
    assert kind == "sockets"
    assert "iceoryx2 cannot be imported" in why
    with pytest.raises(ConfigError, match="use --ipc sockets"):
        choose("iceoryx2")
