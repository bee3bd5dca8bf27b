"""A tensor passes through values of several workers: right, or an error; and nothing is left."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from telegrad import autograd, rpc
from telegrad.rpc import relays
from telegrad.rpc.current import current_node
from telegrad.rpc.errors import LostWithWorker
from telegrad.rpc.reference_messages import ReferenceId
from telegrad.rpc.relays import Course, read_course, write_ticket
from telegrad.testing import Faults, Result, WorkerKilled, seeds, simulate, sleep, worker_globals
from telegrad.wire.parcel import Parcel
from tests.rpc import data_functions, functions
from tests.rpc.fleet import Job, Nursery
from tests.rpc.inside import call, when_settled
from tests.rpc.test_interrupts import LONGEST, SEED, interrupt_often
from tests.rpc.test_refused_records import keep_at_most

MakeJob = Callable[..., Job]
names = ["a", "b", "c", "d"]


class Stage:
    """A weight, and what can happen to a tensor on its way."""

    def __init__(self, weight: float) -> None:
        self.weight = torch.full((3,), weight, requires_grad=True)

    def times(self, x: Tensor) -> Tensor:
        return x * self.weight

    def slowly(self, x: Tensor) -> Tensor:
        sleep(float(self.weight[0].detach()))
        return x * self.weight

    async def awaited(self, x: Tensor) -> Tensor:
        await asyncio.sleep(0)
        return x * self.weight

    def fails_below(self, x: Tensor) -> Tensor:
        """Fails where the weight is negative."""
        if bool(self.weight[0] < 0):
            raise ArithmeticError(f"no root of {self.weight[0].item()}")
        return x * self.weight

    def gradient(self, context_id: int) -> Tensor:
        return autograd.get_gradients(context_id)[self.weight]


def relay(
    stages: list[rpc.RRef[Any]], x: Tensor, method: str = "times", timeout: float | None = None
) -> Any:
    course = Course(tuple([stage._reference for stage in stages]), method)
    return current_node().relays.run(course, x, timeout, "a relay of this test")


def make(owners: str | list[str], weights: list[float] | None = None) -> list[rpc.RRef[Any]]:
    weights = weights or [2.0 + number for number in range(len(owners))]
    return [
        rpc.remote(owner, Stage, args=(weight,))
        for owner, weight in zip(owners, weights, strict=True)
    ]


def product(weights: list[float]) -> Tensor:
    return torch.tensor(weights).prod()


# Words.


def course(at: int = 1) -> Course:
    return Course((ReferenceId(1, 2, 3), ReferenceId(4, 5, 6)), "times", at)


def told_by(course: Course) -> list[Any]:
    return [getattr(course, name) for name in Course.__slots__]


@pytest.mark.parametrize("at", [0, 1])
def test_a_course_is_read_as_it_was_written(at: int) -> None:
    assert told_by(read_course(course(at).written)) == told_by(course(at))


def test_a_course_leads_from_one_stage_to_the_next() -> None:
    first, last = course(0), course(1)
    assert not first.is_through
    assert last.is_through
    assert first.onward == last.written
    assert first.to == last.here.owner == first.last == last.last


def test_what_is_no_course_is_refused_in_words() -> None:
    data = course().written
    for cut in range(len(data) - len("times")):
        with pytest.raises(ValueError, match="a relay that"):
            read_course(data[:cut])
    with pytest.raises(ValueError, match="none of its stages"):
        read_course(bytes((0, 0)))
    with pytest.raises(ValueError, match="none of its stages"):
        read_course(bytes((2,)) + data[1:])


# On the simulator.

LOST = (rpc.WorkerLost, LostWithWorker, rpc.ReferenceLost)


def gradients_of_one_process(weights: list[float]) -> tuple[Tensor, list[Tensor]]:
    x = torch.arange(1.0, 4.0, requires_grad=True)
    found = [torch.full((3,), weight, requires_grad=True) for weight in weights]
    y = x
    for weight in found:
        y = y * weight
    x_gradient, *rest = torch.autograd.grad(y.square().sum(), [x, *found])
    return x_gradient, rest


def train(owners: str, mode: str = "smart", method: str = "times") -> bool:
    """One relay there and back again: as in one process."""
    weights = [2.0 + number for number in range(len(owners))]
    stages = make(owners, weights)
    x = torch.arange(1.0, 4.0, requires_grad=True)
    with autograd.context() as context_id:
        y = relay(stages, x, method)
        autograd.backward(context_id, [y.square().sum()], mode=mode)
        expected, of_weights = gradients_of_one_process(weights)
        torch.testing.assert_close(autograd.get_gradients(context_id)[x], expected)
        for stage, gradient in zip(stages, of_weights, strict=True):
            found = stage.rpc_sync().gradient(context_id)
            torch.testing.assert_close(found, gradient)
    return True


@pytest.mark.parametrize("mode", ["smart", "fast"])
@pytest.mark.parametrize("owners", ["bc", "bcd", "bb", "bcb", "bbcc", "dcbcd"])
def test_gradients_are_those_of_one_process_whatever_the_order(owners: str, mode: str) -> None:
    for seed in seeds(10):
        faults = Faults(drop=0.05, duplicate=0.05, reorder=0.2, delay=0.3)
        result = simulate(lambda: train(owners, mode), names, seed=seed, faults=faults)
        assert result.value is True
        assert result.leaks == {}, seed


def test_a_stage_may_be_a_coroutine() -> None:
    for seed in seeds(10):
        result = simulate(lambda: train("bcb", method="awaited"), seed=seed)
        assert result.value is True
        assert result.leaks == {}, seed


def send_along(owners: str, is_sent: bool) -> None:
    stages = make(owners)
    for stage in stages:
        stage.to_here()
    if is_sent:
        relay(stages, torch.ones(3))


@pytest.mark.parametrize("owners", ["bc", "bcd", "dcbd"])
def test_a_relay_is_two_messages_more_than_it_has_stages(owners: str) -> None:
    without, sent = (
        simulate(lambda is_sent=is_sent: send_along(owners, is_sent), names).messages
        for is_sent in (False, True)
    )
    assert sent - without == len(owners) + 2


def drive_many(seed: int, method: str) -> int:
    """Relays one after the other, each under a bound of its own. How many came through."""
    draw = random.Random(seed)
    through = 0
    for _ in range(4):
        owners = draw.choices([name for name in "abcd" if name != me()], k=draw.randint(2, 4))
        weights = [draw.choice((0.5, 1.0, 2.0, -1.0)) for _ in owners]
        bound = draw.choice((0, 0, 0.05, 1.0, 30.0))
        x = torch.ones(3, requires_grad=draw.random() < 0.5)
        try:
            with autograd.context() as context_id:
                y = relay(make(owners, weights), x, method, bound)
                torch.testing.assert_close(y.detach(), product(weights).expand(3))
                if y.requires_grad:
                    autograd.backward(context_id, [y.sum()])
                through += 1
        except ArithmeticError:
            assert min(weights) < 0
        except (rpc.CallTimeout, *LOST, autograd.AutogradError):
            pass
    return through


def me() -> str:
    return rpc.get_worker_info().name


def run_many(seed: int, faults: Faults) -> Result:
    """All workers drive relays through each other."""
    mains = {
        name: lambda number=number: drive_many(seed * 10 + number, "fails_below")
        for number, name in enumerate("abcd")
    }
    return simulate(mains, names, seed=seed, faults=faults, allow=LOST, deadline=5000.0)


def test_relays_of_all_through_all_leave_nothing() -> None:
    through = 0
    for seed in seeds(25):
        faults = Faults(drop=0.03, duplicate=0.03, reorder=0.2, delay=0.2)
        result = run_many(seed, faults)
        assert result.leaks == {}, seed
        through += sum(result.values.values())
    assert through > 0


def test_relays_of_all_through_all_leave_nothing_on_the_survivors_of_a_kill() -> None:
    for seed in seeds(40):
        draw = random.Random(seed)
        faults = Faults(reorder=0.2, delay=0.2).kill(draw.choice("bcd"), at=draw.randint(5, 150))
        result = run_many(seed, faults)
        assert result.leaks == {}, seed


@pytest.mark.parametrize("victim", "bcd")
def test_a_worker_that_dies_at_any_message_leaves_nothing(victim: str) -> None:
    last = simulate(lambda: train("bcd"), names).messages
    for at in range(1, last + 1):
        faults = Faults(delay=0.5).kill(victim, at=at)
        result = simulate(train_if_nobody_dies, names, seed=at, faults=faults)
        assert result.leaks == {}, at


def train_if_nobody_dies() -> bool:
    """What is left is counted afterwards: without an error, whose frames would keep the stages."""
    try:
        return train("bcd")
    except (*LOST, autograd.AutogradError):
        return False


def lose_one_that_has_passed_on() -> float:
    """While the last but one computes, the first is lost."""
    stages = make("bcd", [0.0, 20.0, 0.0])
    for stage in stages:
        stage.to_here()
    with autograd.context(), pytest.raises(rpc.WorkerLost):
        relay(stages, torch.ones(3), "slowly", 0)
    return 0.0


def test_what_comes_after_a_loss_on_the_way_is_not_kept() -> None:
    for seed in seeds(20):
        faults = Faults().kill("b", after=10.0)
        result = simulate(lose_one_that_has_passed_on, names, seed=seed, faults=faults)
        assert result.error is None
        assert result.leaks == {}, seed


def lose_the_driver() -> None:
    relay(make("bcd", [0.0, 20.0, 0.0]), torch.ones(3), "slowly", 0)


def test_what_comes_after_the_loss_of_the_driver_is_not_kept() -> None:
    for seed in seeds(20):
        faults = Faults().kill("a", after=10.0)
        mains = {"a": lose_the_driver, "b": lambda: sleep(100)}
        result = simulate(mains, names, seed=seed, faults=faults, allow=LOST)
        assert isinstance(result.error, WorkerKilled)
        assert result.leaks == {}, seed


def give_up_and_drop(weights: list[float]) -> None:
    stages = make("bcb", weights)
    with autograd.context(), pytest.raises(rpc.CallTimeout, match="a relay of this test"):
        relay(stages, torch.ones(3, requires_grad=True), "slowly", 5.0)
    del stages


@pytest.mark.parametrize("slow", range(3))
def test_a_relay_that_takes_too_long_is_given_up_and_its_stages_may_go(slow: int) -> None:
    weights = [0.0, 0.0, 0.0]
    weights[slow] = 20.0
    for seed in seeds(10):
        result = simulate(lambda: give_up_and_drop(weights), seed=seed)
        assert result.error is None
        assert result.leaks == {}, seed


def fail_and_go_on() -> None:
    """The context of a relay that failed is as good as before."""
    good, bad = make("bc"), make("bcb", [1.0, -1.0, 1.0])
    x = torch.ones(3, requires_grad=True)
    with autograd.context() as context_id:
        with pytest.raises(ArithmeticError):
            relay(bad, x * 2, "fails_below")
        autograd.backward(context_id, [relay(good, x).sum()])
        assert torch.equal(autograd.get_gradients(context_id)[x], torch.full((3,), 6.0))


def test_after_a_relay_that_failed_its_context_goes_on() -> None:
    for seed in seeds(20):
        assert simulate(fail_and_go_on, seed=seed).leaks == {}, seed


def drive_slowly(error: type[Exception], method: str, weights: list[float]) -> None:
    """The tensor has left, and it takes a while until the call does that waits for its end."""
    stages = make("bcd", weights)
    for stage in stages:
        stage.to_here()
    node = current_node()
    post = node.post

    def slowly(to: int, topic: str, *rest: Any) -> None:
        post(to, topic, *rest)
        if topic == relays.PASS_ON:
            sleep(20)

    node.post = slowly  # type: ignore[method-assign]
    with autograd.context(), pytest.raises(error):
        relay(stages, torch.ones(3), method, 0)
    node.post = post  # type: ignore[method-assign]


@pytest.mark.parametrize("at", range(3))
def test_a_failure_that_is_told_before_there_is_a_call_counts(at: int) -> None:
    weights = [1.0, 1.0, 1.0]
    weights[at] = -1.0
    for seed in seeds(5):
        result = simulate(
            lambda: drive_slowly(ArithmeticError, "fails_below", weights), names, seed=seed
        )
        assert result.error is None
        assert result.leaks == {}, seed


@pytest.mark.parametrize("victim", "bcd")
def test_a_loss_before_there_is_a_call_counts(victim: str) -> None:
    for seed in seeds(5):
        result = simulate(
            lambda: drive_slowly(rpc.WorkerLost, "slowly", [0.0, 40.0, 0.0]),
            names,
            seed=seed,
            faults=Faults().kill(victim, after=10.0),
        )
        assert result.error is None
        assert result.leaks == {}, seed


# Over sockets.


def stages_of(kind: str, owners: list[str]) -> list[rpc.RRef[Any]]:
    stages = worker_globals().setdefault(kind, [])
    if not stages:
        stages += [rpc.remote(owner, Kinds, args=(kind,)) for owner in owners]
        for stage in stages:
            assert stage.rpc_sync().kind() == kind
    return stages


class Kinds:
    def __init__(self, kind: str) -> None:
        self._kind = kind

    def kind(self) -> str:
        return self._kind

    def doubled(self, x: Tensor) -> Tensor:
        return 2 * x

    def waits(self, x: Tensor) -> Tensor:
        """Waits on the worker that the tensor names by a number."""
        if me() == names[int(x[0].item())]:
            functions.announce_and_wait("begun", "never")
        return x

    def fails(self, x: Tensor) -> Tensor:
        if me() == names[int(x[0].item())]:
            raise ArithmeticError(f"no result on {me()}")
        return x

    def ends(self, x: Tensor) -> Tensor:
        raise SystemExit(3)

    def lies_long(self, x: Tensor) -> Tensor:
        raise ValueError("so " * 200_000)

    def unsendable(self, x: Tensor) -> Any:
        return threading.Lock() if me() == names[int(x[0].item())] else x

    def sparse(self, x: Tensor) -> Tensor:
        return 2 * x if x.is_sparse else (2 * x).to_sparse()

    def referring(self, x: Any) -> Any:
        """What it passes on refers to a value."""
        return x.to_here() + 1 if isinstance(x, rpc.RRef) else rpc.RRef(x)


def run(method: str, owners: list[str], x: Tensor, timeout: float | None = None) -> Any:
    with autograd.context():
        y = relay(stages_of("".join(owners), owners), x, method, timeout)
        return y.detach() if isinstance(y, Tensor) else y


def raised(method: str, owners: list[str], x: Tensor, timeout: float | None = None) -> Any:
    try:
        run(method, owners, x, timeout)
    except Exception as error:
        return type(error).__name__, str(error), str(error.__cause__)
    raise AssertionError("nothing was raised")


def kept() -> int:
    return current_node().relays.counts() + current_node().calls.total()


def nothing_is_kept() -> bool:
    return when_settled(lambda: kept() == 0)


def contexts_kept() -> int:
    return int(current_node().services["autograd"].counts()["num_autograd_contexts"])


def check_left(job: Job) -> None:
    for name, process in job.processes.items():
        assert process.do(nothing_is_kept), (name, process.do(kept))
        assert process.do(when_settled, no_contexts), name


def no_contexts() -> bool:
    return contexts_kept() == 0


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    """One that knows this file: it takes a while to import."""
    made = Nursery("tests.rpc.test_relays")
    yield made
    made.close()


@pytest.fixture(scope="module")
def lasting(nursery: Nursery) -> Iterator[Job]:
    job = Job(nursery, tuple(names))
    yield job
    job.close()
    for name, process in job.processes.items():
        assert "Traceback" not in process.errors, (name, process.errors)


@pytest.fixture
def four(lasting: Job) -> Iterator[Job]:
    yield lasting
    check_left(lasting)


TENSORS = {
    "plain": lambda: torch.arange(3.0),
    "of no elements": lambda: torch.empty(0, 3),
    "of no dimension": lambda: torch.tensor(2.0),
    "transposed": lambda: torch.arange(6.0).reshape(2, 3).T,
    "expanded": lambda: torch.ones(1).expand(4),
    "conjugate": lambda: torch.tensor([1 + 2j]).conj(),
    "negated": lambda: torch.tensor([1 + 2j]).conj().imag,
    "large": lambda: torch.arange(1 << 19).float(),
    "whole numbers": lambda: torch.arange(5),
    "in need of gradient": lambda: torch.ones(3, requires_grad=True),
}


@pytest.mark.parametrize("owners", [["b", "c"], ["b", "b"], ["c", "b", "c"]])
@pytest.mark.parametrize("kind", TENSORS)
def test_any_tensor_passes(four: Job, kind: str, owners: list[str]) -> None:
    x = TENSORS[kind]()
    found = four["a"].do(run, "doubled", owners, x)
    torch.testing.assert_close(found, x.detach() * 2 ** len(owners))


@pytest.mark.parametrize("owners", [["b", "c"], ["b", "b"], ["c", "b", "c"]])
def test_a_sparse_tensor_passes(four: Job, owners: list[str]) -> None:
    found = four["a"].do(run, "sparse", owners, torch.ones(3))
    assert found.is_sparse
    torch.testing.assert_close(found.to_dense(), torch.ones(3) * 2 ** len(owners))


@pytest.mark.parametrize("owners", [["b", "c"], ["b", "b"]])
def test_references_may_be_passed_on(four: Job, owners: list[str]) -> None:
    for _ in range(10):
        found = four["a"].do(run, "referring", owners, torch.ones(3))
        torch.testing.assert_close(found, torch.full((3,), 2.0))


@pytest.mark.parametrize("where", "bcd")
def test_the_error_of_a_stage_is_raised_by_its_driver(four: Job, where: str) -> None:
    told = four["a"].do(raised, "fails", ["b", "c", "d"], torch.tensor([names.index(where)]))
    assert told[:2] == ("ArithmeticError", f"no result on {where}")
    assert f"worker {where!r}" in told[2] or f"{where}" in told[2]
    assert "in fails" in told[2]


def test_a_stage_that_exits_ends_nobody(four: Job) -> None:
    for owners in (["b", "c"], ["b", "b"]):
        kind, words, _ = four["a"].do(raised, "ends", owners, torch.ones(1))
        assert kind == "RemoteError"
        assert "SystemExit" in words


@pytest.mark.parametrize("where", "bcd")
def test_a_result_that_cannot_be_sent_is_an_error_that_says_so(four: Job, where: str) -> None:
    told = four["a"].do(raised, "unsendable", ["b", "c", "d"], torch.tensor([names.index(where)]))
    assert "lock" in told[1]
    assert f"worker {where!r}" in told[1]


def test_a_tensor_that_cannot_be_sent_is_an_error_that_says_so(four: Job) -> None:
    told = four["a"].do(raised_by_layout)
    assert told[1].startswith("cannot send value (of type Tensor) in what a relay of this test is")
    assert "its layout is" in told[1]


def raised_by_layout() -> Any:
    return raised("doubled", ["b", "c"], torch.ones(3).to_mkldnn())


def test_a_relay_without_the_method_is_an_error(four: Job) -> None:
    kind, words, _ = four["a"].do(raised, "missing", ["b", "c"], torch.ones(1))
    assert kind == "AttributeError"
    assert "missing" in words


def run_in_threads(owners: list[str], times: int) -> bool:
    def one(number: int) -> bool:
        x = torch.full((3,), float(number))
        return torch.equal(run("doubled", owners, x), x * 2 ** len(owners))

    stages_of("".join(owners), owners)
    with ThreadPoolExecutor(8) as pool:
        return all(pool.map(one, range(times)))


def test_relays_of_many_threads_and_workers_at_once(four: Job) -> None:
    ways = {"a": ["b", "c", "d"], "b": ["c", "a"], "c": ["a", "b", "a"], "d": ["a", "a"]}
    running = [four[name].begin(run_in_threads, owners, 60) for name, owners in ways.items()]
    assert all(each.result(60) for each in running)


def test_a_relay_of_too_many_stages_is_refused_in_words(four: Job) -> None:
    told = four["a"].do(raised, "doubled", ["b"] * 256, torch.ones(1))
    assert told[0] == "ValueError"
    assert "255 stages" in told[1]


def interrupt_while_waiting(owners: list[str]) -> str:
    import _thread

    stages = stages_of("".join(owners), owners)
    begun = rpc.rpc_async(owners[0], functions.wait_event, args=("begun",))
    begun.then(lambda _: _thread.interrupt_main())
    try:
        with autograd.context():
            relay(stages, torch.tensor([names.index(owners[0])]), "waits", 0)
    except KeyboardInterrupt:
        return "interrupted"
    return "not interrupted"


@pytest.mark.parametrize("owners", [["b", "c"], ["b", "b"]])
def test_who_is_interrupted_leaves_nothing_at_the_last(
    make_job: MakeJob, owners: list[str]
) -> None:
    job = make_job("a", "b", "c")
    assert job["a"].do(interrupt_while_waiting, owners) == "interrupted"
    for process in job.processes.values():
        assert process.do(nothing_is_kept)
    job["c"].do(call, "b", functions.set_event, "never")
    job.close()


def interrupt_at_random(owners: list[str], times: int) -> int:
    stages = stages_of("".join(owners), owners)

    def one() -> None:
        with autograd.context():
            assert torch.equal(relay(stages, torch.ones(3), "doubled", 20.0), torch.full((3,), 4.0))

    return interrupt_often(one, times, SEED, LONGEST)


@pytest.mark.parametrize("owners", [["b", "c"], ["b", "b"]])
def test_an_interrupt_at_any_moment_leaves_nothing(make_job: MakeJob, owners: list[str]) -> None:
    job = make_job("a", "b", "c")
    assert job["a"].do(interrupt_at_random, owners, 400) > 0
    check_left(job)
    assert torch.equal(job["a"].do(run, "doubled", owners, torch.ones(1)), torch.full((1,), 4.0))
    job.close()


@pytest.mark.parametrize("victim", "bcd")
def test_a_worker_that_is_killed_while_its_stage_runs(make_job: MakeJob, victim: str) -> None:
    job = make_job("a", "b", "c", "d")
    way = (["b", "c", "d"], torch.tensor([names.index(victim)]), 0)
    failing = job["a"].begin(raised, "waits", *way)
    helper = next(name for name in "bcd" if name != victim)
    job[helper].do(call, victim, functions.wait_event, "begun")
    job[victim].kill()
    kind, words, _ = failing.result(60)
    assert kind == "WorkerLost"
    assert f"Worker {victim!r} is gone" in words
    del job.processes[victim]
    check_left(job)
    job.close()


def limited() -> dict[str, Any]:
    return {"limits": rpc.Limits(metadata_bytes=100_000)}


def test_an_error_that_is_too_long_for_a_message_is_told_in_brief(make_job: MakeJob) -> None:
    job = make_job("a", "b", "c", **limited())
    kind, words, _ = job["a"].do(raised, "lies_long", ["b", "c"], torch.ones(1), 20.0)
    assert kind == "RemoteError"
    assert "so so so" in words
    check_left(job)
    job.close()


def references_of(owners: list[str]) -> list[tuple[int, ...]]:
    return [tuple(stage._reference) for stage in stages_of("".join(owners), owners)]


def raised_by(references: list[tuple[int, ...]], method: str, x: Tensor) -> str:
    course = Course(tuple([ReferenceId(*each) for each in references]), method)
    with pytest.raises(rpc.WorkerLost) as caught:
        current_node().relays.run(course, x, 0, "a relay of this test")
    return str(caught.value)


def test_the_loss_of_a_stage_that_the_driver_never_met_is_noticed(make_job: MakeJob) -> None:
    job = make_job("a", "b", "c", "d")
    stages = job["d"].do(references_of, ["b", "c", "b"])
    failing = job["a"].begin(raised_by, stages, "waits", torch.tensor([names.index("c")]))
    job["d"].do(call, "c", functions.wait_event, "begun")
    job["c"].kill()
    assert "Worker 'c' is gone" in failing.result(60)
    del job.processes["c"]
    check_left(job)
    job.close()


def give_up_before_it_is_expected(owners: list[str], calls: int) -> str:
    """So many calls of the last worker are open that the one which expects the tensor has to wait
    until its time is up; the tensor itself goes its way."""
    stages = stages_of("".join(owners), owners)
    waiting = [
        rpc.rpc_async(owners[-1], functions.wait_event, args=("let go",), timeout=0)
        for _ in range(calls)
    ]
    with autograd.context(), pytest.raises(rpc.CallTimeout) as caught:
        relay(stages, torch.ones(3), "doubled", 0.2)
    rpc.rpc_sync(owners[0], functions.nothing)
    # Threads that serve are let through, and so is who is called by this worker's own call.
    rpc.rpc_sync(owners[0], call, args=(owners[-1], functions.set_event, "let go"))
    for each in waiting:
        each.wait()
    return str(caught.value)


def test_a_tensor_that_comes_without_being_expected_is_let_go(make_job: MakeJob) -> None:
    job = make_job("a", "b", "c", limits=rpc.Limits(calls_in_flight=8))
    assert "a relay of this test" in job["a"].do(give_up_before_it_is_expected, ["b", "c"], 7)
    check_left(job)
    job.close()


def run_twice(owners: list[str]) -> Any:
    """The second relay is one too many for who keeps few records; the first can go back."""
    stages = stages_of("".join(owners), owners)
    x = torch.ones(3, requires_grad=True)
    with autograd.context() as context_id:
        y = relay(stages, x, "doubled")
        try:
            relay(stages, x, "doubled", 0)
        except rpc.TelegradError as error:
            autograd.backward(context_id, [y.sum()])
            return str(error), autograd.get_gradients(context_id)[x]
    raise AssertionError("nothing was refused")


@pytest.mark.parametrize("where", ["b", "c"])
def test_a_stage_that_keeps_no_more_records_tells_the_driver(make_job: MakeJob, where: str) -> None:
    job = make_job("a", "b", "c")
    job[where].do(keep_at_most, "records", 1)
    words, gradient = job["a"].do(run_twice, ["b", "c"])
    assert f"worker {where!r} keeps 1 records for worker" in words
    assert torch.equal(gradient, torch.full((3,), 4.0))
    check_left(job)
    job.close()


# What members say that is not so.


def say(to: str, topic: str, payload: Any) -> None:
    node = current_node()
    node.post(node.members.find(to).id, topic, payload)


def ids() -> dict[str, int]:
    return {name: rpc.get_worker_info(name).id for name in names[:3]}


def lie_about(to: str, driver: int, owner: int, tensors: int = 1) -> None:
    """Have a worker keep the end of a relay that nobody drives."""
    stages = (ReferenceId(owner, 0, 0), ReferenceId(owner, 0, 1))
    ticket = write_ticket(driver, 1)
    told = ticket + Course(stages, "doubled", 1).written
    say(to, relays.PASS_ON, Parcel(relays.PASS_ON, told, [torch.ones(1) for _ in range(tensors)]))
    say(to, relays.OVER, ticket)
    say(to, relays.OVER, told)
    say(to, relays.FAILED, (ticket, {}))
    say(to, relays.FAILED, told)
    call(to, data_functions.scale, 1)  # what was said before it has been heard


def expect(to: str, driver: int, owner: int) -> str:
    told = write_ticket(driver, 1) + Course((ReferenceId(owner, 0, 0),) * 2, "doubled").written
    node = current_node()
    try:
        info = node.members.find(to)
        node.wait(
            node.call(info, relays.EXPECT, (), None, 5, None, Parcel(relays.EXPECT, told, ()))
        )
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "answered"


def test_where_data_only_is_taken_nothing_of_relays_is_kept(make_job: MakeJob) -> None:
    job = make_job("a", "b", "c", trust="data")
    known = job["a"].do(ids)
    for driver in known.values():
        job["a"].do(lie_about, "b", driver, known["b"])
        assert "takes data only" in job["a"].do(expect, "b", driver, known["b"])
    assert job["b"].do(nothing_is_kept)
    assert job["b"].do(remembered) == 0


def remembered() -> int:
    return len(current_node().relays._over)


def test_what_is_not_so_is_not_kept(make_job: MakeJob) -> None:
    """Nor does it do harm to a worker that it comes to by mistake."""
    job = make_job("a", "b", "c")
    known = job["a"].do(ids)
    job["a"].do(lie_about, "b", known["a"], known["c"])
    job["a"].do(lie_about, "b", known["c"], known["c"])
    job["a"].do(lie_about, "b", known["c"], known["c"], 2)
    words = job["a"].do(expect, "b", known["c"], known["b"])
    assert "expected by its driver only" in words
    assert "expected by its driver only" in job["a"].do(expect, "b", known["a"], known["c"])
    assert job["b"].do(nothing_is_kept)


def remember_many() -> int:
    node = current_node()
    for number in range(relays.MOST_OVER + 100):
        node.relays._on_over(node.info.id, write_ticket(node.info.id, number))
    return remembered()


def test_relays_that_are_over_are_remembered_for_a_while_only(make_job: MakeJob) -> None:
    assert make_job("a", "b")["a"].do(remember_many) == relays.MOST_OVER
