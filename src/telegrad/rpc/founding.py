"""How a job comes by its name and its key.

The first worker names the job. A key that was given stays with those who gave it: the store holds
its fingerprint only. A job that was given none makes one, in a file that only this user can read on
this host; in a job without a world size that file goes with the last worker, and the next one to
come founds the job anew.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from typing import Any

from telegrad.rpc.errors import RendezvousError
from telegrad.rpc.job_files import read_key, remove_if_last, write_key
from telegrad.rpc.noticeboard import Noticeboard, not_ours
from telegrad.rpc.rooms import JOB, unless_given_up
from telegrad.rpc.worker import WorkerInfo
from telegrad.wire.address import job_directory
from telegrad.wire.keys import JobKey, new_key

PATIENCE_WITH_LEAVING = 5.0


class Disagreement(RendezvousError):
    """This worker was told something else than the one that founded the job."""


class Founding:
    """One worker that founds a job, or finds the one that another has founded."""

    def __init__(
        self, board: Noticeboard, me: WorkerInfo, world_size: int | None, tensors: str | None
    ) -> None:
        self._board = board
        self._me = me
        self._world_size = world_size
        self._tensors = tensors

    def found_or_find(self, given: JobKey | None) -> tuple[str, JobKey]:
        """The name and the key of the job."""
        first = (
            self._me.id == 0
            if self._world_size is not None
            else self._board.claim("first worker", self._me.name)
        )
        return self._found_job(given) if first else self._find_job(given)

    def _found_job(self, key: JobKey | None) -> tuple[str, JobKey]:
        """Name the job, and make its key if none was given."""
        job = secrets.token_hex(8)
        given = key is not None
        try:
            if key is None:
                key = new_key()
                write_key(job, key)
            self._board.put(
                JOB,
                {
                    "job": job,
                    "key given": given,
                    "fingerprint": _fingerprint(key, job),
                    "world size": self._world_size,
                    "tensors": self._tensors,
                },
            )
        except BaseException:
            remove_if_last(job_directory(job))
            raise
        return job, key

    def _find_job(self, given: JobKey | None) -> tuple[str, JobKey]:
        """The job that the first worker has founded."""
        found = self._get_job()
        self._check_world_size(found["world size"])
        self._check_tensors(found.get("tensors"))
        if self._world_size is None and given is None and not found["key given"]:
            return self._find_open_job()
        return found["job"], self._agree_on_key(given, found)

    def _find_open_job(self) -> tuple[str, JobKey]:
        """A job whose key goes with its last worker, who may be leaving just now."""
        until = time.monotonic() + min(self._board.timeout, PATIENCE_WITH_LEAVING)
        while True:
            found = self._get_job()
            job = found["job"]
            key = read_key(job)
            if key is not None or time.monotonic() > until:
                return job, self._agree_on_key(key, found)
            if not any(self._board.present_ranks()):
                return self.succeed(job)
            time.sleep(0.01)

    def succeed(self, job: str) -> tuple[str, JobKey]:
        """Found the job anew after the last worker has left; of several that try, one does."""
        if self._board.claim(f"successor of {job}", self._me.name):
            return self._found_job(None)
        until = time.monotonic() + self._board.timeout
        while time.monotonic() < until:
            found = self._get_job()
            if found["job"] != job:
                return self._find_open_job()
            time.sleep(0.01)
        raise RendezvousError(
            f"worker {self._me.name!r} waited {self._board.timeout:g} s for another worker to "
            "found the job anew: has that one died?"
        )

    def _check_world_size(self, theirs: int | None) -> None:
        if theirs != self._world_size:
            raise Disagreement(
                f"worker {self._me.name!r} was told world_size={self._world_size}, but rank 0 "
                f"was told {theirs}: give every worker the same"
            )

    def _check_tensors(self, theirs: object) -> None:
        if theirs != self._tensors:
            raise Disagreement(
                f"worker {self._me.name!r} was told tensors={self._tensors!r}, but the first "
                f"worker of the job was told {theirs!r}: give every worker the same"
            )

    def _agree_on_key(self, key: JobKey | None, found: dict[str, Any]) -> JobKey:
        job = found["job"]
        if key is None and found["key given"]:
            raise Disagreement(
                f"worker {self._me.name!r} was given no key, but the job has one: set "
                "TELEGRAD_KEY_FILE (or TELEGRAD_KEY) as for the other workers"
            )
        if key is None:
            key = read_key(job)
        if key is None:
            raise Disagreement(
                f"worker {self._me.name!r} cannot read the job's key: it was made for one user on "
                "one host. For several hosts or users give every worker the same key with "
                "TELEGRAD_KEY_FILE, e.g. made by `openssl rand -hex 32`"
            )
        if not hmac.compare_digest(_fingerprint(key, job), found["fingerprint"]):
            raise Disagreement(
                f"worker {self._me.name!r} has another key than the first worker of the job: "
                "compare TELEGRAD_KEY and TELEGRAD_KEY_FILE"
            )
        return key

    def _get_job(self) -> dict[str, Any]:
        found = unless_given_up(self._board.get(JOB, "the first worker of the job"))
        match found:
            case {"job": str(), "key given": bool(), "fingerprint": str(), "world size": _}:
                return dict(found)
        raise not_ours("job")


def _fingerprint(key: JobKey, job: str) -> str:
    return hmac.new(key.derive("fingerprint"), job.encode(), hashlib.sha256).hexdigest()
