"""TensorRTNetwork with plans of the fake TensorRT, which computes their ONNX networks."""

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import onnxruntime
import pytest
import torch
from cosyvoice_triton import stacks
from cosyvoice_triton.errors import UnavailableError
from cosyvoice_triton.runtimes import plans, tensorrt
from cosyvoice_triton.runtimes.plans import Key, Machine, PlanError
from cosyvoice_triton.runtimes.streams import HostStream
from cosyvoice_triton.runtimes.tensorrt import TensorRTNetwork
from cosyvoice_triton.runtimes.workloads import Serving, Workload
from torch import Tensor

from tests.support import fake_tensorrt, tiny_onnx

HERE = Machine("NVIDIA Test", "9.0", f"tensorrt {fake_tensorrt.__version__}")
Inputs = dict[str, Tensor]


@pytest.fixture
def trt(monkeypatch: pytest.MonkeyPatch) -> fake_tensorrt.State:
    return fake_tensorrt.install(monkeypatch)


@pytest.fixture
def engine(trt: fake_tensorrt.State, tmp_path: Path) -> Callable[..., bytes]:
    """Builds a plan of the dit stack by its use; returns its bytes."""
    model_dir = tiny_onnx.write_stack(tmp_path, stacks.DIT)

    def make(use: str = "whole", precision: str = "float32") -> bytes:
        workload = workload_of(use, precision)
        return fake_tensorrt.plan(model_dir / workload.onnx, workload)

    return make


def workload_of(use: str, precision: str = "float32") -> Workload:
    return next(w for w in Serving(precision).workloads(stacks.DIT) if w.use == use)


def estimator_inputs(frames: int, seed: int = 0) -> Inputs:
    g = torch.Generator().manual_seed(seed)
    x, mu, cond = torch.randn(3, 2, 80, frames, generator=g)
    mask = torch.ones(2, 1, frames)
    mask[1, :, frames // 2 :] = 0
    return {
        "x": x,
        "mask": mask,
        "mu": mu,
        "t": torch.rand(2, generator=g),
        "spks": torch.randn(2, 80, generator=g),
        "cond": cond,
    }


def chunk_inputs(rows: int, frames: int, cached: int) -> Inputs:
    g = torch.Generator().manual_seed(frames)
    x, mu, cond = torch.randn(3, rows, 80, frames, generator=g)
    t, spks = torch.rand(rows, generator=g), torch.randn(rows, 80, generator=g)
    caches = {"cnn_cache": torch.randn(2, rows, 8, 2), "att_cache": torch.randn(2, rows, 2, cached, 4)}
    return {"x": x, "mu": mu, "t": t, "spks": spks, "cond": cond} | caches


def by_onnxruntime(path: Path, inputs: Inputs) -> dict[str, Tensor]:
    session = onnxruntime.InferenceSession(str(path))
    names = [output.name for output in session.get_outputs()]
    outputs = session.run(names, {name: x.numpy() for name, x in inputs.items()})
    return {name: torch.from_numpy(x) for name, x in zip(names, outputs, strict=True)}


@pytest.mark.parametrize("precision, tolerance", [("float32", 1e-6), ("float16", 1e-2), ("bfloat16", 5e-2)])
def test_outputs_equal_those_of_the_onnx_file(
    engine: Callable[..., bytes], tmp_path: Path, precision: str, tolerance: float
) -> None:
    network = TensorRTNetwork(engine("whole", precision), "whole", "cpu")
    for frames in (2, 17, 100):
        inputs = estimator_inputs(frames)
        expected = by_onnxruntime(tmp_path / workload_of("whole").onnx, inputs)
        found = network.run(inputs)
        assert found.keys() == expected.keys() and found["estimator_out"].dtype == getattr(torch, precision)
        torch.testing.assert_close(
            found["estimator_out"].float(), expected["estimator_out"], rtol=tolerance, atol=tolerance
        )


def test_caches_may_be_empty_and_grow(engine: Callable[..., bytes], tmp_path: Path) -> None:
    network = TensorRTNetwork(engine("chunk"), "chunk", "cpu")
    for rows, frames, cached in ((2, 4, 0), (4, 10, 7), (2, 6, 100)):
        inputs = chunk_inputs(rows, frames, cached)
        found = network.run(
            {name: x.transpose(0, 1).contiguous().transpose(0, 1) for name, x in inputs.items() if x.ndim > 1}
            | {"t": inputs["t"]}
        )
        for name, expected in by_onnxruntime(tmp_path / workload_of("chunk").onnx, inputs).items():
            torch.testing.assert_close(found[name], expected)
        assert found["new_att_cache"].shape == (2, rows, 2, cached + frames, 4)
    assert network.limits.least["att_cache"] == (2, 2, 2, 0, 4)
    assert network.limits.most["att_cache"] == (2, 32, 2, 1600, 4) and network.limits.most["x"] == (32, 80, 206)


def test_only_the_request_outside_the_profile_is_refused(engine: Callable[..., bytes], tmp_path: Path) -> None:
    network = TensorRTNetwork(engine(), "whole", "cpu", contexts=2, timeout=30)
    served, refused, failed = [], [], []

    def run(number: int) -> None:
        try:
            frames = 8000 if number == 5 else 10 + number
            inputs = estimator_inputs(frames, seed=number)
            expected = by_onnxruntime(tmp_path / workload_of("whole").onnx, inputs)["estimator_out"]
            torch.testing.assert_close(network.run(inputs)["estimator_out"], expected)
            served.append(number)
        except ValueError as error:
            refused.append((number, str(error)))
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert failed == [] and len(served) == 15
    assert [number for number, _ in refused] == [5] and "(2, 80, 8000)" in refused[0][1]


def test_a_failed_run_does_not_affect_later_ones(engine: Callable[..., bytes], trt: fake_tensorrt.State) -> None:
    network = TensorRTNetwork(engine(), "whole", "cpu")
    trt.runs_fail = 1
    with pytest.raises(RuntimeError, match="did not run: .*an illegal memory access"):
        network.run(estimator_inputs(4))
    for _ in range(3):
        network.run(estimator_inputs(4))
    assert trt.contexts == network.contexts()[0] == 1


@pytest.mark.parametrize(
    "call, answer, message",
    [
        ("set_optimization_profile_async", False, "refuses its profile"),
        ("set_input_shape", False, r"TensorRT refuses x \(2, 80, 4\): TensorRT gave no reason"),
        ("infer_shapes", ["x"], "cannot infer the shape of x"),
        ("set_tensor_address", False, "TensorRT refuses the address of x"),
        ("execute_async_v3", False, "TensorRT did not run"),
    ],
)
def test_every_failure_that_tensorrt_returns_is_an_error(
    engine: Callable[..., bytes], monkeypatch: pytest.MonkeyPatch, call: str, answer: object, message: str
) -> None:
    monkeypatch.setattr(fake_tensorrt.IExecutionContext, call, lambda *_: answer)
    with pytest.raises(RuntimeError, match=message):
        TensorRTNetwork(engine(), "whole", "cpu").run(estimator_inputs(4))


def test_contexts_that_do_not_fit_into_memory_are_an_error(
    engine: Callable[..., bytes], trt: fake_tensorrt.State
) -> None:
    trt.context_memory = 2
    with pytest.raises(UnavailableError, match="no memory for another TensorRT context: .*GPU memory could not"):
        TensorRTNetwork(engine(), "whole", "cpu", contexts=3)
    assert trt.contexts == 0


def test_a_plan_that_tensorrt_refuses_is_an_error_with_its_own_reason(
    engine: Callable[..., bytes], trt: fake_tensorrt.State
) -> None:
    data = engine()
    TensorRTNetwork(data, "first", "cpu")
    trt.machine = "NVIDIA Other 8.9"
    for plan in (b"garbage", data):
        with pytest.raises(PlanError, match="refuses the plan of second: the engine plan file is of"):
            TensorRTNetwork(plan, "second", "cpu")


def test_a_plan_is_loaded_only_where_it_fits(
    engine: Callable[..., bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workload = workload_of("whole")
    plans.write(tmp_path, Key.of(workload, tmp_path, HERE), engine(), 1.0, error=0.001)
    monkeypatch.setattr(Machine, "here", classmethod(lambda cls, device: HERE))
    network = TensorRTNetwork.load(workload, tmp_path, "cpu")
    assert network.run(estimator_inputs(4))["estimator_out"].shape == (2, 80, 4)
    elsewhere = Machine("NVIDIA L20", "8.9", HERE.tensorrt)
    monkeypatch.setattr(Machine, "here", classmethod(lambda cls, device: elsewhere))
    with pytest.raises(PlanError, match="GPU: built for NVIDIA Test, here NVIDIA L20"):
        TensorRTNetwork.load(workload, tmp_path, "cpu")


class ThreadStream(HostStream):
    """A stream that works asynchronously, in a thread, like a GPU."""

    def __init__(self, state: fake_tensorrt.State) -> None:
        self.handle = id(self)
        self.journal: list[str] = []
        self._held: set[int] = set()
        self._work: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._loop)
        self._thread.start()
        state.streams[self.handle] = self

    def _loop(self) -> None:
        while (job := self._work.get()) is not None:
            job()

    def enqueue(self, addresses: set[int], job: Callable[[], None]) -> None:
        assert addresses - self._held == set(), "memory that may be freed before the work is done"
        self.journal.append("work")
        self._work.put(job)

    @contextmanager
    def called_from(self, caller: object) -> Iterator[None]:
        try:
            yield
        finally:
            done = threading.Event()
            self._work.put(done.set)
            assert done.wait(timeout=30)
            self.journal.append("caller waits")

    def follow(self, tensors: Iterable[Tensor]) -> None:
        self._held = {tensor.data_ptr() for tensor in tensors}
        self.journal.append("follows")

    def drain(self) -> None:
        self.journal.append("drained")

    def close(self) -> None:
        self._work.put(None)
        self._thread.join(timeout=30)


def test_work_runs_between_earlier_and_later_work_of_its_caller_even_after_an_error(
    engine: Callable[..., bytes], trt: fake_tensorrt.State, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stream = ThreadStream(trt)
    monkeypatch.setattr(tensorrt, "stream_on", lambda device: stream)
    try:
        network = TensorRTNetwork(engine(), "whole", "cpu")
        inputs = estimator_inputs(50)
        expected = by_onnxruntime(tmp_path / workload_of("whole").onnx, inputs)["estimator_out"]
        torch.testing.assert_close(network.run(inputs)["estimator_out"], expected)
        assert stream.journal == ["follows", "work", "caller waits"]
        trt.runs_fail = 1
        with pytest.raises(RuntimeError, match="did not run"):
            network.run(inputs)
        assert stream.journal[3:] == ["follows", "caller waits", "drained"]
    finally:
        stream.close()
