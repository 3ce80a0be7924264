"""A public benchmark: the Sokoban speedrun, whose rules are for 8 GPUs and real models.

It was not shown to learn here. The speedrun (github.com/JeanKaddour/sokoban_speedrun, its LLM
track) trains Qwen3-4B-Instruct-2507 on one host with 8 H100s until the lower end of a 95% interval
of held-out pass@1 exceeds 0.80. Its published times: GRPO, 60 steps, 36:53, 0.884; CISPO, 35 steps,
19:20, 0.858. Boards, split, reward and evaluation are fixed. Algorithm and prompt are free, as long
as they give no hints about Sokoban beyond its rules. With its llm/datasets/ in a folder:

    export SOKOBAN_DATA=sokoban_speedrun/llm/datasets
    accelerate launch --config_file configs/eight_gpus.yaml train.py \\
        --task examples/sokoban_speedrun.py --model Qwen/Qwen3-4B-Instruct-2507 --num_steps 60 \\
        --prompts_per_step 16 --group_size 8 --temperature 0.8 --lr 1.6e-6 --warmup_steps 5 \\
        --lr_schedule linear --loss_agg seq-mean-token-mean --max_staleness 4 \\
        --max_prompt_tokens 1536 --max_response_tokens 5632 --tokens_per_micro_batch 16384 \\
        --gradient_checkpointing --eval_every 0
    accelerate launch --config_file configs/eight_gpus.yaml train.py \\
        --task examples/sokoban_speedrun.py --model runs/sokoban_speedrun/final --num_steps 0 \\
        --eval_samples 8 --eval_sampling_args '{"temperature": 0.8, "top_p": 0.95}' \\
        --max_prompt_tokens 1536 --max_response_tokens 12288

Compare eval/pass@1 of the second command, with eval/reward_stderr, with the published scores.
Neither command has been run here. The speedrun does three things that this does not: it forces an
answer at the length limit ("time is up"), it samples with top_p 0.95 in training, and its learning
rate ends at 0.15 of its start.

The first parseable <answer> counts. The reward is the share of the uncovered goals that the moves
cover in the end. It is 1 only if no box is left off a goal; an evaluation counts the 1s."""

import json
import os
import re
from pathlib import Path

from agent_loop import BadInput

SYSTEM_PROMPT = """Solve a Sokoban puzzle: push every box on a goal.

Each cell is one symbol: + wall, - floor, X goal, @ box, $ box on a goal, * player, % player on a
goal. Rows and columns are numbered from 0, rows downwards.

U, D, L and R move the player one cell up, down, left or right. A player who moves against a box
pushes it one cell further, if the cell behind it is a floor or a goal; boxes can't be pulled, nor
two be pushed at once. A box on a goal may be pushed off it. A move that is not possible changes
nothing.

Think the moves through, then end with all of them in one line, like <answer>URRD</answer>."""
MOVES = {"U": (-1, 0), "D": (1, 0), "L": (0, -1), "R": (0, 1)}
WORDS = re.compile(r"\b(up|down|left|right|[udlr])\b|[\s,;|:.-]+", re.IGNORECASE)


class Board:
    """A puzzle, made of a text with a line for each row and spaces between cells.

    walls, goals, boxes: sets of (row, column); player: a (row, column)."""

    def __init__(self, text: str):
        cells = {}
        for y, line in enumerate(filter(str.strip, text.splitlines())):
            for x, cell in enumerate(line.split()):
                cells[y, x] = cell

        def places(symbols: str) -> set[tuple[int, int]]:
            return {place for place, cell in cells.items() if cell in symbols}

        self.walls = places("+")
        self.goals = places("X%$")
        self.boxes = places("@$")
        (self.player,) = places("*%")
        self.n_covered_at_start = len(self.boxes & self.goals)

    def move(self, moves: str) -> "Board":
        """Makes the moves that are possible, in letters; returns the board itself."""
        for dy, dx in map(MOVES.__getitem__, moves):
            y, x = self.player
            target = (y + dy, x + dx)
            if target in self.walls:
                continue
            if target in self.boxes:
                beyond = (y + 2 * dy, x + 2 * dx)
                if beyond in self.walls | self.boxes:
                    continue
                self.boxes = self.boxes - {target} | {beyond}
            self.player = target
        return self

    @property
    def solved(self) -> bool:
        return self.boxes <= self.goals

    def progress(self) -> float:
        """Returns the share of the goals without a box at the start that have one now.

        If fewer goals are covered than at the start it is 0; if the puzzle is solved it is 1."""
        if self.solved:
            return 1.0
        n_new = len(self.boxes & self.goals) - self.n_covered_at_start
        n_uncovered = len(self.goals) - self.n_covered_at_start
        return max(0.0, n_new / max(1, n_uncovered))


def numbered(board: str) -> str:
    """Returns the text of a board with the numbers of its rows and columns."""
    rows = [line.split() for line in board.splitlines() if line.strip()]
    lines = ["  " + " ".join(map(str, range(len(rows[0]))))]
    return "\n".join(lines + [f"{y} {' '.join(row)}" for y, row in enumerate(rows)])


def find_moves(text: str) -> str | None:
    """Returns the moves of the first <answer> that has any, as letters; None if there are none.

    Moves may be letters or words, however separated."""
    for answer in re.findall(r"<answer>(.*?)</answer>", text, re.IGNORECASE | re.DOTALL):
        if re.fullmatch(r"[udlr\s]+", answer, re.IGNORECASE):
            moves = "".join(answer.split())
        elif WORDS.sub("", answer):  # there is something else in it
            moves = ""
        else:
            moves = "".join(word[:1] for word in WORDS.findall(answer))
        if moves:
            return moves.upper()
    return None


def load(split: str) -> list[dict]:
    """Returns the rows of the speedrun's files. Raises BadInput if they are not there."""
    folder = os.environ.get("SOKOBAN_DATA")
    if not folder:
        raise BadInput(
            "examples/sokoban_speedrun.py needs SOKOBAN_DATA, the speedrun's folder llm/datasets"
        )
    file = Path(folder, {"train": "sokoban_train.jsonl", "val": "sokoban_eval.jsonl"}[split])
    if not file.is_file():
        raise BadInput(
            f"SOKOBAN_DATA={folder}: there is no {file.name} (of the speedrun's llm/datasets)"
        )
    boards = [json.loads(line)["question"] for line in file.read_text().splitlines()]
    return [
        {
            "prompt": [{"role": "user", "content": numbered(board)}],
            "data_source": "sokoban",
            "extra_info": {"index": i, "board": board},
        }
        for i, board in enumerate(boards)
    ]


def reward(output, row: dict) -> dict:
    """Returns the progress that the answer makes as the score; "solved" is only logged."""
    last = output.messages[-1] if output.messages else {}
    moves = None
    if last.get("role") == "assistant":
        moves = find_moves(last.get("content") or "")
    if moves is None:
        return {"score": 0.0, "solved": 0}
    board = Board(row["extra_info"]["board"]).move(moves)
    return {"score": board.progress(), "solved": int(board.solved)}
