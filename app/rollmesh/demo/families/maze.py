"""The maze family: a text game of several turns with partial observation, after LMRL-Gym (Abdulhai et al. 2023,
arXiv:2311.18232; code: abdulhaim/LMRL-Gym, llm_rl_scripts/maze).

The model stands in a cell of a maze and reads which directions are open, nothing else. Each turn is one move: `north`,
`east`, `south` or `west`, as the last such word of its text. The game ends at the goal, or after `moves_max` moves. The
rewards are born in the game, so the scorer `environment` must declare both:

    step    of each turn: 0 if the move reaches the goal, -4 if the text contains no move, else -1
    solved  of the sample: 1 at the goal, else 0

`step` is the `standard_reward` of the authors' code: a move into a wall costs -1 and changes nothing. The return of an
episode is minus the number of its other moves, so a method that assigns credit to turns can tell the turn that walked
back from the one that did not. A level is the length of the shortest path.

Deviations: each task is another maze, a random spanning tree of 16 cells, where the authors have one maze and random
starts, so a path cannot be learned by heart. Observations name open directions instead of walls, and `solved` is added
for methods that read rewards of the whole sample only.

With `prefilled_max`, the source also relaxes each training task: the conversation begins with the first k moves of the
shortest path and what the model would have read after them, and the game resumes there. The label `remaining` is
the number of moves that are left, so a selector of categories can draw the tasks as a curriculum from the last move to
the whole game (QWeb, 2018-12, arXiv:1812.09195: a part of a task is done already, and the policy gradually gets more of
it). Deviation: the paper relaxes web forms and schedules the share by hand.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from rollmesh.services.data.generated import Demonstration, GeneratedOptions, GeneratedSource
from rollmesh.services.data.task import PoolTask, Split
from rollmesh.services.rollout.agent import Agent, Environment, Task
from rollmesh.shared.config.settings import NonNegativeInt, PositiveInt, Settings
from rollmesh.shared.domain.trajectory import FinishReason, Message

SIDE = 4
"""Cells per side."""
LEVEL_MAX = 8
STEP_GOAL, STEP, STEP_NO_MOVE = 0.0, -1.0, -4.0

_MOVES: Mapping[str, tuple[int, int]] = {"north": (0, -1), "east": (1, 0), "south": (0, 1), "west": (-1, 0)}
_MOVE = re.compile(rf"\b({'|'.join(_MOVES)})\b")
_KEY = re.compile(rf"([0-3]{{{SIDE * SIDE}}})-(\d{{1,2}})-(\d{{1,2}})")
_EAST, _SOUTH = 1, 2
_PREFILLED = "-prefilled-"
"""In the id of a relaxed task, before the number of moves that are made."""


@dataclass(frozen=True, slots=True)
class Maze:
    """A maze with a start and a goal. Cells are numbered row by row."""

    passages: str
    """A digit per cell: 1 if its east side is open, plus 2 if its south side is."""
    start: int
    goal: int

    @classmethod
    def parse(cls, key: str) -> Maze:
        """Raise ValueError if the text is not a key."""
        found = _KEY.fullmatch(key)
        cells = SIDE * SIDE
        if found is None or not (int(found[2]) < cells > int(found[3])):
            raise ValueError(f"a maze must be written as {cells} digits of 0 to 3, -START and -GOAL, got {key!r:.100}")
        return cls(found[1], int(found[2]), int(found[3]))

    @property
    def key(self) -> str:
        return f"{self.passages}-{self.start}-{self.goal}"

    def exits(self, cell: int) -> dict[str, int]:
        """Return the open directions of a cell, each with the cell behind it."""
        found = {}
        for name, (right, down) in _MOVES.items():
            x, y = cell % SIDE + right, cell // SIDE + down
            if 0 <= x < SIDE and 0 <= y < SIDE:
                other = y * SIDE + x
                bit = _EAST if right else _SOUTH
                if int(self.passages[min(cell, other)]) & bit:
                    found[name] = other
        return found

    def path(self) -> list[str]:
        """Return the moves of the shortest path from the start to the goal."""
        ways = self.ways()
        if self.goal not in ways:
            raise ValueError(f"the goal of the maze {self.key!r} cannot be reached")
        return ways[self.goal]

    def ways(self) -> dict[int, list[str]]:
        """Return the moves of the shortest path from the start to each cell that can be reached."""
        ways: dict[int, list[str]] = {self.start: []}
        cells = [self.start]
        for cell in cells:
            for name, other in self.exits(cell).items():
                if other not in ways:
                    ways[other] = [*ways[cell], name]
                    cells.append(other)
        return ways

    def view(self, cell: int) -> str:
        """Return what the model reads in a cell."""
        return "goal" if cell == self.goal else "open: " + " ".join(self.exits(cell))


def make_maze(rng: random.Random, level: int) -> Maze:
    """Return a random maze, a spanning tree of the cells, whose shortest path has `level` moves."""
    while True:
        passages = [0] * (SIDE * SIDE)
        stack, seen = [rng.randrange(len(passages))], set[int]()
        seen.add(stack[0])
        while stack:
            cell = stack[-1]
            steps = [(x, y) for x, y in _MOVES.values() if 0 <= cell % SIDE + x < SIDE and 0 <= cell // SIDE + y < SIDE]
            new = [cell + y * SIDE + x for x, y in steps if cell + y * SIDE + x not in seen]
            if not new:
                stack.pop()
                continue
            other = rng.choice(new)
            passages[min(cell, other)] |= _EAST if abs(cell - other) == 1 else _SOUTH
            seen.add(other)
            stack.append(other)
        maze = Maze("".join(map(str, passages)), start=rng.randrange(len(passages)), goal=0)
        far = [goal for goal, way in sorted(maze.ways().items()) if len(way) == level]
        if far:
            return replace(maze, goal=rng.choice(far))


class MazeSourceOptions(GeneratedOptions):
    """Settings of the source `maze`."""

    prefilled_max: NonNegativeInt = 0
    """Greatest number of moves that a relaxed training task has made already. Each maze becomes a task with 0, 1, ...
    such moves, of which at least one is left. 0: tasks are not relaxed."""


class MazeSource(GeneratedSource):
    """The prompt shows the first cell. The id of a task is the whole maze, for the agent. The tasks have no answer
    key."""

    name = "maze"
    hardest_level = LEVEL_MAX
    Options = MazeSourceOptions

    def make(self, rng: random.Random, level: int) -> str:
        return make_maze(rng, level).key

    def prompt(self, key: str) -> str:
        maze = Maze.parse(key)
        return f"go to the goal, one move per turn\n{maze.view(maze.start)}"

    def demonstration(self, key: str) -> Demonstration:
        """The shortest path, with a move where the demonstrations of other families have a call."""
        maze = Maze.parse(key)
        cell, calls = maze.start, []
        for move in maze.path():
            cell = maze.exits(cell)[move]
            calls.append((move, maze.view(cell)))
        return Demonstration(tuple(calls), "goal")

    def tasks(self) -> Iterator[PoolTask]:
        for task in super().tasks():
            whole = replace(task, task_id=task.oracle_ref.replace(":", "-"), oracle_ref="")
            yield from self._relaxed(whole) if task.split is Split.TRAIN else (whole,)

    def _relaxed(self, whole: PoolTask) -> Iterator[PoolTask]:
        """Yield a task with no move made, one move made, and so on."""
        assert isinstance(self.options, MazeSourceOptions)
        if not self.options.prefilled_max:
            yield whole
            return
        calls = self.demonstration(maze_key(whole.task_id)).calls
        for made in range(min(self.options.prefilled_max, len(calls) - 1) + 1):
            turns = [turn for move, view in calls[:made] for turn in (("assistant", move), ("tool", view))]
            yield replace(
                whole,
                task_id=f"{whole.task_id}{_PREFILLED}{made}" if made else whole.task_id,
                messages=(
                    *whole.messages,
                    *(Message(role=role, content=text) for role, text in turns),
                ),
                labels={**whole.labels, "remaining": str(len(calls) - made)},
            )


def maze_key(task_id: str) -> str:
    """Return the key of the maze of a task, whose id may begin with the name of its source in a mixture."""
    return task_id.rpartition("/")[2].removeprefix(f"{MazeSource.name}-").partition(_PREFILLED)[0]


class MazeOptions(Settings):
    """Options of the agent `maze`."""

    moves_max: PositiveInt = 12
    """Most moves of a game, beside those that a relaxed task has made. `rollout.limits.turns_max` should not be
    lower."""


class MazeAgent(Agent):
    """Play the maze of a task of the source `maze`, and give the rewards `step` and `solved`."""

    Options = MazeOptions

    def __init__(self, *, options: MazeOptions) -> None:
        self._options = options

    async def run(self, task: Task, env: Environment) -> None:
        maze = Maze.parse(maze_key(task.task_id))
        cell, moves = maze.start, 0
        for message in task.messages:
            if message.role == "assistant":
                cell = maze.exits(cell)[message.content]
        try:
            while cell != maze.goal and moves < self._options.moves_max:
                turn = await env.generate()
                moves += 1
                words = _MOVE.findall(turn.text)
                cell = maze.exits(cell).get(words[-1], cell) if words else cell
                step = STEP_GOAL if cell == maze.goal else STEP if words else STEP_NO_MOVE
                env.reward("step", step, turn=-1, evidence=words[-1] if words else "no move")
                if turn.finish is not FinishReason.STOP:
                    return  # the next observation would follow an unfinished turn
                env.observe(maze.view(cell) if words else f"not a move; {maze.view(cell)}")
        finally:
            solved = cell == maze.goal
            env.reward("solved", solved, evidence=f"{'at' if solved else 'not at'} the goal after {moves} moves")
