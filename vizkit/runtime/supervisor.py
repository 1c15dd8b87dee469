"""Watches the ranks of one launch: shows what they print, gathers results, notices failures and hangs, stops them."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable, Collection
from typing import Any, NoReturn

from vizkit.errors import CollectiveMismatchError, RankFailedError, RanksStuckError
from vizkit.runtime import diagnosis, transport
from vizkit.runtime.board import Board, create_board
from vizkit.runtime.live_state import LiveSummary, LiveView
from vizkit.runtime.live_watch import LiveWatch, watch_of
from vizkit.runtime.nursery import Nursery
from vizkit.runtime.output import Transcript
from vizkit.runtime.processes import exit_text, processor_ticks
from vizkit.runtime.progress import NoBar, PatientBar, bar_for_this_place
from vizkit.runtime.rank_handle import RankHandle
from vizkit.runtime.worker import STACK_SIGNAL, Failure, Message, Setup
from vizkit.runtime.worker import main as rank_main

POLL_S = 0.05
QUIET_S = 0.8  # no rank has entered or left a communication for so long: look whether one still can
OVERTIME_S = 2.0  # beyond its timeout a communication should have been ended by the backend
GRACE_S = 0.4  # after a first failure, for the one that caused it to be heard too
STOP_S = 1.0  # from asking a rank to stop until it is killed
STOP_ANSWER_S = 3.0  # for a rank that has been asked to stop and can hear, to hand over its record
READ_BYTES = 1 << 16
READS_A_VISIT = 32


class Supervisor:
    """Runs one launch from first to last; use it as a context manager, so that no rank outlives it."""

    def __init__(self, nursery: Nursery, setups: list[Setup], call: int, view: LiveView | None = None) -> None:
        self._nursery = nursery
        self._setups = setups
        self._call = call
        self._handles: list[RankHandle] = []
        self._answers: dict[int, int] = {}
        self._selector = selectors.DefaultSelector()
        self._transcript = Transcript(len(setups), (sys.stdout, sys.stderr))
        self._bar = PatientBar(NoBar() if view else bar_for_this_place())
        self._board_file = transport.anonymous_file("board")
        create_board(len(setups), self._board_file)
        self._board = Board(self._board_file, len(setups))
        self._watch = watch_of(view, self._board, self._board_file, len(setups)) if view else None
        self.summary: LiveSummary | None = None
        self.stopped = ""  # how the ranks ended, where somebody pressed Stop
        self._fingerprint = b""
        self._changed_s = time.monotonic()
        self._killed: list[int] = []

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        with contextlib.ExitStack() as ending:  # runs the last part first, and all of them whatever one raises
            for part in (self._close_files, self._close_watch, self._show_all, self._bar.close):
                ending.callback(part)
            self.stop()
            if isinstance(error, KeyboardInterrupt) and not error.args:
                error.args = (diagnosis.stop_text(self._killed),)

    def _close_watch(self) -> None:
        if self._watch:
            self.summary = self._watch.close()

    def _close_files(self) -> None:
        for handle in self._handles:
            for descriptor in (*handle.outputs, handle.stacks):
                os.close(descriptor)
            handle.channel.close()
        for descriptor in (self._board_file, *self._answers.values()):
            os.close(descriptor)
        self._selector.close()

    @property
    def logs(self) -> list[str]:
        return ["".join(f"{line}\n" for line in lines) for lines in self._transcript.logs]

    def start(self) -> None:
        for setup in self._setups:
            self._start(setup)

    def _start(self, setup: Setup) -> None:
        here, there = socket.socketpair()
        try:
            process = self._nursery.start(rank_main, (there,), f"vizkit-rank-{setup.rank}")
            stacks = transport.anonymous_file("stacks")
            self._handles.append(handle := RankHandle(setup.rank, process, here, stacks))
        except BaseException:
            here.close()  # a rank that has been born already ends when it finds nobody here
            raise
        finally:
            there.close()
        self._hand_over(handle, setup)

    def _hand_over(self, handle: RankHandle, setup: Setup) -> None:
        """Send a new rank all that it needs, and listen to it from now on."""
        pipes = [os.pipe(), os.pipe()]
        described = transport.pack(setup, "setup")
        files = {
            Message.SETUP: described,
            Message.CALL: self._call,
            Message.BOARD: self._board_file,
            Message.STACKS: handle.stacks,
            Message.STDOUT: pipes[0][1],
            Message.STDERR: pipes[1][1],
        }
        with contextlib.suppress(ConnectionError):  # a rank that is dead already is reported by its exit
            for tag, descriptor in files.items():
                transport.send_file(handle.channel, tag, descriptor)
        os.close(described)
        for stream, (reader, writer) in enumerate(pipes):
            os.close(writer)
            os.set_blocking(reader, False)
            handle.outputs[reader] = stream
            self._selector.register(reader, selectors.EVENT_READ, handle)
        self._selector.register(handle.channel, selectors.EVENT_READ, handle)
        self._selector.register(handle.process.sentinel, selectors.EVENT_READ, handle)

    def wait(self) -> list[Any]:
        """What each rank answered, in order of ranks: result and record, both None where Stop left a rank without.

        Raises `RankFailedError`, `RanksStuckError`, or `TransportError` for a result that cannot be built again here.
        """
        while not all(handle.answered for handle in self._handles):
            self._step()
            if any(handle.failure or handle.exited for handle in self._handles):
                self._raise_failure()
            if self._watch and self._watch.is_stop_wanted:
                self._stop_on_request(self._watch)
                break
            self._look_for_hang()
            self._look_for_overtime()
        answers = [
            transport.unpack_result(h.rank, self._answers[h.rank]) if h.answered else (None, None)
            for h in self._handles
        ]
        if self.stopped:
            ends = [answer for answer, _ in answers if isinstance(answer, Failure)]  # of ranks that were stopped
            self.stopped += diagnosis.own_failures_text([*ends, *(h.failure for h in self._handles if h.failure)])
        return [(None if isinstance(answer, Failure) else answer, record) for answer, record in answers]

    def _step(self) -> None:
        epochs = [self._board.posted_by(handle.rank) for handle in self._handles]
        # epochs first, pipes second: whatever a rank printed before it entered an epoch is in its pipe by then
        events = self._selector.select(POLL_S)
        for handle, epoch in zip(self._handles, epochs, strict=True):
            if self._drain(handle):
                self._transcript.advance(handle.rank, epoch)
        self._transcript.show()
        self._bar.update(self._board.progress_of(handle.rank) for handle in self._handles)
        if self._watch:
            self._watch.look([handle.process.pid for handle in self._handles])
        for key, _ in events:
            handle = key.data
            if key.fileobj is handle.channel:
                self._hear(handle)
            elif key.fileobj == handle.process.sentinel:
                self._hear(handle)
                handle.exited = not handle.over
                with contextlib.suppress(KeyError):
                    self._selector.unregister(handle.process.sentinel)

    def _drain(self, handle: RankHandle) -> bool:
        """Read what a rank has written; False where it writes faster than one visit can read."""
        drained = [self._read(handle, descriptor, stream) for descriptor, stream in list(handle.outputs.items())]
        return all(drained)

    def _read(self, handle: RankHandle, descriptor: int, stream: int) -> bool:
        for _ in range(READS_A_VISIT):
            try:
                data = os.read(descriptor, READ_BYTES)
            except BlockingIOError:
                return True
            self._transcript.feed(handle.rank, stream, data)
            if not data:
                self._selector.unregister(descriptor)
                os.close(descriptor)
                del handle.outputs[descriptor]
                return True
        return False

    def _show_all(self) -> None:
        """Show what ranks that have ended have left to show."""
        for handle in self._handles:
            while not self._drain(handle):
                pass
            self._transcript.end(handle.rank)
        self._transcript.show()

    def _hear(self, handle: RankHandle) -> None:
        """Take what a rank has sent, if anything."""
        if handle.channel.fileno() not in self._selector.get_map():
            return
        handle.channel.setblocking(False)
        try:
            message = transport.receive_file(handle.channel)
        except BlockingIOError:
            return
        except ConnectionError:
            message = None
        self._selector.unregister(handle.channel)
        if message is None:
            return
        tag, descriptor = message
        if tag in (Message.RESULT, Message.STOPPED):
            self._answers[handle.rank] = descriptor
            handle.answered = True
            while not self._drain(handle):
                pass
            self._transcript.end(handle.rank)
        else:
            handle.failure = transport.unpack(descriptor)
            os.close(descriptor)

    # ---- what went wrong -------------------------------------------------------------------------------------------

    def _raise_failure(self) -> NoReturn:
        deadline = time.monotonic() + GRACE_S
        while time.monotonic() < deadline and not all(handle.over for handle in self._handles):
            self._step()
        fates = self._fates()
        failures = [handle.failure for handle in self._handles if handle.failure]
        causes = [failure for failure in failures if not diagnosis.is_consequence(failure)]
        exited = [handle.rank for handle in self._handles if handle.exited]
        if not causes and not exited and any(map(diagnosis.is_timeout, failures)):
            self._raise_stuck(timed_out=True)
        if exited and not causes:
            rank, text, shown = exited[0], "", f"rank {exited[0]} {fates[exited[0]]}"
        else:
            first = min(causes or failures, key=lambda failure: failure.time_ns)
            rank, text = first.rank, diagnosis.traceback_text(first)
            shown = diagnosis.failure_text(first)
            is_mismatch = first.last.type_name.endswith(CollectiveMismatchError.__name__)
            if is_mismatch and (found := diagnosis.misfit(rank, self._board.snapshots())):
                rank, shown = found
        consequences = {failure.rank for failure in failures if diagnosis.is_consequence(failure)}
        self._raise(RankFailedError, rank, shown, text, fates, [], consequences)

    def _fates(self) -> dict[int, str]:
        fates = {}
        for handle in self._handles:
            if handle.failure:
                fates[handle.rank] = f"raised {diagnosis.short(diagnosis.exception_line(handle.failure.last))}"
            elif handle.answered:
                fates[handle.rank] = "returned"
            elif handle.exited:
                handle.process.join(STOP_S)
                fates[handle.rank] = exit_text(handle.process.exitcode)
        return fates

    def _look_for_overtime(self) -> None:
        """While it connects, gloo waits several times as long as it was told to."""
        now = time.monotonic()
        for handle, setup in zip(self._handles, self._setups, strict=True):
            wait = self._board.wait_of(handle.rank)
            if wait is None or handle.over or wait != handle.wait:
                handle.wait, handle.waits_since_s = wait, now
            elif now - handle.waits_since_s > setup.timeout_s + OVERTIME_S:
                self._raise_stuck(timed_out=True)

    def _look_for_hang(self) -> None:
        fingerprint = self._board.fingerprint()
        now = time.monotonic()
        if fingerprint != self._fingerprint:
            self._fingerprint, self._changed_s = fingerprint, now
            for handle in self._handles:
                handle.processor_ticks = -1
        elif now - self._changed_s > QUIET_S:
            ticks = {handle: processor_ticks(handle.process.pid) for handle in self._handles}
            idle = [handle.rank for handle, used in ticks.items() if used == handle.processor_ticks]
            gone = [handle.rank for handle in self._handles if handle.over]
            if diagnosis.doomed(self._board.snapshots(), idle, gone) and fingerprint == self._board.fingerprint():
                self._raise_stuck(timed_out=False)
            for handle, used in ticks.items():
                handle.processor_ticks = used
            self._changed_s = now

    def _raise_stuck(self, timed_out: bool) -> NoReturn:
        snapshots = self._board.snapshots()
        fates = {rank: fate for rank, fate in self._fates().items() if not (timed_out and fate.startswith("raised"))}
        everyone = [handle.rank for handle in self._handles]
        standing = diagnosis.revived(snapshots) if timed_out else snapshots
        stuck = diagnosis.doomed(standing, everyone, fates, is_over=True)
        if stuck:
            rank, words = diagnosis.at_fault(stuck), diagnosis.stuck_text(stuck, snapshots, fates)
            shown = f"the ranks wait for each other and would do so for ever: {words}"
        else:
            rank, words = diagnosis.slowest_rank(snapshots), diagnosis.timeout_text(snapshots)
            shown = f"a communication took longer than timeout_s={self._setups[0].timeout_s:g} allows: {words}"
        remedy = (
            "every rank of a group has to enter the same communications in the same order; look at the rank named first"
            if stuck
            else "raise timeout_s if that rank is only slow"
        )
        self._raise(RanksStuckError, rank, f"{shown}; {remedy}", "", fates, stuck, set())

    def _raise(
        self,
        error: type[RankFailedError],
        rank: int,
        shown: str,
        remote_traceback: str,
        fates: dict[int, str],
        stuck: list[diagnosis.Blocked],
        consequences: set[int],
    ) -> NoReturn:
        snapshots = self._board.snapshots()
        stacks = self._stacks([handle for handle in self._handles if not handle.over])
        # a rank that is blocked inside the backend cannot hear that it should stop
        deaf = {blocked.rank for blocked in stuck} | {s.rank for s in snapshots if s.waiting}
        self.stop(deaf)
        self._show_all()
        for other in consequences:
            fates[other] += " (a consequence)"
        for other in self._killed:
            fates[other] = f"{fates.get(other, 'running')} (did not stop when asked, was killed)"
        found = diagnosis.reports(snapshots, fates, stuck, stacks)
        parts = [shown, *([f"\n{remote_traceback}\n"] if remote_traceback else [])]
        parts += [f"  {report}" for report in sorted(found, key=lambda report: (report.rank != rank, report.rank))]
        raise error("\n".join(parts), rank=rank, ranks=found, logs=self.logs, remote_traceback=remote_traceback)

    def _stacks(self, handles: list[RankHandle]) -> dict[int, str]:
        for handle in handles:
            self._signal(handle, STACK_SIGNAL)
        deadline = time.monotonic() + GRACE_S
        found = {handle.rank: "" for handle in handles}
        while time.monotonic() < deadline and not all(found.values()):
            time.sleep(POLL_S / 2)
            for handle in handles:
                found[handle.rank] = os.pread(handle.stacks, 1 << 20, 0).decode(errors="replace")
        return found

    # ---- the end ---------------------------------------------------------------------------------------------------

    def stop(self, deaf: Collection[int] = ()) -> None:
        """End all ranks: let go those that are done, kill `deaf` ones, ask the others, and kill them after a moment."""
        for handle in self._handles:
            with contextlib.suppress(OSError):
                handle.channel.shutdown(socket.SHUT_WR)  # a rank that is done waits for this
            if handle.rank in deaf:
                self._signal(handle, signal.SIGKILL)
            elif not handle.over:
                self._signal(handle, signal.SIGTERM)
        deadline = time.monotonic() + STOP_S
        try:
            for handle in self._handles:
                while handle.process.is_alive() and time.monotonic() < deadline:
                    handle.process.join(POLL_S / 5)
                    self._drain(handle)  # a rank that is blocked on a full pipe could not leave
        finally:  # also where somebody interrupts a second time
            for handle in self._handles:
                self._kill(handle)

    def _kill(self, handle: RankHandle) -> None:
        """End a rank that has not ended, and whatever it has started."""
        if handle.process.is_alive():
            handle.process.kill()
            self._killed.append(handle.rank)
        if handle.process.pid:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(handle.process.pid, signal.SIGKILL)
        handle.process.join()

    def _stop_on_request(self, watch: LiveWatch) -> None:
        """End after a step that all ranks do; where that takes long, ask who computes, then free who waits."""
        self._give_time(watch.ask_to_stop(), lambda handle: handle.over)
        late = [handle for handle in self._handles if not handle.over and not watch.has_stopped(handle.rank)]
        for handle in late:
            self._signal(handle, signal.SIGTERM)
        self._give_time(STOP_ANSWER_S, lambda handle: handle.over or self._board.waiting_of(handle.rank) is not None)
        if late and any(handle.over for handle in self._handles):
            for handle in self._handles:
                if handle.over:  # its end ends the waits of those who wait for it
                    with contextlib.suppress(OSError):
                        handle.channel.shutdown(socket.SHUT_WR)
            self._give_time(STOP_ANSWER_S, lambda handle: handle.over)
        deaf = [handle.rank for handle in self._handles if not handle.over]
        self.stop(deaf)
        self._killed = sorted({*self._killed, *deaf})
        self.stopped = diagnosis.stop_text(self._killed)

    def _give_time(self, seconds: float, is_settled: Callable[[RankHandle], bool]) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not all(map(is_settled, self._handles)):
            self._step()

    def _signal(self, handle: RankHandle, number: signal.Signals) -> None:
        if handle.process.pid and handle.process.is_alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(handle.process.pid, number)
