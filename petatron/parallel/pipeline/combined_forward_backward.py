"""A combined forward and backward pass of two micro-batches: each computes while the other communicates.

The experts' all-to-all is in the middle of a layer, and the next operation of the same pass needs its result. Another micro-batch's
pass does not. So in the pipeline's steady state the forward of one micro-batch and the backward of another run as one action
(`schedule/gpipe_and_1f1b.py` says which), and alternate on the host: where one has started an all-to-all and is about to wait for
it, it switches to the other, which runs up to its own next wait (`mesh/overlapped_all_to_all.py` calls `switch_to_other_pass`
there).

    forward pass    attention, router |                     | experts |              | attention, ...
      in flight                       [ dispatch .......... ]         [ combine .... ]
    backward pass                     | attention, combine  |         | experts      |
      in flight                                             [ combine ]              [ dispatch ...

Autograd's backward cannot be suspended by its caller, so it gets a thread of its own. Only one of the two threads runs at any
time, and they switch at those waits alone. Hence:

- The order of all host operations, and so of all collectives on every communicator, is a function of the two passes' sequences
  of waits. Ranks that share a communicator run the same layers and the same schedule, so they issue their collectives in the
  same order, which NCCL needs.
- On a GPU both threads launch their kernels on one stream, in the order in which they alternate, and communication has streams of its own:
  a wait blocks the stream, not the host. No memory is used by two compute streams.
- Neither order changes: forwards run micro-batch by micro-batch, and so do backwards. Every sum of gradients and every random
  number (dropout, router noise) is that of a run without, to the last bit.
- State that one pass changes would be seen by the other in the middle of a layer. Only options that the config refuses have any
  (`validate/moe.py`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from enum import Enum

import torch


class _PassKind(Enum):
    FORWARD = 0
    BACKWARD = 1

    @property
    def other(self) -> _PassKind:
        return _PassKind(1 - self.value)


class _PassStopped(Exception):
    """Ends a pass because the other one has failed."""


class CombinedForwardBackward:
    """Runs a forward and a backward pass alternately. One object serves all layers and the pipeline of a rank."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._alternation: _PassAlternation | None = None

    def switch_to_other_pass(self) -> None:
        """Lets the other pass run up to its next wait; returns at once where there is no other."""
        if self._alternation is not None:
            self._alternation.switch_to_other_pass()

    def run(self, forward: Callable[[], None], backward: Callable[[], None]) -> None:
        """Runs both passes to their end, the forward pass first; raises what either of them raises."""
        assert self._alternation is None, "two passes are combined already"
        self._alternation = alternation = _PassAlternation()
        stream = torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None

        def run_backward() -> None:
            with ExitStack() as contexts:  # current device and stream are per thread
                if stream is not None:
                    contexts.enter_context(torch.cuda.device(self._device))
                    contexts.enter_context(torch.cuda.stream(stream))
                alternation.run(_PassKind.BACKWARD, backward)

        thread = threading.Thread(target=run_backward, name="backward", daemon=True)
        thread.start()
        try:
            alternation.run(_PassKind.FORWARD, forward)
            alternation.wait_for_both()
        finally:
            alternation.stop()
            thread.join()
            self._alternation = None
        if alternation.error is not None:
            raise alternation.error


class _PassAlternation:
    """Alternates two threads. The thread that creates this object runs the forward pass; every other thread belongs to the
    backward pass: autograd runs it in threads of its own where the tensors are on a GPU."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._forward_thread = threading.get_ident()
        self._turn = _PassKind.FORWARD
        self._done: set[_PassKind] = set()
        self._stopped = False
        self.error: BaseException | None = None

    def run(self, kind: _PassKind, pass_function: Callable[[], None]) -> None:
        """Runs one of the passes, whenever the other one yields."""
        try:
            self._wait_for_turn(kind)
            pass_function()
        except _PassStopped:
            pass
        except BaseException as error:
            self.error = error if self.error is None else self.error
            self._stopped = True
        finally:
            with self._changed:
                self._done.add(kind)
                self._turn = kind.other
                self._changed.notify_all()

    def switch_to_other_pass(self) -> None:
        kind = _PassKind.FORWARD if threading.get_ident() == self._forward_thread else _PassKind.BACKWARD
        with self._changed:
            if kind.other not in self._done:
                self._turn = kind.other
                self._changed.notify_all()
        self._wait_for_turn(kind)

    def _wait_for_turn(self, kind: _PassKind) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._turn is kind or kind.other in self._done)
            if self._stopped:
                raise _PassStopped

    def wait_for_both(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: len(self._done) == len(_PassKind))

    def stop(self) -> None:
        """Ends a pass that is still running, at its next wait."""
        with self._changed:
            self._stopped = True
            self._turn = _PassKind.BACKWARD
            self._changed.notify_all()
