"""A paper's release: five files, flatrl/ without what a release may leave out, and one task."""

import shutil
import subprocess
import sys

from conftest import REPO, SMALL_CACHE, clean_env, rows_of

FILES = ("train.py", "rollout.py", "agent_loop.py", "data.py", "losses.py")
LEFT_OUT = ("report.py", "page.html", "notices.py", "watch.py", "trackers.py", "chat")
TASK = """
def load(split):
    return [{"prompt": [{"role": "user", "content": str(i)}]} for i in range(4)]

def reward(output, row):
    return float(len(output.text))
"""
FLAGS = [
    *["--task", "task.py", "--output_dir", "out", "--engine_args", SMALL_CACHE],
    *["--num_steps", "1", "--prompts_per_step", "2", "--group_size", "2"],
    *["--max_response_tokens", "8", "--save_every", "0"],
]


def test_a_release_trains_in_an_empty_folder(tmp_path, tiny_model):
    for name in FILES:
        shutil.copy(REPO / name, tmp_path)
    without = shutil.ignore_patterns("__pycache__", *LEFT_OUT)
    shutil.copytree(REPO / "flatrl", tmp_path / "flatrl", ignore=without)
    (tmp_path / "task.py").write_text(TASK)
    command = [sys.executable, "train.py", *FLAGS, "--model", tiny_model]
    subprocess.run(command, cwd=tmp_path, env=clean_env(), check=True)
    first, last = rows_of(tmp_path / "out/metrics.jsonl")
    assert (first["step"], last["step"]) == (0, 1)
    assert last["rollout/trajectories"] == 4 and last["actor/grad_norm"] > 0
    assert (tmp_path / "out/final/model.safetensors").is_file()
    assert not (tmp_path / "out/report.html").exists()
