"""`trust="data"`: parties that work together and do not trust each other with code."""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import telegrad
from telegrad import rpc
from telegrad.rpc.agent import Agent
from telegrad.rpc.current import current_node
from telegrad.rpc.methods import call_parcel, fetch_parcel
from telegrad.rpc.reference_mail import in_one
from telegrad.rpc.reference_messages import ForkId, Gone, ReferenceId, Transfer
from telegrad.wire.codec import pack
from telegrad.wire.frames import HEADER, Kind
from telegrad.wire.opaque import TreeUnpickler
from telegrad.wire.parcel import Parcel
from telegrad.wire.tags import Tag
from tests.rpc import data_functions as functions
from tests.rpc.fleet import Job, Nursery
from tests.rpc.inside import call

MakeJob = Callable[..., Job]


@pytest.fixture
def make_parties(make_job: MakeJob) -> MakeJob:
    def make(*names: str, **options: Any) -> Job:
        job = make_job(*names, trust="data", **options)
        for name in names:
            job[name].do(functions.what_ran)  # imports the module
        return job

    return make


@pytest.fixture(scope="module")
def job(nursery: Nursery) -> Iterator[Job]:
    job = Job(nursery, ("a", "b"), trust="data")
    for name in ("a", "b"):
        job[name].do(functions.what_ran)
    yield job
    job.abandon()


def send_raw(to: str, obj: Any, kind: int = Kind.CALL) -> str:
    """As a member without scruples: pack with code, send, and tell how the call ended."""
    node = current_node()
    return send_meta(to, pack(obj, node.passages[node.members.find(to).id]).meta, kind)


def send_meta(to: str, meta: bytes, kind: int = Kind.CALL) -> str:
    node = current_node()
    agent = node.transport
    assert isinstance(agent, Agent)
    callee = node.members.find(to)
    pending = node.calls.begin(callee, functions.scale, 20, node.runtime.now())
    outgoing = agent._outgoing.get(callee.id) or agent._reach(callee.id)
    outgoing.link.send(kind, pending.call_id, meta)  # type: ignore[union-attr]
    if kind == Kind.POST:
        node.calls.take(callee.id, pending.call_id)
        return "posted"
    try:
        return f"answered {node.wait(pending)!r}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def forbid_pickle() -> None:
    """From now on a pickle that is loaded in this process leaves a trace."""

    def load(self: Any) -> Any:
        functions.ran.append("unpickled")
        raise AssertionError("a pickle was loaded")

    TreeUnpickler.load = load  # type: ignore[method-assign]


def test_exported_functions_run(job: Job) -> None:
    x = torch.arange(3.0)
    assert torch.equal(job["a"].do(call, "b", functions.scale, x), 2 * x)


def call_forbidden(to: str) -> None:
    call(to, functions.forbidden)


def test_what_is_not_exported_does_not_even_leave(job: Job) -> None:
    with pytest.raises(Exception, match=r"forbidden is not exported; .* mark it @export"):
        job["a"].do(call_forbidden, "b")


NOT_FOR_OTHERS: dict[str, Any] = {
    "a function that was not exported": (functions.forbidden, (), {}),
    "a builtin": (eval, ("1",), {}),
    "a method of torch": (torch.Tensor.add_, (torch.ones(1), 1), {}),
    "an operator": (torch.ops.aten.add.Tensor, (torch.ones(1), 1), {}),
    "an exported object that can be called": (functions.Task("t"), (), {}),
    "a method of an exported object": (functions.Task("t").__call__, (), {}),
    "a pickled argument": (functions.scale, (functions.Bomb(),), {}),
    "a pickle deep in the arguments": (functions.scale, ([{"x": (1, [functions.Bomb()])}],), {}),
    "a pickle among the keywords": (functions.scale, (), {"x": functions.Bomb()}),
    "a pickle as the target": (functions.Bomb(), (), {}),
    "a value made by what was not exported": (
        "create",
        (((1, 0, 99), (0, 99)), functions.forbidden, (), {}),
        {},
    ),
    "a pickle for a remote value": (
        "create",
        (((1, 0, 98), (0, 98)), functions.scale, (functions.Bomb(),), {}),
        {},
    ),
    "a value made by a method that was not exported": call_parcel(
        ReferenceId(1, 1, 0), "__init__", (), Transfer(ReferenceId(1, 0, 97), ForkId(0, 97))
    ),
    "somebody else's value": ("fill", ((1, 1, 0), functions.scale, (1,), {}), {}),
    "an operation that is none": ("__init__", (), {}),
}


@pytest.mark.parametrize("what", list(NOT_FOR_OTHERS))
def test_what_others_may_not_ask_is_refused_and_never_runs(job: Job, what: str) -> None:
    job["b"].do(forbid_pickle)
    told = job["a"].do(send_forbidden, "b", what)
    assert not told.startswith("answered") or told == "answered None", told
    if what == "a value made by what was not exported":
        # The error is kept with the value, for who asks for it.
        told = job["a"].do(send_raw, "b", fetch_parcel(ReferenceId(1, 0, 99)))
    assert "forbidden" not in told or "Refused" in told or "not exported" in told
    assert job["b"].do(functions.what_ran) == []
    assert job["a"].do(call, "b", functions.scale, 4) == 8


def send_forbidden(to: str, what: str) -> str:
    return send_raw(to, NOT_FOR_OTHERS[what])


TOPICS = ("reference", "autograd.pass", "autograd.release", "autograd.holder")


@pytest.mark.parametrize("topic", TOPICS)
def test_no_post_may_hold_a_pickle(job: Job, topic: str) -> None:
    job["b"].do(forbid_pickle)
    job["a"].do(post_bomb, "b", topic)
    assert job["a"].do(call, "b", functions.scale, 4) == 8
    assert job["b"].do(functions.what_ran) == []


def post_bomb(to: str, topic: str) -> None:
    send_raw(to, (topic, (1, ("register", functions.Bomb()))), Kind.POST)


def tangled() -> Any:
    """A small value that takes for ever to hash or to show."""
    value: Any = ()
    for _ in range(50):
        value = (value, value)
    return value


def hostile_posts() -> list[Any]:
    big = tangled()
    return [
        (big, 1),
        ("reference", big),
        ("reference", (1, big)),
        in_one(1 << 40, [Gone(ForkId(1, 2))]),
        Parcel("reference", b"short", ()),
        Parcel("reference", bytes(8) + b"\x04" + b"\xff" * 8, ()),
        ("autograd.release", (big, 1, 1, (), ())),
        ("autograd.release", (0, 1, 1, (big,), ())),
        ("autograd.release", (0, 1, 1, (), (big,))),
        ("autograd.holder", big),
        ("autograd.pass", (big,)),
        ("autograd.pass", (bytes(38), big)),
        ("autograd.pass", (bytes([4]) + bytes(37), big, big, big)),
    ]


def test_values_that_cannot_be_shown_in_time_hold_nobody_up(job: Job) -> None:
    job["a"].do(send_hostile_posts)
    started = time.monotonic()
    for operation in ("fetch", "invoke", "create", "closing", "autograd.backward"):
        assert "Error" in job["a"].do(send_tangled, "b", operation)
    assert job["a"].do(call, "b", functions.scale, 4) == 8
    assert time.monotonic() - started < 20


def send_hostile_posts() -> None:
    for post in hostile_posts():
        send_raw("b", post, Kind.POST)


def send_tangled(to: str, operation: str) -> str:
    return send_raw(to, (operation, [tangled()] * 4, {}))


def test_errors_come_as_text(job: Job) -> None:
    job["a"].do(forbid_pickle)
    for function, text in ((functions.fail_with, "KeyError"), (functions.raise_bomb, "BombError")):
        with pytest.raises(rpc.RemoteError, match=text):
            job["a"].do(call, "b", function, *(["x"] if function is functions.fail_with else []))
    assert job["a"].do(functions.what_ran) == []


def answer_with_pickle(caller: int, call_id: int) -> None:
    """As a callee without scruples: answer a call with an error that is a pickle."""
    agent = current_node().transport
    assert isinstance(agent, Agent)
    blob = pack(functions.BombError("x")).meta
    told = {"worker": "b", "type": "t", "message": "m", "traceback": "", "forms": [(blob, [])]}
    agent._incoming[caller].link.send(Kind.ERROR, call_id, pack(told).meta)


def begin_call() -> int:
    pending = current_node().call(
        current_node().members.find("b"), functions.wait_for_gate, (), None, 20
    )
    kept.append(pending)
    return pending.call_id


def end_call() -> str:
    try:
        return repr(current_node().wait(kept.pop()))
    except Exception as error:
        return f"{type(error).__name__}: {error}"


kept: list[Any] = []


def test_an_answer_may_hold_no_pickle_either(job: Job) -> None:
    job["a"].do(forbid_pickle)
    number = job["a"].do(begin_call)
    job["b"].do(answer_with_pickle, 0, number)
    assert "RemoteError" in job["a"].do(end_call)
    number = job["a"].do(begin_call)
    job["b"].do(reply_with_pickle, 0, number)
    assert "CodecError" in job["a"].do(end_call)
    assert job["a"].do(functions.what_ran) == []
    job["b"].do(functions.open_gate)


def reply_with_pickle(caller: int, call_id: int) -> None:
    agent = current_node().transport
    assert isinstance(agent, Agent)
    agent._incoming[caller].link.send(Kind.REPLY, call_id, pack(functions.Bomb()).meta)


def answer_and_then_garble(caller: int, call_id: int) -> None:
    """In one go: the answer to a call, and a frame that is none."""
    agent = current_node().transport
    assert isinstance(agent, Agent)
    link = agent._incoming[caller].link
    meta = pack("answer").meta
    seq, ack = link.session.stamp()
    numbers = (0, 0, 0, len(meta), len(meta), seq, ack, call_id)
    answer = HEADER.pack(Kind.REPLY, 0, *numbers) + meta
    link.stream.try_send([answer + HEADER.pack(77, 0, *[0] * 8)])


def test_who_reads_an_answer_does_not_try_for_ever_to_read_what_follows_it(
    make_parties: MakeJob,
) -> None:
    job = make_parties("a", "b")
    number = job["a"].do(begin_call)
    job["b"].do(answer_and_then_garble, 0, number)
    assert job["a"].do(end_call) == "'answer'"
    assert "unknown kind 77" in job["a"].do(rpc.debug_info)["lost workers"]["b"]


def test_a_hand_made_pickle_is_refused(job: Job) -> None:
    job["b"].do(forbid_pickle)
    pickled = pickle.dumps(functions.Bomb())
    meta = bytes([0, len(pickled), Tag.OPAQUE, 0]) + pickled
    assert "takes data only" in job["a"].do(send_meta, "b", meta)
    assert job["b"].do(functions.what_ran) == []


# References.


def use_reference(to: str) -> list[int]:
    rref = call(to, functions.give_reference, 5)
    made = rpc.remote(to, functions.Counter, args=(1,))
    return [
        rref.rpc_sync().add(3),
        call(to, functions.count_of, rref),
        made.rpc_async().add(1).wait(),
        made.remote().add(1).to_here(),
    ]


def test_references_and_their_exported_methods_work(job: Job) -> None:
    assert job["a"].do(use_reference, "b") == [8, 8, 2, 3]


def misuse_reference(to: str, name: str) -> str:
    rref = call(to, functions.give_reference, 5)
    told = []
    for proxy in (rref.rpc_sync(), rref.remote()):
        try:
            result = getattr(proxy, name)()
            told.append(str(result.to_here() if isinstance(result, rpc.RRef) else result))
        except Exception as error:
            told.append(f"{type(error).__name__}: {error}")
    return " | ".join(told)


@pytest.mark.parametrize("name", ["reset", "hook", "none"])
def test_other_methods_of_a_value_are_refused(job: Job, name: str) -> None:
    told = job["a"].do(misuse_reference, "b", name)
    assert told.count("does not run that method of a Counter") == 2, told
    assert job["b"].do(functions.what_ran) == []


def invoke(to: str, name: Any) -> str:
    rref = call(to, functions.give_reference, 5)
    return send_raw(to, ("invoke", (tuple(rref._reference), name, (), {}), {}))


@pytest.mark.parametrize("name", ["__init__", "__reduce__", "__class__", "__init_subclass__", 7])
def test_what_every_object_has_is_no_method_for_others(job: Job, name: Any) -> None:
    assert "does not run that method of a Counter" in job["a"].do(invoke, "b", name)


def test_a_value_that_was_not_given_cannot_be_guessed(job: Job) -> None:
    job["b"].do(keep_secret)
    for number in range(20):
        asked = fetch_parcel(ReferenceId(1, 1, number))
        assert "secret" not in job["a"].do(send_raw, "b", asked)


def keep_secret() -> None:
    kept.append(rpc.RRef("secret"))


# Autograd.


def differentiate(to: str) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.arange(3.0, requires_grad=True)
    with telegrad.autograd.context() as context_id:
        loss = call(to, functions.weigh, x)
        telegrad.autograd.backward(context_id, [loss])
        mine = telegrad.autograd.get_gradients(context_id)[x]
        return mine, call(to, functions.weight_gradient, context_id)


def test_gradients_cross_between_parties(job: Job) -> None:
    for process in (job["a"], job["b"]):
        process.do(forbid_pickle)
    mine, theirs = job["a"].do(differentiate, "b")
    assert torch.equal(mine, torch.ones(3))
    assert torch.equal(theirs, torch.arange(3.0))


def test_what_runs_code_for_its_callers_is_refused(job: Job) -> None:
    told = job["a"].do(attempt_module, "b")
    assert "not exported" in told
    told = job["a"].do(attempt_optimizer, "b")
    assert "not exported" in told


def attempt_module(to: str) -> str:
    try:
        telegrad.nn.RemoteModule(to, torch.nn.Linear, (1, 1))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "made"


def attempt_optimizer(to: str) -> str:
    try:
        rref = call(to, functions.give_reference, 5)
        telegrad.optim.DistributedOptimizer(torch.optim.SGD, [rref], lr=0.1)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "made"


# Limits.


def test_a_message_beyond_the_limits_ends_its_connection(make_parties: MakeJob) -> None:
    job = make_parties("a", "b", limits=rpc.Limits(message_bytes=1 << 20))
    assert job["a"].do(call, "b", functions.scale, torch.ones(1000)).shape == (1000,)
    job["a"].do(send_header, 1, HEADER.pack(Kind.CALL, 0, 0, 0, 0, 0, 2 << 20, 2, 0, 1))
    until = time.monotonic() + 10
    while "passes the limit" not in str(job["b"].do(rpc.debug_info)["lost workers"]):
        assert time.monotonic() < until


def send_header(to: int, data: bytes) -> None:
    agent = current_node().transport
    assert isinstance(agent, Agent)
    agent._outgoing[to].link.stream.try_send([data])  # type: ignore[union-attr]


def nested(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("limits", "argument", "reason"),
    [
        (rpc.Limits(nesting=10), nested(20), "nests deeper than 10"),
        (rpc.Limits(items=100), list(range(200)), "more than the limit of 100"),
        (rpc.Limits(tensors=3), [torch.ones(1) for _ in range(4)], "limit"),
        (rpc.Limits(metadata_bytes=1000), ["x" * 100] * 20, "limit"),
    ],
    ids=["nesting", "items", "tensors", "metadata"],
)
def test_a_message_that_passes_a_limit_is_refused(
    make_parties: MakeJob, limits: rpc.Limits, argument: Any, reason: str
) -> None:
    job = make_parties("a", "b", limits=limits)
    with pytest.raises(Exception, match=reason):
        job["a"].do(call, "b", functions.scale, argument)


def flood(to: str, count: int) -> list[str]:
    """As an honest worker never does: it would wait for room."""
    agent = current_node().transport
    assert isinstance(agent, Agent)
    outgoing: Any = agent._reach(current_node().members.find(to).id)
    outgoing._allowed = count
    futures = [rpc.rpc_async(to, functions.wait_for_gate) for _ in range(count)]
    told = []
    for future in futures[-3:]:
        try:
            told.append(str(future.wait()))
        except Exception as error:
            told.append(f"{type(error).__name__}: {error}")
    kept.extend(futures)
    return told


def outcomes() -> list[str]:
    told = []
    for future in kept:
        try:
            told.append(future.wait())
        except Exception as error:
            told.append(type(error).__name__)
    return told


def thread_count() -> int:
    return threading.active_count()


def test_calls_in_flight_are_limited_and_those_beyond_are_refused(make_parties: MakeJob) -> None:
    job = make_parties("a", "b", "c", limits=rpc.Limits(calls_in_flight=8))
    told = job["a"].do(flood, "b", 50)
    assert all("already runs 8 calls of worker 'a'" in each for each in told), told
    assert job["b"].do(thread_count) < 40
    assert job["c"].do(call, "b", functions.scale, 2) == 4
    job["c"].do(call, "b", functions.open_gate)
    ended = job["a"].do(outcomes)
    assert ended.count("through") == 8
    assert ended.count("RemoteError") == 42
    # What has ended makes room again.
    assert job["a"].do(call, "b", functions.scale, 2) == 4


@pytest.mark.parametrize("bad", [{"items": 0}, {"nesting": 1000}, {"message_bytes": 1.5}])
def test_limits_must_make_sense(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        rpc.Limits(**bad)


def fail_at_length(to: str, length: int) -> str:
    with pytest.raises(rpc.RemoteError) as caught:
        call(to, functions.fail_with, "x" * length)
    return str(caught.value)


def test_an_error_that_says_more_than_a_message_may_hold_costs_nobody_the_worker(job: Job) -> None:
    """It has its words twice, in its message and in its traceback."""
    said = job["a"].do(fail_at_length, "b", 9_000_000)
    assert "KeyError: 'xxx" in said
    assert len(said) < 5000
    assert job["a"].do(call, "b", functions.scale, 2) == 4
