"""The player as a client with finished samples of a peer: new groups, the same ones again, and other content."""

from __future__ import annotations

import random
from dataclasses import dataclass

from rollmesh.v1 import events_pb2, types_pb2
from rollmesh.v1 import run_pb2 as pb

from .calls import Calls
from .ends import Ends
from .model import RunModel, SubmittedGroup, require

PEER = types_pb2.SEGMENT_SOURCE_PEER


def draw_source(rng: random.Random, batch_groups: int) -> events_pb2.ForeignSource:
    """Return a bound and a share of the samples of peers. Groups with equal rewards are kept."""
    return events_pb2.ForeignSource(
        source="peer",
        max_age=rng.choice(["unlimited", "1", "3"]),
        share=1.0 if batch_groups == 1 else rng.choice([0.5, 1.0]),
        keep_equal=True,
    )


@dataclass(slots=True)
class Submitter:
    """Submits samples to one run that accepts those of peers."""

    ends: Ends
    calls: Calls
    model: RunModel
    rng: random.Random
    run: str
    group_size: int

    async def submit(self) -> None:
        """Submit groups, some of which were submitted before: exactly the new ones are added."""
        known = self.rng.sample(sorted(self.model.submitted), min(len(self.model.submitted), self.rng.randint(0, 2)))
        new = [f"k{len(self.model.submitted) + number}" for number in range(self.rng.randint(0 if known else 1, 2))]
        sizes = {key: self.model.submitted[key].num_episodes for key in known}
        sizes |= {key: self.rng.randint(1, 4 * self.group_size) for key in new}
        answer = await self.calls.call(self.ends.run.SubmitSamples, self._request(sizes))
        require(answer.ok, f"SubmitSamples was answered {answer}")
        added = answer.response.num_added
        require(added == len(new) or (answer.repeated and not added), f"{added} of {new} were added, with {known}")
        self.model.submitted |= {key: SubmittedGroup(sizes[key], self.model.applied) for key in new}
        self._check_groups(answer.response.submitted)

    async def conflict(self) -> None:
        """Submit other content of a known group: that is rejected, and a new group beside it is not added."""
        if not self.model.submitted:
            return
        key = self.rng.choice(sorted(self.model.submitted))
        num = self.model.submitted[key].num_episodes
        request = self._request({"never": 1, key: num}, text="other")
        answer = await self.calls.call(self.ends.run.SubmitSamples, request)
        require(answer.reason == "SAMPLE_CONFLICT", f"other content of group {key} was answered {answer}")
        again = await self.calls.call(self.ends.run.SubmitSamples, self._request({key: num}))
        require(again.ok and again.response.num_added == 0, f"the same samples again were answered {again}")
        self._check_groups(again.response.submitted)

    def _check_groups(self, account: pb.SubmittedSamples) -> None:
        num = len(self.model.submitted)
        require(account.groups == num, f"the account has {account.groups} groups, {num} were submitted")

    def _request(self, sizes: dict[str, int], text: str = "said") -> pb.SubmitSamplesRequest:
        request = pb.SubmitSamplesRequest(run=self.run, source=PEER)
        for key, num in sizes.items():
            request.tasks.add(task_id=key, messages=[types_pb2.Message(role="user", content="1+1")])
            for number in range(num):
                episode = request.episodes.add(key=types_pb2.EpisodeKey(task=key, group=key, episode=str(number)))
                message = types_pb2.Message(content=f"{text} {number}")
                episode.segments.add(parent=-1, role=types_pb2.SEGMENT_ROLE_ACTION, source=PEER, messages=[message])
        return request
