from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import zstandard

from mosaic.log import RunError, RunLog, atomic_write, from_json, read_trajectory_file, to_json, write_trajectory_file
from mosaic.trajectory import Session, SessionType, Trajectory


def record(prompt_id: str = "p", logprob: float = -0.5) -> dict:
    session = Session(SessionType.NORMAL, [1], [2, 3], [True, False], [logprob, None])
    training = {
        "session_advantage": [0.25],
        "trajectory_advantage": 0.5,
        "gain": [None],
        "eligible": [False],
        "group": 0,
    }
    return {**Trajectory(prompt_id, [session], reward=1.0, answers=("a",)).to_dict(), "training": training}


def board(directory: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory / "tensorboard"))
    events.Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_atomic_write_replaces_and_leaves_no_temporary_file(tmp_path):
    path = tmp_path / "new" / "file.txt"
    atomic_write(path, "äöü")
    assert path.read_bytes() == "äöü".encode()
    atomic_write(path, b"\x00\xff")
    assert path.read_bytes() == b"\x00\xff"
    assert os.listdir(path.parent) == ["file.txt"]


def test_atomic_write_that_fails_keeps_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "file.txt"
    atomic_write(path, "old")

    def full(descriptor):
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="disk full"):
        atomic_write(path, "new")
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["file.txt"]


def test_atomic_write_killed_at_any_moment_shows_a_whole_file(tmp_path):
    """A real SIGKILL in the middle of endless rewriting: what is left is one of the two contents, entire."""
    path = tmp_path / "file"
    code = (
        "import sys\nfrom mosaic.log import atomic_write\n"
        "while True:\n  for letter in 'ab':\n    atomic_write(sys.argv[1], letter * 3_000_000)"
    )
    child = subprocess.Popen([sys.executable, "-c", code, str(path)])
    try:
        while not path.exists():
            assert child.poll() is None
            time.sleep(0.01)
        time.sleep(0.1)
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
    text = path.read_text()
    assert text in ("a" * 3_000_000, "b" * 3_000_000)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nonfinite_floats_make_valid_json_and_come_back(value):
    text = to_json(
        {"loss": value, "list": [1.5, value], "array": np.array([value, 2.0]), "tensor": torch.tensor(value)}
    )
    strict = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert strict["loss"] == {"$float": str(value)}
    back = from_json(text)
    for got in (back["loss"], back["list"][1], back["array"][0], back["tensor"]):
        assert got == value or (math.isnan(got) and math.isnan(value))
    assert back["list"][0] == 1.5 and back["array"][1] == 2.0


def test_text_that_looks_like_a_tag_stays_text():
    for value in ("NaN", {"$float": "hello"}, {"$float": 1}, {"$float": ["nan"]}, {"$float": "nan", "b": 1}, {}):
        assert from_json(to_json(value)) == value


def test_json_numbers_of_tensors_and_unknown_types():
    assert (
        to_json([torch.tensor(3), np.float32(0.5), SessionType.SUBAGENT, (1, None, True)])
        == "[3, 0.5, 2, [1, null, true]]"
    )
    with pytest.raises(TypeError, match="PosixPath has no JSON form"):
        to_json({"path": Path("/x")})
    with pytest.raises(TypeError, match="PosixPath has no JSON form"):
        to_json({"loss": math.nan, "path": Path("/x")})


def test_trajectories_round_trip_and_are_compressed_lines(tmp_path):
    log = RunLog(tmp_path)
    records = [record("p\u2028\n<b>"), record("q", logprob=math.nan)]
    path = log.write_trajectories(7, iter(records))
    assert path == tmp_path / "trajectories" / "step_000007.jsonl.zst"
    back = log.read_trajectories(7)
    assert back[0] == {**records[0], "answers": ["a"]}  # a tuple is a list in JSON
    assert math.isnan(back[1]["sessions"][0]["response_logprobs"][0])
    training = back[0].pop("training")
    assert training["group"] == 0 and Trajectory.from_dict(back[0]).sessions[0].response_ids == [2, 3]
    log.write_trajectories(7, [])
    assert log.read_trajectories(7) == [] and log.steps() == [7]
    with pytest.raises(FileNotFoundError, match=r"step 8 has no trajectories.*steps there: \[7\]"):
        log.read_trajectories(8)


def test_a_trajectory_file_that_is_none(tmp_path):
    path = tmp_path / "some.jsonl.zst"
    with pytest.raises(FileNotFoundError):
        read_trajectory_file(path)
    path.write_text('{"plain": "text"}\n')
    with pytest.raises(RunError, match="some.jsonl.zst is no trajectory file .* after 0 good lines: "):
        read_trajectory_file(path)
    path.write_bytes(zstandard.compress(b'{"a": 1}\n{"b": \n'))
    with pytest.raises(RunError, match="some.jsonl.zst is no trajectory file .* after 1 good lines: "):
        read_trajectory_file(path)
    write_trajectory_file(path, [{"a": math.inf}])
    assert read_trajectory_file(path) == [{"a": math.inf}]
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(RunError, match="cut short"):
        read_trajectory_file(path)


def test_a_skipped_update_is_kept_and_rewound(tmp_path):
    log = RunLog(tmp_path)
    for step in (1, 2):
        path = log.save_skipped(step, 2, {"batch": {"mask": torch.tensor([True, False])}, "grad_norm": math.nan})
    assert path == tmp_path / "skipped" / "step_000002_update_2.pt"
    what = torch.load(path)
    assert what["batch"]["mask"].tolist() == [True, False] and math.isnan(what["grad_norm"])
    log.rewind(1)
    assert os.listdir(tmp_path / "skipped") == ["step_000001_update_2.pt"]
    with pytest.raises(ValueError, match="step must be a whole number >= 1"):
        log.save_skipped(0, 1, {})


def test_a_reader_makes_nothing(tmp_path):
    log = RunLog(tmp_path / "absent")
    assert log.metrics() == [] and log.steps() == []
    assert not (tmp_path / "absent").exists()


def test_metrics_append_and_tensorboard_has_the_scalars(tmp_path):
    log = RunLog(tmp_path)
    log.write_metrics(
        1, {"time": {"rollout": 2.0}, "loss": torch.tensor(0.5), "dropped": {"no judge": 3}, "updates": [{"loss": 1}]}
    )
    log.write_metrics(2, {"time": {"rollout": 1.0}, "loss": math.nan, "note": "text", "lr": None})
    first, second = log.metrics()
    assert first == {
        "step": 1, "time": {"rollout": 2.0}, "loss": 0.5, "dropped": {"no judge": 3}, "updates": [{"loss": 1}]
    }  # fmt: skip
    assert math.isnan(second["loss"])
    scalars = board(tmp_path)
    assert set(scalars) == {"time/rollout", "loss", "dropped/no judge"}
    assert scalars["time/rollout"] == [(1, 2.0), (2, 1.0)]
    assert scalars["loss"][0] == (1, 0.5) and math.isnan(scalars["loss"][1][1])
    assert scalars["dropped/no judge"] == [(1, 3.0)]
    log.close()


def test_a_step_is_written_once_and_in_order(tmp_path):
    log = RunLog(tmp_path)
    log.write_metrics(2, {"loss": 1.0})
    for step in (1, 2):
        with pytest.raises(ValueError, match=rf"step {step} must be above 2.*rewind\({step - 1}\)"):
            log.write_metrics(step, {})
    with pytest.raises(ValueError, match="must be above 2"):  # also seen by a process that did not write it
        RunLog(tmp_path).write_metrics(2, {})
    for bad in (0, -1, True, 1.0):
        with pytest.raises(ValueError, match="step must be a whole number >= 1"):
            log.write_metrics(bad, {})
        with pytest.raises(ValueError, match="step must be a whole number >= 1"):
            log.write_trajectories(bad, [])
    with pytest.raises(ValueError, match=r"metrics\['step'\] is 9"):
        log.write_metrics(3, {"step": 9})
    assert [line["step"] for line in log.metrics()] == [2]


def test_a_line_torn_at_any_byte_is_left_out_and_the_next_write_is_whole(tmp_path):
    RunLog(tmp_path).write_metrics(1, {"loss": 1.0})
    path = tmp_path / "metrics.jsonl"
    whole = path.read_bytes()
    torn = b'{"step": 2, "loss": 0.25}\n'
    for cut in range(len(torn) - 1):
        path.write_bytes(whole + torn[:cut])
        log = RunLog(tmp_path)
        assert [line["step"] for line in log.metrics()] == [1]
        assert path.read_bytes() == whole + torn[:cut]  # reading changes nothing
        log._keep_metrics(math.inf)  # what write_metrics does before its first line
        assert path.read_bytes() == whole
    path.write_bytes(whole + torn[:-1])  # only the line end is lost: the line counts
    log = RunLog(tmp_path)
    log.write_metrics(3, {"loss": 0.0})
    assert [line["step"] for line in log.metrics()] == [1, 2, 3]
    assert len(path.read_bytes().splitlines()) == 3


def test_a_spoilt_line_in_the_middle_is_an_error(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(RunError, match="metrics.jsonl, line 2 is not JSON"):
        RunLog(tmp_path).metrics()


def test_rewind_then_rewriting_equals_an_uninterrupted_run(tmp_path):
    def write(directory, steps, log=None):
        log = log or RunLog(directory)
        for step in steps:
            log.write_trajectories(step, [record(str(step))])
            log.write_metrics(step, {"loss": step / 2})
        return log

    write(tmp_path / "whole", range(1, 5))
    killed = tmp_path / "killed"
    write(killed, range(1, 4))
    RunLog(killed).write_trajectories(4, [record("half done")])
    (killed / "trajectories" / ".step_000005.jsonl.zst.99.tmp").write_text("torn")
    with open(killed / "metrics.jsonl", "a") as file:
        file.write('{"step": 4, "lo')
    log = RunLog(killed)
    log.rewind(2)
    assert [line["step"] for line in log.metrics()] == [1, 2] and log.steps() == [1, 2]
    assert sorted(os.listdir(killed / "trajectories")) == ["step_000001.jsonl.zst", "step_000002.jsonl.zst"]
    log.rewind(2)  # a kill inside rewind means that it runs again
    write(killed, (3, 4), log)
    for name in ("metrics.jsonl", *(f"trajectories/step_{step:06d}.jsonl.zst" for step in range(1, 5))):
        assert (killed / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert board(killed) == board(tmp_path / "whole") == {"loss": [(1, 0.5), (2, 1.0), (3, 1.5), (4, 2.0)]}


def test_rewind_to_the_start_and_of_nothing(tmp_path):
    log = RunLog(tmp_path / "run")
    log.rewind(0)
    assert not (tmp_path / "run").exists()
    log.write_metrics(1, {"loss": 1.0})
    log.write_trajectories(1, [])
    log.rewind(0)
    assert log.metrics() == [] and log.steps() == [] and os.listdir(tmp_path / "run" / "tensorboard") == []
    for bad in (-1, 1.5, False):
        with pytest.raises(ValueError, match="step must be a whole number >= 0"):
            log.rewind(bad)
