"""What follows a pass on each worker: when, how often, and with which gradients."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from telegrad.autograd.context import Context
from telegrad.autograd.errors import PassFailed
from telegrad.autograd.messages import Fail, Failure, Mode, Options, Sequel, encode
from telegrad.autograd.participant import Participant
from telegrad.autograd.sequels import Sequels
from telegrad.autograd.service import Autograd
from telegrad.rpc.errors import CallTimeout, WorkerLost
from tests.autograd.comparison import compare_one
from tests.autograd.failing import Fails
from tests.autograd.harness import Workers
from tests.autograd.machine import plain
from tests.autograd.programs import EVERYTHING, outcomes
from tests.autograd.simulated import compare_simulated

KEY = 77
SEQUEL = Sequel(KEY, b"said along")


@dataclass(eq=False)
class Noting:
    """A follower that notes what it is called with."""

    brief: bool = False
    calls: list[tuple[dict[Tensor, Tensor], bytes]] = field(default_factory=list)
    does: Callable[[], None] = lambda: None

    def follow(self, context: Context, data: bytes) -> None:
        self.calls.append((context.gradients(), data))
        self.does()


def with_followers(workers: Workers, brief: bool = False) -> list[Noting]:
    followers = [Noting(brief) for _ in workers.nodes]
    for node, follower in zip(workers.nodes, followers, strict=True):
        node.autograd.sequels.add(KEY, follower)
    return followers


def backward(
    workers: Workers,
    worker: int,
    roots: list[Tensor],
    mode: Mode = Mode.SMART,
    sequel: Sequel | None = SEQUEL,
    timeout: float | None = None,
) -> None:
    options = Options(mode=mode, sequel=sequel)
    workers.nodes[worker].autograd.backward(workers.context(worker), roots, options, timeout)


def counts(followers: list[Noting]) -> list[int]:
    return [len(follower.calls) for follower in followers]


def bent(workers: Workers, weights: list[Tensor]) -> Tensor:
    """From worker 0 over each of the others, one by one, and back to 0."""
    x = weights[0] * 2
    for k in range(1, len(weights)):
        (x,) = workers.cross(k - 1, k, [x])
        x = x * weights[k]
    (x,) = workers.cross(len(weights) - 1, 0, [x])
    return (x * weights[0]).sum()


def leaves(count: int) -> list[Tensor]:
    return [torch.full((2,), k + 2.0, requires_grad=True) for k in range(count)]


@pytest.mark.parametrize("brief", [False, True])
@pytest.mark.parametrize("mode", list(Mode))
def test_each_worker_is_followed_once_with_all_its_gradients(brief: bool, mode: Mode) -> None:
    workers, weights = Workers(4), leaves(3)
    followers = with_followers(workers, brief)
    backward(workers, 0, [bent(workers, weights)], mode)
    assert counts(followers) == [1, 1, 1, 0]
    for k, weight in enumerate(weights):
        found, data = followers[k].calls[0]
        assert data == b"said along"
        assert torch.equal(found[weight], workers.gradient(k, weight))
        assert torch.equal(found[weight], torch.full((2,), {0: 96.0, 1: 32.0, 2: 24.0}[k]))


@pytest.mark.parametrize("brief", [False, True])
def test_a_brief_follower_saves_the_acknowledgement_a_message_of_its_own(brief: bool) -> None:
    workers, weights = Workers(2), leaves(2)
    followers = with_followers(workers, brief)
    backward(workers, 0, [bent(workers, weights)])
    assert counts(followers) == [1, 1]
    assert workers.network.sent["gradient"] == 2
    assert workers.network.sent.get("ack", 0) == (0 if brief else 1)


def test_gradients_for_others_leave_before_a_follower_that_is_not_brief_runs() -> None:
    workers, weights = Workers(2), leaves(2)
    followers = with_followers(workers)
    sent: list[int] = []
    loss = bent(workers, weights)
    followers[1].does = lambda: sent.append(workers.network.sent["gradient"])
    backward(workers, 0, [loss])
    assert sent == [2]


class ReturnsWhatItSaved(torch.autograd.Function):
    """The sum of products. Its formula returns the other factor, or a view of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, view: bool) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.view = view
        return (x * weight).sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        (weight,) = ctx.saved_tensors
        return weight.view(2) if ctx.view else weight, gradient * torch.ones(2), None


@pytest.mark.parametrize("brief", [False, True])
@pytest.mark.parametrize("view", [False, True])
def test_a_gradient_is_sent_as_it_was_before_the_sequel_changed_its_memory(
    brief: bool, view: bool
) -> None:
    workers, (x, weight) = Workers(2), leaves(2)
    followers = with_followers(workers, brief)
    (there,) = workers.cross(0, 1, [x])
    (loss,) = workers.cross(1, 0, [ReturnsWhatItSaved.apply(there, weight, view)])
    followers[1].does = partial(torch.Tensor.zero_, weight.detach())
    backward(workers, 0, [loss])
    assert not weight.any()
    assert torch.equal(workers.gradient(0, x), torch.full((2,), 3.0))


def test_nobody_is_followed_without_a_sequel_or_under_another_key() -> None:
    workers, weights = Workers(2), leaves(2)
    followers = with_followers(workers)
    backward(workers, 0, [bent(workers, weights)], sequel=None)
    backward(workers, 0, [bent(workers, weights)], sequel=Sequel(KEY + 1))
    assert counts(followers) == [0, 0]
    backward(workers, 0, [bent(workers, weights)])
    assert counts(followers) == [1, 1]


def test_workers_without_a_follower_take_part_as_ever() -> None:
    workers, weights = Workers(3), leaves(3)
    follower = Noting()
    workers.nodes[1].autograd.sequels.add(KEY, follower)
    backward(workers, 0, [bent(workers, weights)])
    assert counts([follower]) == [1]
    assert workers.gradient(2, weights[2]) is not None


def test_a_worker_whose_result_is_not_used_is_followed_as_well() -> None:
    workers, weights = Workers(3), leaves(3)
    followers = with_followers(workers)
    workers.cross(2, 0, [weights[2] * 2])
    backward(workers, 0, [bent(workers, weights[:2])])
    assert counts(followers) == [1, 1, 1]
    assert weights[2] not in followers[2].calls[0][0]


def test_a_follower_is_kept_by_others_and_not_by_the_passes() -> None:
    workers, weights = Workers(2), leaves(2)
    followers = with_followers(workers)
    backward(workers, 0, [bent(workers, weights)])
    ghosts = [weakref.ref(follower) for follower in followers]
    followers.clear()
    assert [ghost() for ghost in ghosts] == [None, None]
    backward(workers, 0, [bent(workers, weights)])


def test_sequels_know_only_followers_that_live() -> None:
    sequels, follower = Sequels(), Noting()
    sequels.add(KEY, follower)
    assert sequels.follower(Sequel(KEY)) is follower
    del follower
    assert sequels.follower(Sequel(KEY)) is None


# Failing.


@pytest.mark.parametrize("brief", [False, True])
def test_a_follower_that_fails_on_a_worker_fails_the_pass_by_name(brief: bool) -> None:
    workers, weights = Workers(3), leaves(3)
    followers = with_followers(workers, brief)
    followers[1].does = partial(failing, ValueError("on purpose"))
    with pytest.raises(PassFailed, match="Error on Node 1: on purpose") as caught:
        backward(workers, 0, [bent(workers, weights)])
    assert caught.value.worker == "worker1"
    workers.network.drain()
    assert max(counts(followers)) == 1
    assert workers.gradient(0, weights[0]) is None
    workers.release()
    assert workers.leftovers() == {}


def failing(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize("error", [ValueError("on purpose"), KeyboardInterrupt()])
def test_a_follower_that_fails_where_the_pass_began_is_raised_as_it_is(
    error: BaseException,
) -> None:
    workers, weights = Workers(3), leaves(3)
    followers = with_followers(workers)
    followers[0].does = partial(failing, error)
    with pytest.raises(type(error)):
        backward(workers, 0, [bent(workers, weights)])
    workers.network.drain()
    assert max(counts(followers)) == 1
    workers.release()
    assert workers.leftovers() == {}


def test_where_the_pass_fails_nobody_is_followed() -> None:
    workers, weights = Workers(3), leaves(3)
    followers = with_followers(workers)
    (x,) = workers.cross(0, 1, [weights[0] * 2])
    (x,) = workers.cross(1, 2, [Fails.apply(x) * weights[1]])
    (x,) = workers.cross(2, 0, [x * weights[2]])
    with pytest.raises(PassFailed, match="Error on Node 1: on purpose"):
        backward(workers, 0, [x.sum()])
    workers.network.drain()
    assert counts(followers)[:2] == [0, 0]
    assert counts(followers)[2] <= 1


def fail_meanwhile(workers: Workers, worker: int, gradient: Tensor) -> None:
    """A worker hears, while its engine runs, that the pass has failed elsewhere."""
    failure = Failure(0, "worker0", "given up", "")
    said = encode(workers.context_id, 1, Fail(failure))
    workers.nodes[worker].autograd._on_pass_message(0, said)


def test_who_hears_of_a_failure_while_it_computes_is_not_followed() -> None:
    """A pass that was given up in time must not change what has been loaded since."""
    workers, weights = Workers(2), leaves(2)
    followers = with_followers(workers)
    loss = bent(workers, weights)
    weights[1].register_hook(partial(fail_meanwhile, workers, 1))
    with pytest.raises(CallTimeout):  # Who is said to have told of it is not told again.
        backward(workers, 0, [loss], timeout=3)
    assert counts(followers)[1] == 0


def test_who_is_told_meanwhile_that_the_context_is_released_is_not_followed() -> None:
    workers, weights = Workers(2), leaves(2)
    followers = with_followers(workers)
    loss = bent(workers, weights)
    weights[1].register_hook(lambda _: workers.nodes[1].autograd.end(workers.context(1)))
    with pytest.raises(CallTimeout):
        backward(workers, 0, [loss], timeout=3)
    assert counts(followers)[1] == 0


def test_a_gradient_that_comes_twice_while_a_worker_computes_does_no_harm() -> None:
    """What comes once all is resolved is of no use to anyone, as after the part has ended."""
    workers, weights = Workers(2), leaves(2)
    followers = with_followers(workers)
    (x,) = workers.cross(0, 1, [weights[0] * 2])
    (y,) = workers.cross(1, 0, [x * weights[1]])
    loss = y.sum()
    again: list[Callable[[], None]] = []
    receive = workers.nodes[1].autograd._on_asked

    def note(sender: int, payload: Any) -> Any:
        again.append(lambda: workers.nodes[1].autograd._on_pass_message(sender, payload))
        return receive(sender, payload)

    workers.nodes[1]._operations["autograd.pass"] = note
    weights[1].register_hook(lambda _: again[0]())
    backward(workers, 0, [loss], timeout=3)
    assert counts(followers) == [1, 1]


def test_a_pass_that_failed_keeps_neither_follower_nor_gradients() -> None:
    workers, weights = Workers(2), leaves(2)
    followers = with_followers(workers, brief=True)
    loss = bent(workers, weights)
    followers[1].does = partial(failing, ValueError("on purpose"))
    with pytest.raises(PassFailed):
        backward(workers, 0, [loss])
    (participant,) = workers.context(1).participants.values()
    ghosts = [weakref.ref(follower) for follower in followers]
    followers.clear()
    gc.collect()
    assert [ghost() for ghost in ghosts] == [None, None]
    assert participant._held == []


@pytest.mark.parametrize("brief", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_a_kill_at_any_message_ends_the_pass_and_follows_nobody_twice(
    seed: int, brief: bool
) -> None:
    workers, weights = Workers(4, seed), leaves(4)
    followers = with_followers(workers, brief)
    loss = bent(workers, weights)
    deliver, countdown = workers.network.deliver_one, [seed % 10]

    def deliver_and_kill(to: int | None = None) -> bool:
        countdown[0] -= 1
        if countdown[0] == 0:
            workers.kill(1 + seed % 3)
            return True
        return deliver(to)

    workers.network.deliver_one = deliver_and_kill  # type: ignore[method-assign]
    problem = ""
    try:
        backward(workers, 0, [loss])
    except (PassFailed, WorkerLost) as error:
        problem = str(error)
    if problem:
        assert f"worker{1 + seed % 3}" in problem
        workers.network.drain()
        assert max(counts(followers)) <= 1
    else:
        assert counts(followers) == [1, 1, 1, 1]
    workers.network.deliver_one = deliver  # type: ignore[method-assign]
    workers.release()
    survivors = {node.info.name for node in workers.nodes} - {f"worker{1 + seed % 3}"}
    assert not survivors & workers.leftovers().keys()


# Random programs: every pass on every worker is followed, and what follows changes the leaves.


@dataclass(eq=False)
class Following:
    """The follower of one pass on one worker."""

    records: Records
    participant: tuple[int, int, str]
    brief: bool
    spoils: bool

    def follow(self, context: Context, data: bytes) -> None:
        assert data == b"data"
        mine = context.participants.get(self.participant[1])
        assert mine is None or mine._part is None or mine._part.failure is None
        found = context.gradients()
        self.records.followed[self.participant] += 1
        self.records.found[self.participant] = (
            context,
            {leaf: plain(gradient) for leaf, gradient in found.items()},
        )
        if self.spoils:
            with torch.no_grad():
                for leaf in found:
                    leaf.add_(100.0)


class Records:
    """Who took part in which pass, and who was followed, by context, pass and worker."""

    def __init__(self) -> None:
        self.joined: set[tuple[int, int, str]] = set()
        self.followed: Counter[tuple[int, int, str]] = Counter()
        self.found: dict[tuple[int, int, str], tuple[Context, dict[Tensor, Tensor | None]]] = {}

    def check(self, context: Context, pass_id: int) -> None:
        """A pass has ended well."""
        mine = {who for who in self.joined if who[:2] == (context.id, pass_id)}
        assert mine
        assert {who: n for who, n in self.followed.items() if who in mine} == dict.fromkeys(mine, 1)
        for who in mine:
            there, found = self.found[who]
            after = there.gradients()
            assert found.keys() == after.keys()
            for leaf, gradient in found.items():
                torch.testing.assert_close(plain(after[leaf]), gradient, rtol=0, atol=0)


@pytest.fixture
def records(monkeypatch: pytest.MonkeyPatch) -> Iterator[Records]:
    """From now on every pass has a sequel, and every worker a follower."""
    records = Records()
    join, lead = Participant._join, Autograd.backward

    def joining(self: Participant, *given: Any) -> Any:
        records.joined.add((self.context.id, self.pass_id, self._node.info.name))
        return join(self, *given)

    def leading(
        self: Autograd, context: Context, roots: Any, options: Options, timeout: Any = None
    ) -> None:
        asked = Options(
            options.retain_graph, options.create_graph, options.mode, Sequel(KEY, b"data")
        )
        pass_id = (self.node.info.id << 48) + context.passes._own + 1
        lead(self, context, roots, asked, timeout)
        records.check(context, pass_id)

    def follower(self: Autograd, pass_id: int, sequel: Sequel) -> Following:
        (context,) = [c for c in self.container if pass_id in c.participants]
        participant = context.participants[pass_id]
        assert participant._part is not None
        spoils = not participant._part.options.retain_graph
        brief = (pass_id + self.node.info.id) % 2 == 0
        return Following(records, (context.id, pass_id, self.node.info.name), brief, spoils)

    monkeypatch.setattr(Participant, "_join", joining)
    monkeypatch.setattr(Autograd, "backward", leading)
    monkeypatch.setattr(Autograd, "follower", follower)
    yield records
    assert records.followed
    assert max(records.followed.values()) == 1


def check(count: int, features: str, compare: Any, records: Records) -> None:
    chosen = frozenset(features.split(",")) - {""}
    ran = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for seed, outcome in outcomes(range(count), chosen, compare):
            assert not outcome.startswith("FAILED"), f"seed {seed}, features {features}: {outcome}"
            assert max(records.followed.values(), default=1) == 1
            records.__init__()  # type: ignore[misc]
            records.followed[(0, 0, "")] = 1
            ran += not outcome.startswith("skipped")
    assert ran > count / 2


@pytest.mark.parametrize("features", ["hook,custom,module,passes", EVERYTHING, "fail,hook,late"])
def test_every_worker_that_takes_part_is_followed_once(features: str, records: Records) -> None:
    check(150, features, compare_one, records)


def test_every_worker_is_followed_once_in_fast_mode(records: Records) -> None:
    check(100, "hook,custom,module", partial(compare_one, mode=Mode.FAST), records)


@pytest.mark.parametrize("with_faults", [False, True])
def test_simulated_workers_are_followed_once(with_faults: bool, records: Records) -> None:
    check(60, EVERYTHING, partial(compare_simulated, with_faults=with_faults), records)
