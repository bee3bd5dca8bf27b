"""A member of a job says one thing that is not so: who is believed, and that nothing stays.

`liars.py` tries such lies by chance and by the thousand; here each that once did harm stands alone.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

from telegrad import autograd, rpc
from telegrad.autograd.context import WORKER_SHIFT, working_in
from telegrad.autograd.crossing import pack_note
from telegrad.autograd.messages import (
    Begin,
    Fail,
    Failure,
    History,
    Options,
    Sequel,
    decode,
    encode,
)
from telegrad.rpc.agent import Agent
from telegrad.rpc.current import current_node
from telegrad.rpc.loans import Loan
from telegrad.rpc.methods import call_parcel, fetch_parcel
from telegrad.rpc.reference_mail import MAX_EARLY, Inbox, in_one
from telegrad.rpc.reference_messages import (
    Fence,
    Fenced,
    ForkId,
    Gone,
    Message,
    ReferenceId,
    Register,
    Transfer,
    read_messages,
    write_message,
)
from telegrad.rpc.references import References
from telegrad.wire.codec import pack
from telegrad.wire.frames import Kind
from tests.rpc import data_functions as functions
from tests.rpc.fleet import Job, Nursery
from tests.rpc.test_data_limits import (
    A,
    B,
    C,
    attempt,
    call,
    contexts,
    forget,
    kept,
    passes_kept,
    references,
    service,
    wait_until,
)
from tests.rpc.test_data_only import MakeJob, make_parties, send_raw  # noqa: F401 (a fixture)


def say(to: int, message: Message) -> None:
    """The next message of the reference protocol."""
    node = current_node()
    lane = node.values._mail.lanes.get(to)
    numbers.setdefault(to, lane.sent if lane is not None else 0)
    numbers[to] += 1
    node.post(to, "reference", in_one(numbers[to], [message]))


numbers: dict[int, int] = {}


def lost() -> dict[str, str]:
    found: dict[str, str] = rpc.debug_info()["lost workers"]
    return found


def names_of_lost() -> list[str]:
    return sorted(lost())


# Who is gone.


def acquaint(job: Job) -> Job:
    for one, other in itertools.permutations("abc", 2):
        job[one].do(call, other, functions.scale, 1)
    return job


@pytest.fixture
def three(make_parties: MakeJob) -> Job:  # noqa: F811
    return acquaint(make_parties("a", "b", "c"))


@pytest.fixture(scope="module")
def lasting(nursery: Nursery) -> Iterator[Job]:
    """For lies that cost nobody the job. The numbers of a's messages to b are out of order soon."""
    job = Job(nursery, ("a", "b", "c"), trust="data")
    for name in "abc":
        job[name].do(functions.what_ran)  # imports the module
    yield acquaint(job)
    job.abandon()


def test_who_says_that_a_worker_is_gone_which_answers_goes_if_its_id_is_higher(
    three: Job,
) -> None:
    three["c"].do(say, B, Fence((A,)))
    wait_until(three, "b", names_of_lost, ["c"])
    assert three["b"].do(lost)["c"] == "it says that worker 'a' is gone, which answers here"
    assert three["a"].do(call, "b", functions.scale, 2) == 4
    assert three["b"].do(call, "a", functions.scale, 2) == 4


def test_who_has_the_lower_id_is_believed(three: Job) -> None:
    three["a"].do(say, B, Fence((C,)))
    wait_until(three, "b", names_of_lost, ["c"])
    assert three["b"].do(lost)["c"] == "worker 'a' reports that it is gone"
    assert three["a"].do(call, "b", functions.scale, 2) == 4


@pytest.mark.parametrize("number", [B, 3, 1 << 16, (1 << 64) - 1])
def test_neither_itself_nor_what_no_worker_can_be_does_a_worker_count_as_gone(
    lasting: Job, number: int
) -> None:
    lasting["a"].do(say, B, Fence((number,)))
    assert lasting["a"].do(call, "b", functions.scale, 2) == 4
    assert lasting["b"].do(lost) == {}


def expel(to: int, worker: Any, reason: Any = "made up") -> None:
    current_node().post(to, "expelled", (worker, reason))


def test_who_has_a_worker_expelled_which_is_well_goes_if_its_id_is_higher(three: Job) -> None:
    three["c"].do(expel, B, A)
    wait_until(three, "b", names_of_lost, ["c"])
    assert three["b"].do(lost)["c"] == "it says that worker 'a' is gone, which answers here"
    assert three["a"].do(call, "b", functions.scale, 2) == 4
    assert three["b"].do(call, "a", functions.scale, 2) == 4


def test_who_has_the_lower_id_may_have_others_expelled_in_few_words(three: Job) -> None:
    three["a"].do(expel, B, C, "x" * 1_000_000)
    wait_until(three, "b", names_of_lost, ["c"])
    assert len(three["b"].do(lost)["c"]) < 5000


def want_to_leave(to: str, *counts: int) -> str:
    node = current_node()
    asked = partial(node.request, node.members.find(to), "closing", 0, *counts, timeout=5)
    return attempt(asked)


@pytest.mark.parametrize("counts", [(0, 0, -1), (0, -1, 0), (-1, 0, 0)])
def test_fewer_calls_than_none_hide_nothing_that_is_under_way(
    lasting: Job, counts: tuple[int, ...]
) -> None:
    told = lasting["a"].do(want_to_leave, "b", *counts)
    assert "no message of a worker that wants to leave" in told


@pytest.mark.parametrize("number", [B, 3, -1, 1 << 16, 1 << 70, True, "a"])
def test_nobody_is_expelled_who_is_not_there(lasting: Job, number: Any) -> None:
    lasting["a"].do(expel, B, number)
    assert lasting["a"].do(call, "b", functions.scale, 2) == 4
    assert lasting["b"].do(lost) == {}


# References.


def reference_of(rref: Any) -> tuple[int, int, int]:
    owner, created_on, number = rref._reference
    return owner, created_on, number


def handles() -> int:
    return int(rpc.debug_info()["references"]["handles"])


def bring_home(to: str, giver: int) -> str:
    """A reference to a value of `to`, as if `giver` sent it."""
    rref = call(to, functions.give_reference, 1)
    kept.append(rref)
    return send_transfers(to, [(reference_of(rref), (giver, 99))])


def send_transfers(to: str, transfers: list[Any]) -> str:
    """Call with references that are made up."""
    node = current_node()
    made = []
    for reference, fork in transfers:
        rref: Any = object.__new__(rpc.RRef)
        rref._node, rref._reference = node, ReferenceId(*reference)
        rref._handle = ForkId(*fork)
        made.append(rref)
    share = node.values.share
    node.values.share = lambda handle, worker: Transfer(  # type: ignore[method-assign]
        next(each._reference for each in made if each._handle == handle), handle
    )
    try:
        return send_raw(to, (functions.take, tuple(made), {}))
    finally:
        node.values.share = share  # type: ignore[method-assign]
        for each in made:
            lies.append(each)


lies: list[Any] = []
"""Made-up references must not die: their death would be told to the core."""


@pytest.mark.parametrize("giver", [A, B])
def test_a_reference_that_another_is_said_to_send_is_refused_and_leaves_no_handle(
    lasting: Job, giver: int
) -> None:
    told = lasting["c"].do(bring_home, "b", giver)
    assert "says that another worker sent it" in told, told
    wait_until(lasting, "b", handles, 0)
    lasting["c"].do(forget)
    wait_until(lasting, "b", references, {})


def give_twice(to: str) -> str:
    me = current_node().info.id
    transfer = ((me, me, 7), (me, 8))
    return send_transfers(to, [transfer]) + " | " + send_transfers(to, [transfer])


def test_a_reference_that_comes_twice_is_refused_and_the_first_is_let_go(lasting: Job) -> None:
    told = lasting["c"].do(give_twice, "b")
    assert "answered 1 | " in told
    assert "came a second time" in told
    lasting["b"].do(functions.drop_all)
    wait_until(lasting, "b", references, {})


@pytest.mark.parametrize("number", [-1, 1 << 64])
def test_a_reference_of_which_nobody_could_be_told_is_refused(lasting: Job, number: int) -> None:
    """Its holder would try for ever to register it, and all that is to be told after it waits."""
    for transfer in [((A, A, number), (C, 9)), ((A, number, 7), (C, 9)), ((A, A, 7), (C, number))]:
        told = lasting["c"].do(send_transfers, "b", [transfer])
        assert "is named by" in told, told
    wait_until(lasting, "b", references, {})


def lend(to: str, owner: int) -> str:
    """Have another fetch a value for a call of a method."""
    value = rpc.RRef([1, 2, 3])
    counter = call(to, functions.give_reference, 1)
    kept.extend((value, counter))
    loan = Loan((owner, *reference_of(value)[1:]))
    return send_raw(to, call_parcel(counter._reference, "add", (loan,)))


@pytest.mark.parametrize("owner", [A, B, C, 77])
def test_nobody_has_a_worker_that_takes_data_only_fetch_values(lasting: Job, owner: int) -> None:
    told = lasting["a"].do(lend, "b", owner)
    assert "takes data only and fetches none for others" in told, told
    lasting["a"].do(forget)


def test_a_registration_for_one_that_is_fenced_leaves_no_promise() -> None:
    owner = References(0)
    for worker in (1, 2):
        owner.worker_joined(worker)
    owner.worker_lost(2, "killed")
    reference = ReferenceId(0, 1, 5)
    owner.receive(1, Register(Transfer(ReferenceId(0, 1, 4), ForkId(1, 1)), 2))
    owner.receive(1, Fenced(2))
    assert owner.debug_info()["owned"] == 0
    owner.receive(1, Register(Transfer(reference, ForkId(1, 2)), 2))
    assert owner.debug_info() == References(0).debug_info()


def register_as_if_from(to: int, giver: int) -> None:
    """A reference to a value of `to` that, so it says, came from a worker that is none."""
    rref = rpc.rpc_sync("b", functions.give_reference, args=(1,))
    say(to, Register(Transfer(rref._reference, ForkId(giver, 7)), current_node().info.id))


@pytest.mark.parametrize("giver", [77, (1 << 16) - 1, 1 << 40, (1 << 64) - 1])
def test_who_is_told_of_a_worker_that_is_none_does_not_count_it_as_lost(
    make_parties: MakeJob,  # noqa: F811
    giver: int,
) -> None:
    """It would ask all others whether they accept anything more from it, and they know no such
    worker: what anyone who is really lost has held would be kept for ever."""
    job = acquaint(make_parties("a", "b", "c"))
    job["a"].do(register_as_if_from, B, giver)
    assert job["a"].do(call, "b", functions.scale, 2) == 4
    assert job["b"].do(lost) == {}
    job["a"].kill()
    wait_until(job, "b", references, {})
    assert job["b"].do(names_of_lost) == ["a"]


def ask_for_what_never_comes(to: str) -> str:
    """A fetch of a value that, so it says, c will have made."""
    node = current_node()
    pending = node.calls.begin(node.members.find(to), "fetch", 30, node.runtime.now())
    agent = node.transport
    assert isinstance(agent, Agent)
    meta = pack(fetch_parcel(ReferenceId(B, C, 12345))).meta
    agent._outgoing[B].link.send(Kind.CALL, pending.call_id, meta)  # type: ignore[union-attr]
    return "asked"


def waiters() -> int:
    return int(rpc.debug_info()["references"]["waiters"])


def test_who_waits_for_a_value_for_the_sake_of_a_lost_worker_is_let_go(three: Job) -> None:
    three["a"].do(ask_for_what_never_comes, "b")
    wait_until(three, "b", waiters, 1)
    three["a"].kill()
    wait_until(three, "b", waiters, 0)
    assert three["c"].do(call, "b", functions.scale, 2) == 4


def ask_for(to: str, reference: tuple[int, int, int], operation: str) -> str:
    """Name a value as no honest worker does."""
    named = ReferenceId(*reference)
    forms = {
        "fetch": fetch_parcel(named),
        "method": call_parcel(named, "add", ()),
        "invoke": ("invoke", (reference, "add", (), {}), {}),
    }
    return send_raw(to, forms[operation])


@pytest.mark.parametrize("operation", ["fetch", "invoke", "method"])
def test_a_value_of_another_worker_is_not_waited_for(lasting: Job, operation: str) -> None:
    for owner in (A, C, 77, 1 << 40):
        told = lasting["a"].do(ask_for, "b", (owner, A, 5), operation)
        assert "no value of worker 'b'" in told, told
    assert lasting["b"].do(waiters) == 0


def shorten_patience() -> None:
    current_node().values.patience_with_promise = 0.2


@pytest.mark.parametrize("operation", ["fetch", "invoke", "method"])
def test_a_value_that_was_promised_and_never_asked_for_is_waited_for_within_a_bound(
    lasting: Job, operation: str
) -> None:
    lasting["b"].do(shorten_patience)
    told = lasting["a"].do(ask_for, "b", (B, A, 5), operation)
    assert "of worker 'b' was never asked for by who promised it, worker 'a'" in told, told
    assert lasting["b"].do(waiters) == 0


def test_messages_that_are_ahead_of_their_turn_are_bounded() -> None:
    inbox = Inbox()
    with pytest.raises(ValueError, match="out of turn"):
        inbox.keep(MAX_EARLY + 1, Fence((1,)))
    everyone = Fence(tuple(range(1 << 16)))
    inbox.keep(2, everyone)
    inbox.keep(3, everyone)
    with pytest.raises(ValueError, match="out of turn"):
        inbox.keep(4, everyone)
    assert inbox.begin_next() is None


# Autograd.


def speak_of_context(to: int, origin: int, number: int) -> None:
    """A call under a context that its origin never made."""
    node = current_node()
    agent = node.transport
    assert isinstance(agent, Agent)
    pending = node.calls.begin(node.members.member(to).info, functions.scale, 30, 0.0)
    pending.deadline = node.runtime.now() + 30
    note = pack_note((origin << WORKER_SHIFT) + number)
    meta = pack((functions.scale, (2,), {})).meta
    agent._outgoing[to].link.send(Kind.CALL, pending.call_id, meta, note=note)  # type: ignore[union-attr]
    assert node.wait(pending) == 4


def test_a_context_in_the_name_of_another_goes_with_who_spoke_of_it(three: Job) -> None:
    three["a"].do(speak_of_context, B, C, 1000)
    wait_until(three, "b", contexts, 1)
    three["a"].kill()
    wait_until(three, "b", contexts, 0)


def tell_census(to: int, origin: int, still_open: int = 0) -> None:
    first = origin << WORKER_SHIFT
    census = (origin, 1 << 60, first + (1 << 40), tuple(range(first, first + still_open)), ())
    current_node().post(to, "autograd.release", census)


def census_of() -> list[int]:
    return sorted(service().container._census)


def test_a_census_of_who_is_not_in_the_job_is_not_kept(three: Job) -> None:
    for origin in (3, 77, 1 << 40):
        three["a"].do(tell_census, B, origin)
    three["a"].do(tell_census, B, A)
    wait_until(three, "b", census_of, [A])


def test_a_census_in_the_name_of_another_ends_nothing(three: Job) -> None:
    three["c"].do(cross_once, "b")
    three["b"].do(cross_once, "c")
    for origin in (B, C):
        three["a"].do(tell_census, B, origin)
    # What a says next comes after it, and what c answers b before c's own pass.
    three["a"].do(tell_census, B, A)
    wait_until(three, "b", census_of, [A, C])
    assert three["c"].do(differentiate) == [1.0, 1.0, 1.0]
    assert three["b"].do(differentiate) == [1.0, 1.0, 1.0]
    for name in "bc":
        wait_until(three, name, contexts, 0)


def test_a_census_has_a_bound(three: Job) -> None:
    three["a"].do(tell_census, B, A, 100_000)
    three["a"].do(speak_of_context, B, A, 1)
    assert three["b"].do(census_of) == []


def cross_and_release(via: str, to: str) -> None:
    with autograd.context():
        call(via, functions.square_weight_there, to, torch.ones(3, requires_grad=True))


def test_a_release_reaches_those_that_its_origin_never_called(three: Job) -> None:
    three["a"].do(cross_and_release, "b", "c")
    for name in "bc":
        wait_until(three, name, contexts, 0)
        assert three[name].do(census_of) == [A]


def imitate_message(context_id: int, message: int) -> str:
    """A tensor for a's context that has the number of one that a sent."""
    node = current_node()
    agent = node.transport
    assert isinstance(agent, Agent)
    packed = pack((functions.scale, (torch.ones(3),), {}))
    pending = node.calls.begin(node.members.member(B).info, functions.scale, 30, 0.0)
    pending.deadline = node.runtime.now() + 30
    link = agent._outgoing[B].link  # type: ignore[union-attr]
    note = pack_note(context_id, message, (0,))
    link.send(Kind.CALL, pending.call_id, packed.meta, packed.buffers, note, packed.tensors)
    return attempt(lambda: node.wait(pending))


def cross_once(to: str) -> tuple[int, int]:
    """The number of the context, and that of the message which crossed."""
    context = service().new_context()
    x = torch.ones(3, requires_grad=True)
    with working_in(context):
        loss = call(to, functions.weigh, x)
    kept.append((context, x, loss))
    return context.id, next(iter(context.sends))


def differentiate() -> list[float]:
    context, x, loss = kept.pop()
    autograd.backward(context.id, [loss])
    found = autograd.get_gradients(context.id)[x].tolist()
    service().release(context.id)
    return list(found)


def records_kept() -> dict[int, int]:
    ledger = service().container._records
    return {worker: len(kept) for worker, kept in ledger._kept.items() if kept}


def test_a_message_under_the_number_of_anothers_is_refused(lasting: Job) -> None:
    context_id, message = lasting["a"].do(cross_once, "b")
    told = lasting["c"].do(imitate_message, context_id, message)
    assert "from worker 'c' has a number that worker 'a' gives" in told, told
    assert lasting["a"].do(differentiate) == [1.0, 1.0, 1.0]
    wait_until(lasting, "b", records_kept, {})


def tell_history(to: int, over_below: int) -> None:
    node = current_node()
    context = service().new_context()
    with working_in(context):
        call(to, functions.scale, 2)
    pass_id = (node.info.id << WORKER_SHIFT) + 5
    node.post(
        to,
        "autograd.pass",
        encode(context.id, pass_id, Begin(Options(), History(over_below))),
    )


def bounds_kept() -> list[int]:
    return [bound for c in service().container for bound in c.passes._bounds]


def test_a_pass_tells_of_the_passes_of_its_initiator_only(lasting: Job) -> None:
    lasting["a"].do(tell_history, B, (C << WORKER_SHIFT) + 9)
    wait_until(lasting, "b", passes_kept, 1)
    assert lasting["b"].do(bounds_kept) == []
    lasting["a"].do(tell_history, B, (A << WORKER_SHIFT) + 2)
    wait_until(lasting, "b", bounds_kept, [A])


followers: list[Any] = []


class Follower:
    """What a worker has done after its own passes, and nobody else's."""

    brief = False

    def __init__(self) -> None:
        self.followed = 0

    def follow(self, context: Any, data: bytes) -> None:
        self.followed += 1


def add_follower(key: int) -> None:
    followers[:] = [Follower()]
    service().sequels.add(key, followers[0])


def times_followed() -> int:
    times: int = followers[0].followed
    return times


def differentiate_and_follow(key: int) -> list[float]:
    context, x, loss = kept.pop()
    service().backward(context, [loss], Options(sequel=Sequel(key, b"odd")))
    found = autograd.get_gradients(context.id)[x].tolist()
    service().release(context.id)
    return list(found)


def test_nobody_has_done_on_another_worker_what_follows_a_pass(lasting: Job) -> None:
    key = 4711
    for name in "ab":
        lasting[name].do(add_follower, key)
    lasting["a"].do(cross_once, "b")
    assert lasting["a"].do(differentiate_and_follow, key) == [1.0, 1.0, 1.0]
    assert lasting["a"].do(times_followed) == 1
    assert lasting["b"].do(times_followed) == 0


def announce_sequel(to: int, size: int) -> None:
    """Begin a pass that is said to have a sequel of so many bytes."""
    node = current_node()
    context = service().new_context()
    with working_in(context):
        call(to, functions.scale, 2)
    pass_id = (node.info.id << WORKER_SHIFT) + 1
    begin = encode(context.id, pass_id, Begin(Options(sequel=Sequel(1, b"")), History()))
    node.post(
        to, "autograd.pass", begin._replace(data=begin.data[:-4] + size.to_bytes(4, "little"))
    )
    service().release(context.id)


@pytest.mark.parametrize("size", [1, 1 << 20, (1 << 32) - 1])
def test_a_sequel_that_is_not_there_does_no_harm(lasting: Job, size: int) -> None:
    lasting["a"].do(announce_sequel, B, size)
    lasting["a"].do(cross_once, "b")
    assert lasting["a"].do(differentiate) == [1.0, 1.0, 1.0]
    assert lasting["b"].do(lost) == {}


def begin_in_contexts_to_come(to: int, origin: int) -> None:
    """Say of the first contexts that another makes that all passes in them are over."""
    first = origin << WORKER_SHIFT
    for number in range(first, first + 100):
        begin = Begin(Options(), History((origin << WORKER_SHIFT) + (1 << 20)))
        current_node().post(to, "autograd.pass", encode(number, first + 1, begin))
    call(to, functions.scale, 2)


def test_who_has_no_part_in_a_context_has_no_say_in_its_passes(three: Job) -> None:
    three["c"].do(begin_in_contexts_to_come, B, A)
    for _ in range(2):
        three["a"].do(cross_once, "b")
        assert three["a"].do(differentiate) == [1.0, 1.0, 1.0]


def flood_pass(to: int, count: int) -> list[str]:
    """Say more in a pass than there is to say, while nobody can take it in."""
    node = current_node()
    context = service().new_context()
    with working_in(context):
        call(to, functions.scale, 2)
    begin = encode(context.id, (node.info.id << WORKER_SHIFT) + 1, Begin(Options(), History()))
    for _ in range(count):
        node.post(to, "autograd.pass", begin)
    return []


def hold_drivers() -> None:
    """From now on whoever drives a pass here waits for the gate."""
    from telegrad.autograd.participant import Participant

    handle_all = Participant._handle_all

    def wait_and_handle(participant: Participant, batch: Any) -> None:
        current_node().transport.blocking()
        functions._gate.wait(30)
        handle_all(participant, batch)

    Participant._handle_all = wait_and_handle  # type: ignore[method-assign]


def events_waiting() -> int:
    return sum(len(part._inbox) for c in service().container for part in c.participants.values())


def test_what_waits_for_the_driver_of_a_pass_is_bounded(three: Job) -> None:
    three["b"].do(hold_drivers)
    three["a"].do(flood_pass, B, 500)
    assert three["a"].do(call, "b", functions.scale, 2) == 4
    assert three["b"].do(events_waiting) <= 66
    three["b"].do(functions.open_gate)


def complain(to: int, count: int, text: str) -> None:
    """Say again and again that nothing of a pass could be read."""
    node = current_node()
    for _ in range(count):
        node.post(to, "autograd.unread", (0, text))


def test_complaints_that_wait_for_the_driver_of_a_pass_are_bounded(three: Job) -> None:
    three["b"].do(hold_drivers)
    three["a"].do(flood_pass, B, 1)
    three["a"].do(complain, B, 500, "x" * 10_000)
    assert three["a"].do(call, "b", functions.scale, 2) == 4
    assert three["b"].do(events_waiting) <= 66
    three["b"].do(functions.open_gate)


def test_what_others_say_of_a_failure_is_kept_in_few_words() -> None:
    failure = Failure(1, *["x" * 1_000_000] * 5)
    _, _, read = decode(encode(1, 2, Fail(failure)))
    assert isinstance(read, Fail)
    assert all(len(text) < 21_000 for text in dataclasses.astuple(read.failure)[1:])
    told = Failure.of(ValueError("begins" + "x" * 1_000_000 + "ends"), 1, "a")
    assert len(told.message) < 21_000
    assert len(told.traceback) < 21_000
    assert told.message.startswith("begins")
    assert told.message.endswith("ends")


def test_why_a_reference_is_gone_is_kept_in_few_words() -> None:
    (gone,) = read_messages(write_message(Gone(ForkId(1, 2), "x" * 1_000_000)))
    assert isinstance(gone, Gone)
    assert len(gone.reason) < 5000
