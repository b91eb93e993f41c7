"""CUDA graphs: the only file that captures, launches and destroys them.

Forwards that draw no random numbers are captured raw, through NVIDIA's ``cuda.bindings`` into a
``torch.cuda.MemPool``: that disturbs no other thread, and a capture that dies leaves nothing
broken.  ``torch.cuda.CUDAGraph`` serves the others, and installations without ``cuda.bindings``.
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from hookgraph.audit import told
from hookgraph.backends import Graph, capture_surroundings
from hookgraph.errors import CaptureError
from hookgraph.private_torch import hide_capture, stream_is_capturing
from hookgraph.reasons import Fallback

try:
    from cuda.bindings import runtime
except ImportError:  # torch's CUDA 13 builds require it; older builds may lack it
    runtime = None


def _check(result: tuple[Any, ...]) -> Any:
    """The value of a call into the CUDA runtime, or its error as an exception."""
    error, *values = result
    if int(error):
        raise CaptureError(f"CUDA says {error.name}")
    return values[0] if len(values) == 1 else values


class CudaBackend:
    """Captures on one device.

    Streams: captures run on a stream of our own, since a pooled one could be in use by another
        thread, whose kernels would then land in the graph.  Launches go to the caller's current
        stream; when that changes from one turn to the next, an event orders the two, because
        graphs of one pool use the same memory.
    """

    name = "cuda"
    promises_speed = True

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = _streams.take(device)
        weakref.finalize(self, _streams.give_back, device, self._stream).atexit = False
        self._pool: torch.cuda.MemPool | None = None
        self._torch_pool: Any = None
        self._graphs = 0
        self.turn = _Turn(device)

    def refuses(self, module: torch.nn.Module) -> Fallback | None:
        return None

    def clock(self) -> DeviceClock:
        return DeviceClock(self.device)

    # -- capture -------------------------------------------------------------------------------

    def capture(
        self, call: Callable[[], Any], static_inputs: Sequence[torch.Tensor], draws_random_numbers: bool
    ) -> tuple[Graph, Any]:
        raw = runtime is not None and not draws_random_numbers
        record = self._capture_raw if raw else self._capture_with_torch
        with self.turn, torch.cuda.device(self.device), capture_surroundings(), hide_capture.active():
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(self._stream):
                self._warm_up_libraries()
                try:
                    return record(call)
                except CaptureError:
                    raise
                except Exception as error:
                    raise CaptureError(told(error)) from error

    def _warm_up_libraries(self) -> None:
        """Let cuBLAS allocate this thread's workspace for our stream outside the pool.

        It is kept for the life of the process.  Allocated inside a capture, it would lie in the
        pool, where all later graphs would share memory that dies with the first.
        """
        with torch.inference_mode(False), torch.no_grad():
            for dtype in (torch.float32, torch.bfloat16):
                matrix = torch.ones(16, 16, device=self.device, dtype=dtype)
                torch.addmm(matrix[0], matrix, matrix)

    def _capture_raw(self, call: Callable[[], Any]) -> tuple[Graph, Any]:
        mode = runtime.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        handle = self._stream.cuda_stream
        with torch.cuda.use_mem_pool(self._memory(), self.device):
            _check(runtime.cudaStreamBeginCapture(handle, mode))
            try:
                output = call()
            except BaseException:
                _, graph = runtime.cudaStreamEndCapture(handle)
                if graph is not None and int(graph):
                    runtime.cudaGraphDestroy(graph)
                runtime.cudaGetLastError()  # the error is told; the next check must not find it again
                raise
            graph = self._end_raw_capture(handle)
        try:
            nodes = _node_count(graph)
            if not nodes:
                raise CaptureError("the forward launched no kernel on this device")
            executable = _check(runtime.cudaGraphInstantiate(graph, 0))
        finally:
            runtime.cudaGraphDestroy(graph)
        return CudaGraph(_RawExecutable(executable, self), nodes), output

    def _end_raw_capture(self, handle: int) -> Any:
        error, graph = runtime.cudaStreamEndCapture(handle)
        if int(error):
            runtime.cudaGetLastError()
            raise CaptureError(f"the capture ended with {error.name}")
        return graph

    def _capture_with_torch(self, call: Callable[[], Any]) -> tuple[Graph, Any]:
        graph = torch.cuda.CUDAGraph()
        if self._torch_pool is None:
            # Not the MemPool of the raw captures: a capture that dies keeps its pool in use for ever,
            # and a MemPool that is destroyed while in use aborts the process.
            self._torch_pool = torch.cuda.graph_pool_handle()
        graph.capture_begin(pool=self._torch_pool, capture_error_mode="thread_local")
        try:
            output = call()
        except BaseException:
            self._abandon(graph)
            raise
        graph.capture_end()
        return CudaGraph(_TorchExecutable(graph, self), None), output

    def _abandon(self, graph: torch.cuda.CUDAGraph) -> None:
        """End a capture that died, and make random numbers usable again.

        After a capture that was invalidated, ``capture_end`` raises and leaves the default
        generator in capture mode: every later draw fails until another capture succeeds.
        """
        try:
            graph.capture_end()
        except Exception:  # it raises what invalidated the capture, which is on its way already
            if runtime is not None:
                runtime.cudaGetLastError()
            self._give_up_pool()
        cure = torch.cuda.CUDAGraph()
        cure.capture_begin(capture_error_mode="thread_local")
        torch.zeros(1, device=self.device)
        cure.capture_end()
        cure.reset()

    def _give_up_pool(self) -> None:
        """Take back what a dead capture holds; PyTorch's own clean-up runs only after a whole one."""
        pool, self._torch_pool = self._torch_pool, None
        if pool is not None and hasattr(torch._C, "_cuda_endAllocateToPool"):
            torch._C._cuda_endAllocateToPool(self.device.index, pool)
            torch._C._cuda_releasePool(self.device.index, pool)

    # -- memory --------------------------------------------------------------------------------

    def _memory(self) -> torch.cuda.MemPool:
        if self._pool is None:
            with torch.cuda.device(self.device):
                self._pool = torch.cuda.MemPool()
        return self._pool

    def added(self) -> None:
        """Note that one more graph lives in the pool."""
        with self.turn.lock:
            self._graphs += 1

    def removed(self) -> None:
        """Note that a graph was destroyed; with the last one goes the pool, and its memory."""
        with self.turn.lock:  # not while another thread captures into the pool
            self._graphs -= 1
            if not self._graphs:
                self._pool = self._torch_pool = None

    @property
    def pool_bytes(self) -> int:
        pools = {self._torch_pool} if self._torch_pool is not None else set()
        if self._pool is not None:
            pools.add(tuple(self._pool.id))
        return sum(
            segment["total_size"]
            for segment in (torch.cuda.memory_snapshot() if pools else ())
            if tuple(segment.get("segment_pool_id", ())) in pools
        )

    def wait(self) -> None:
        """Let the device finish all launches, so that memory they use can be given back."""
        if not stream_is_capturing():
            self.turn.synchronize()


class _Turn:
    """One user of a pool at a time, on the host by a lock and on the device by an event between streams."""

    def __init__(self, device: torch.device) -> None:
        self._index = device.index
        self.lock = threading.RLock()
        self._depth = 0
        self._last_stream: int | None = None
        with torch.cuda.device(device):
            self._finished = _TorchMark(device) if runtime is None else _RawMark()

    def __enter__(self) -> None:
        self.lock.acquire()
        self._depth += 1
        if self._depth == 1:
            try:
                self._follow_last_turn()
            except BaseException:
                self._depth -= 1
                self.lock.release()
                raise

    def __exit__(self, *_: object) -> None:
        try:
            self._depth -= 1
            if not self._depth:
                # Recorded each time: when the stream changes, the old one may no longer exist.
                self._finished.record(_current_stream(self._index))
        finally:
            self.lock.release()

    def _follow_last_turn(self) -> None:
        stream = _current_stream(self._index)
        if self._last_stream is not None and stream != self._last_stream:
            self._finished.make_wait(stream)
        self._last_stream = stream

    def synchronize(self) -> None:
        """Let the device finish the work of all turns so far."""
        self._finished.synchronize()


class DeviceClock:
    """Times work on the host, and on the device from its first kernel to its last.

    Where the host is slower than the device, the gaps between the kernels count: either way the
    longer of the two is what a call costs in a stream of calls.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __enter__(self) -> None:
        self._first, self._last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._first.record(torch.cuda.current_stream(self._device))
        self._started = time.perf_counter_ns()

    def __exit__(self, *_: object) -> None:
        self._taken = time.perf_counter_ns() - self._started
        self._last.record(torch.cuda.current_stream(self._device))

    def wall_ns(self) -> int:
        self._last.synchronize()
        return max(self._taken, int(1e6 * self._first.elapsed_time(self._last)))


def _current_stream(index: int) -> int:
    """The handle of the caller's stream; a Stream object would cost twenty times as much."""
    return int(torch._C._cuda_getCurrentRawStream(index))


class _RawMark:
    """A point in the order of device work."""

    def __init__(self) -> None:
        self._event = _check(runtime.cudaEventCreateWithFlags(runtime.cudaEventDisableTiming))

    def record(self, stream: int) -> None:
        runtime.cudaEventRecord(self._event, stream)

    def make_wait(self, stream: int) -> None:
        runtime.cudaStreamWaitEvent(stream, self._event, 0)

    def synchronize(self) -> None:
        runtime.cudaEventSynchronize(self._event)

    def __del__(self) -> None:
        if not sys.is_finalizing():
            runtime.cudaEventDestroy(self._event)


class _TorchMark:
    """The same through PyTorch, for installations without ``cuda.bindings``."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event()
        self._device = device

    def record(self, stream: int) -> None:
        self._event.record(torch.cuda.ExternalStream(stream, self._device))

    def make_wait(self, stream: int) -> None:
        torch.cuda.ExternalStream(stream, self._device).wait_event(self._event)

    def synchronize(self) -> None:
        self._event.synchronize()


class _Streams:
    """Capture streams of our own, used again by later attachments.

    cuBLAS keeps a workspace for each stream for the life of the process.  Two graphs that were
    captured on one stream share it, so attachments that are alive together never share a stream.
    """

    def __init__(self) -> None:
        self._free: dict[torch.device, list[torch.cuda.Stream]] = {}
        self._lock = threading.Lock()

    def take(self, device: torch.device) -> torch.cuda.Stream:
        with self._lock:
            free = self._free.setdefault(device, [])
            if free:
                return free.pop()
        with torch.cuda.device(device):
            if runtime is None:  # pooled, but not by the pool that most code draws from
                return torch.cuda.Stream(device, priority=-1)
            handle = _check(runtime.cudaStreamCreateWithFlags(runtime.cudaStreamNonBlocking))
            return torch.cuda.ExternalStream(int(handle), device)

    def give_back(self, device: torch.device, stream: torch.cuda.Stream) -> None:
        with self._lock:
            self._free[device].append(stream)


_streams = _Streams()


def _node_count(graph: Any) -> int:
    return int(_check(runtime.cudaGraphGetNodes(graph, 0))[-1])


class _RawExecutable:
    __slots__ = ("_executable", "_index", "backend")

    def __init__(self, executable: Any, backend: CudaBackend) -> None:
        self._executable, self.backend, self._index = executable, backend, backend.device.index

    def launch(self) -> None:
        error = runtime.cudaGraphLaunch(self._executable, _current_stream(self._index))[0]
        if int(error):
            raise CaptureError(f"cudaGraphLaunch failed with {error.name}")

    def destroy(self) -> None:
        self.backend.wait()
        runtime.cudaGraphExecDestroy(self._executable)


class _TorchExecutable:
    __slots__ = ("_graph", "backend")

    def __init__(self, graph: torch.cuda.CUDAGraph, backend: CudaBackend) -> None:
        self._graph, self.backend = graph, backend

    def launch(self) -> None:
        self._graph.replay()

    def destroy(self) -> None:
        self.backend.wait()
        self._graph.reset()


class CudaGraph:
    """An executable graph; its memory lies in the device's pool."""

    def __init__(self, executable: _RawExecutable | _TorchExecutable, operators: int | None) -> None:
        self._executable: _RawExecutable | _TorchExecutable | None = executable
        self.operators = operators
        executable.backend.added()

    def owns(self, tensor: torch.Tensor) -> bool:
        return True  # a capture executes nothing: whatever it returned is filled by a launch

    def reads_beside(self, known: Collection[int]) -> str | None:
        return None  # a capture cannot tell

    @property
    def nbytes(self) -> int:
        return 0  # counted with the pool

    def launch(self) -> None:
        if self._executable is None:
            raise RuntimeError("a graph was launched after its release")
        self._executable.launch()

    def release(self) -> None:
        executable, self._executable = self._executable, None
        if executable is not None:
            executable.destroy()
            executable.backend.removed()

    def __del__(self) -> None:
        if not sys.is_finalizing():  # the driver gives everything back by itself then
            self.release()
