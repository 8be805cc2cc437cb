"""Show a sample as a conversation on a terminal: messages, tokens and weights of each turn, rewards with their
evidence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.box import ROUNDED
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.text import Text

from rollmesh.app.samples.samples import ACTION, ChainsLine, EndpointLine, RewardLine, SampleLine, SegmentLine

_STYLES = {"system": "dim", "user": "bold", "assistant": "cyan", "tool": "yellow"}
_EVIDENCE_CHARS_MAX = 200


@dataclass(frozen=True, slots=True)
class TranscriptTurn:
    """One generation: its segments, several if the weights changed during it."""

    segments: tuple[SegmentLine, ...]

    @property
    def num_tokens(self) -> int:
        return sum(len(segment.token_ids) for segment in self.segments)

    @property
    def versions(self) -> list[str]:
        """The weights that sampled it, e.g. `main@0.0`."""
        return list(
            dict.fromkeys(f"{v.policy}@{v.step}.{v.incarnation}" for s in self.segments if (v := s.version) is not None)
        )

    def describe(self) -> str:
        """Return e.g. `12 tokens, main@0.0, mean log-prob -0.31, stop`."""
        logprobs = [value for segment in self.segments for value in segment.logprobs or ()]
        facts = [f"{self.num_tokens} tokens", *self.versions]
        if logprobs:
            facts.append(f"mean log-prob {sum(logprobs) / len(logprobs):.2f}")
        return ", ".join([*facts, self.segments[-1].finish])


def turns_of(segments: Sequence[SegmentLine]) -> list[TranscriptTurn]:
    """Return the generations on the path of a sample, in order."""
    turns: list[TranscriptTurn] = []
    open_turn: list[SegmentLine] = []
    for segment in segments:
        if segment.role == ACTION:
            open_turn.append(segment)
        if open_turn and (segment.role != ACTION or segment.finish != "unfinished"):
            turns.append(TranscriptTurn(tuple(open_turn)))
            open_turn = []
    return [*turns, TranscriptTurn(tuple(open_turn))] if open_turn else turns


def generated_messages(line: SampleLine) -> dict[int, TranscriptTurn]:
    """Return the turn that generated each message, by the index of the message; empty if they do not agree."""
    turns = turns_of(line.segments)
    said = [index for index, message in enumerate(line.messages) if message.role == "assistant"]
    # The prompt may contain assistant messages too. The last ones are the generated ones.
    return dict(zip(said[-len(turns) :], turns, strict=False)) if turns and len(said) >= len(turns) else {}


def transcript(line: SampleLine) -> RenderableType:
    """Return the sample as a panel. Its text is never interpreted as markup."""
    turns, generated = turns_of(line.segments), generated_messages(line)
    parts: list[RenderableType] = []
    for index, message in enumerate(line.messages):
        turn = generated.get(index)
        parts.append(_message(message.role, message.content, turn.describe() if turn is not None else ""))
    parts.append(rewards_text(line.rewards))
    if line.endpoints:
        parts.append(endpoints_text(line.endpoints))
    if line.chains is not None:
        parts.append(chains_text(line.chains))
    labels = "".join(f" {name}={value}" for name, value in line.labels.items())
    agent = f", agent {line.agent}" if line.agent else ""
    title = Text(f"{line.sample_id}  {line.task}{labels}{agent}")
    sampled = sum(turn.num_tokens for turn in turns)
    foot = Text(
        f"{line.num_tokens} tokens, {sampled} sampled in {len(turns)} turns, attempt {line.attempt}", style="dim"
    )
    return Panel(Group(*parts), title=title, subtitle=foot, title_align="left", subtitle_align="right", box=ROUNDED)


def _message(role: str, content: str, note: str) -> RenderableType:
    text = Text()
    text.append(f"{role}", style=f"{_STYLES.get(role, '')} underline".strip())
    if note:
        text.append(f"  ({note})", style="dim")
    text.append("\n")
    text.append(content.rstrip() + "\n", style=_STYLES.get(role, ""))
    return text


def rewards_text(rewards: Sequence[RewardLine]) -> Text:
    """Return a line per reward. A failed scorer is shown with its outcome instead of a value."""
    text = Text()
    for reward in rewards:
        counts = reward.outcome == "ok"
        value = f"{reward.value:g}" if counts else reward.outcome
        style = ("green" if reward.value > 0 else "red") if counts else "magenta"
        text.append(f"{reward.name} ", style="bold")
        text.append(value, style=style)
        scope = "" if reward.segment < 0 else f", segment {reward.segment}"
        evidence = f": {reward.evidence[:_EVIDENCE_CHARS_MAX]}" if reward.evidence else ""
        text.append(f"  {reward.scorer}{scope}{evidence}\n", style="dim")
    text.rstrip()
    return text if rewards else Text("no reward", style="dim")


def endpoints_text(uses: Sequence[EndpointLine]) -> Text:
    """Return a line per endpoint and caller with the sums of the episode."""
    text = Text()
    for use in uses:
        recorded = f" ({use.replayed} recorded)" if use.replayed else ""
        text.append(f"{use.endpoint} ", style="bold")
        text.append(f"{use.calls} {'answer' if use.calls == 1 else 'answers'}{recorded} to {use.caller}")
        tokens = f"{use.prompt_tokens} + {use.completion_tokens} tokens"
        text.append(f"  {tokens}, price {use.price:.6g}, {use.latency_s:.3f} s\n", style="dim")
    text.rstrip()
    return text


def chains_text(chains: ChainsLine) -> Text:
    """Return a line with the conversations of the episode's clients, and the tokens that were encoded again."""
    num = sum(chains.begun.values())
    causes = ", ".join(f"{cause} {num}" for cause, num in chains.begun.items())
    text = Text("clients ", style="bold")
    text.append(f"{num} {'conversation' if num == 1 else 'conversations'} ({causes or 'none'})")
    text.append(
        f"  {chains.continued} continued, {chains.forks} forks, {chains.reencoded_tokens} tokens encoded again",
        style="dim",
    )
    return text


def rewards_line(rewards: Sequence[RewardLine]) -> str:
    """Return all rewards in one line; a failed scorer with its outcome and evidence."""
    return "  ".join(
        f"{r.name} {r.value:g}" if r.outcome == "ok" else f"{r.name} {r.outcome}: {r.evidence}" for r in rewards
    )


def means_text(means: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.3f}" for name, value in means.items()) or "none"
