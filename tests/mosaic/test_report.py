from __future__ import annotations

import math
import random
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console

from mosaic.figures import Rollout, advantage_plot, gain_plot, reward_plot, sessions_plot, update_plot
from mosaic.log import RunError, RunLog
from mosaic.report import build_report, print_summary
from mosaic.trajectory import Session, SessionType, Trajectory

NORMAL, COMPACTION, SUBAGENT = SessionType
EVIL = "<script>alert('x')</script> & \ud800 </pre>"


def encode(text: str) -> list[int]:
    return [ord(character) for character in text]


def decode(ids: list[int]) -> str:
    return "".join(map(chr, ids))


def session(kind: SessionType, prompt: str, *turns: str, **options) -> Session:
    """Turns alternate: sampled, environment, sampled, ..."""
    ids, mask = [], []
    for at, turn in enumerate(turns):
        ids += encode(turn)
        mask += [at % 2 == 0] * len(turn)
    logprobs = [-0.5 if sampled else None for sampled in mask]
    return Session(kind, encode(prompt), ids, mask, logprobs, **options)


def chain(compactions: int, answer: str) -> list[Session]:
    sessions = []
    for at in range(compactions):
        sessions.append(session(NORMAL, f"question {at}", "search capital", "a document", "search area", "another"))
        sessions.append(
            session(COMPACTION, "record of the history", "<summary>found so far</summary>", temperature=0.1)
        )
    return [*sessions, session(NORMAL, "question and summary", answer, terminal=True)]


def fork(children: int, answer: str) -> list[Session]:
    subagents = [
        session(SUBAGENT, f"subtask {at}", "search", "a document", "done", parent=children, fork_index=0)
        for at in range(children)
    ]
    return [*subagents, session(NORMAL, "question", "fork call", "reports of the children", answer, terminal=True)]


def trained_record(trajectory: Trajectory, group: int, rng: random.Random, homogeneous: bool) -> dict:
    sessions = trajectory.sessions
    sign = 1 if trajectory.reward else -1
    advantage = (0.2 * rng.uniform(-1, 0) if homogeneous else sign * rng.uniform(0.6, 1.4)) if len(sessions) else 0.0
    eligible = [not one.terminal for one in sessions]
    spread = {NORMAL: 0.8, COMPACTION: 0.5, SUBAGENT: 1.2}
    return {
        **trajectory.to_dict(),
        "training": {
            "session_advantage": [advantage + (0.05 * rng.gauss(0, 1) if ok else 0.0) for ok in eligible],
            "trajectory_advantage": advantage,
            "gain": [
                rng.gauss(0.3, spread[one.type]) if ok else None for ok, one in zip(eligible, sessions, strict=True)
            ],
            "eligible": eligible,
            "group": group,
        },
    }


def write_run(directory: Path, steps: int = 3, groups: int = 4) -> RunLog:
    """A run of chains and forks with mixed, all-successful and all-failed groups, drops and a skipped update."""
    rng = random.Random(0)
    log = RunLog(directory)
    for step in range(1, steps + 1):
        records = []
        for group in range(groups):
            homogeneous = group % 4 >= 2
            for member in range(4):
                reward = float(group % 4 == 2) if homogeneous else float(member % 2)
                answer = f"<answer>{EVIL}</answer>" if member == 1 else "<answer>Paris</answer>"
                sessions = chain(rng.randint(0, 3), answer) if group % 2 == 0 else fork(rng.randint(1, 6), answer)
                trajectory = Trajectory(
                    f"prompt-{group}",
                    sessions,
                    reward=reward,
                    answers=("Paris",),
                    metadata={
                        "question": f"Which capital? {EVIL}",
                        "scenario": "compaction" if group % 2 == 0 else "fork",
                    },
                )
                records.append(trained_record(trajectory, group, rng, homogeneous))
        log.write_trajectories(step, records)
        log.write_metrics(step, metrics_of(step, rng))
    (directory / "config.yaml").write_text(f"seed: 1\nname: {EVIL!a}\n")
    return log


def metrics_of(step: int, rng: random.Random) -> dict:
    updates = [
        {
            "loss": rng.gauss(0, 0.1),
            "grad_norm": rng.uniform(0.5, 1),
            "clip_fraction": 0.03 * at,
            "ratio_max": 1 + at / 3,
        }
        for at in range(2)
    ]
    updates[1]["skipped"] = step == 2
    if step == 2:
        updates[1]["loss"] = math.nan
    return {
        "time": {"rollout": 60.0, "score": 10.5, "update": 20.0},
        "reward_mean": 0.25 + 0.1 * step, "success_rate": 0.25 + 0.1 * step, "sessions_mean": 3.25,
        "compaction_share": 0.4375, "fork_share": 0.5, "loss": updates[1]["loss"], "grad_norm": 0.75,
        "clip_fraction": 0.0125, "ratio_mean": 1.0, "ratio_max": 1.375, "approx_kl": 0.001, "entropy": 0.6, "lr": 1e-5,
        "policy_tokens": 4200, "tokens": 15750, "dropped": {"engine returned NaN": 1, "judge gave no verdict": 2},
        "groups_mixed": 2, "positive_ig_rate": 0.6, "ig_per_session": 0.4, "engine_logprob_diff_mean": 0.001,
        "engine_logprob_diff_max": 0.02, "parameter_change": 0.003, "peak_memory_gib": 5.5, "updates": updates,
    }  # fmt: skip


class Page(HTMLParser):
    """Tags, image alternatives and the text of a page; fails on a tag closed out of order."""

    VOID = ("meta", "img", "link", "br")

    def __init__(self, html: str):
        super().__init__()
        self.open, self.tags, self.images, self.text = [], [], [], ""
        self.feed(html)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        if tag == "img":
            self.images.append(dict(attrs))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    directory = tmp_path_factory.mktemp("runs") / "first"
    write_run(directory)
    return directory


@pytest.fixture(scope="module")
def html(run):
    path = build_report(run, decode=decode, note="Small model.\n\nFew steps <b>only</b>.")
    assert path == run / "report.html"
    return path.read_text(encoding="utf-8")


def test_the_page_is_whole_and_needs_nothing_else(html):
    page = Page(html)
    assert "script" not in page.tags and "link" not in page.tags
    assert not re.search(r"""(?:src|href)=["'](?!data:|#)""", html) and "@import" not in html and "url(" not in html
    assert [image["src"][:26] for image in page.images] == ["data:image/svg+xml;base64,"] * 5
    titles = ("Sessions a trajectory", "Reward", "Advantage against session count", "Marginal gains by session type",
              "Optimiser updates", "Steps", "Whole trajectories", "Configuration", "About this run")  # fmt: skip
    for title in titles:
        assert title in page.text


def test_what_models_and_users_wrote_is_data(html):
    assert "<script" not in html and "<b>only</b>" not in html
    text = Page(html).text
    assert "<script>alert('x')</script> & ? </pre>" in text  # the lone surrogate has no UTF-8 form
    assert "Few steps <b>only</b>." in text and "\\ud800" in text


def test_alternatives_tell_the_figures(html):
    sessions, reward, advantage, gains, updates = (image["alt"] for image in Page(html).images)
    assert "over 3 steps" in sessions and "smallest 1, largest 7" in sessions
    assert (
        reward == "Over the steps: success rate 0.35 at first, 0.55 at last; mean reward 0.35 at first, 0.55 at last."
    )
    assert "mixed groups, success: 12 from" in advantage and "homogeneous groups, failure: 12 from" in advantage
    assert "normal: " in gains and "compaction: " in gains and "subagent: " in gains
    assert updates.startswith("Over 6 updates, 1 of them skipped: loss ")


def test_the_page_shows_numbers_drops_and_trajectories(html):
    text = Page(html).text
    assert "Dropped trajectories: 6 × judge gave no verdict; 3 × engine returned NaN" in text
    assert re.search(r"1\s*0\.35\s*35%\s*3\.2\s*44%\s*50%", re.sub(r"\s+", " ", re.sub("<[^>]*>", " ", html)))
    assert "Step 3, prompt prompt-" in text and "policy · 14 tokens" in text and "search capital" in text
    assert "Session 1: subagent" in text and ", turn 1" in text and "Session 2: compaction" in text
    assert "temperature 0.1" in text and "nan" in text  # the loss of step 2
    assert "updates skipped" in text and "4.5 min" in text


def test_the_report_is_the_same_bytes_again(run, html):
    assert build_report(run, decode=decode, note="Small model.\n\nFew steps <b>only</b>.").read_text("utf-8") == html


def test_without_a_tokenizer_structure_is_shown(run):
    text = Page(build_report(run).read_text("utf-8")).text
    assert "No tokenizer was given" in text and "policy · 14 tokens" in text and "search capital" not in text
    assert "About this run" not in text


def test_bare_metrics_and_bare_trajectories_make_a_report(tmp_path):
    RunLog(tmp_path / "m").write_metrics(1, {})
    page = Page(build_report(tmp_path / "m").read_text("utf-8"))
    assert page.images == [] and "–/–" in page.text and "Whole trajectories" not in page.text

    trajectory = Trajectory("p", [session(NORMAL, "q", "a")])  # a rollout: neither judged nor trained
    RunLog(tmp_path / "t").write_trajectories(1, [trajectory.to_dict()])
    page = Page(build_report(tmp_path / "t").read_text("utf-8"))
    assert len(page.images) == 1 and "not judged" in page.text and "Steps" not in page.text


def test_every_metric_may_be_missing(tmp_path):
    log = RunLog(tmp_path)
    full = metrics_of(1, random.Random(0))
    for step, missing in enumerate(full, start=1):
        log.write_metrics(step, {key: value for key, value in full.items() if key != missing})
    assert f"Over {2 * len(full) - 1} updates" in Page(build_report(tmp_path).read_text("utf-8")).images[-1]["alt"]
    rows = [line.split() for line in summary(tmp_path, 100).splitlines()]
    assert ["1", "0.35", "35%", "3.2", "44%", "50%"] in [row[:6] for row in rows]
    assert sum("–" in row for row in rows) == 10 and sum("4.2k/–" in row for row in rows) == 1


def test_a_long_run_shows_its_last_steps(tmp_path):
    log = RunLog(tmp_path)
    for step in range(1, 51):
        log.write_metrics(step, {"reward_mean": 0.5})
    assert "The last 40 steps; metrics.jsonl has the 10 before them too." in build_report(tmp_path).read_text("utf-8")
    assert summary(tmp_path, 100).count("0.50") == 40


def test_long_text_is_cut_in_the_middle(tmp_path):
    trajectory = Trajectory("p", [session(NORMAL, "q", "x" * 9000 + "END")], reward=1.0)
    RunLog(tmp_path).write_trajectories(1, [trajectory.to_dict()])
    text = Page(build_report(tmp_path, decode=decode).read_text("utf-8")).text
    assert "[… 3003 characters left out …]" in text and "xEND" in text


@pytest.mark.parametrize("act", [build_report, lambda path: print_summary(path, Console())])
def test_a_folder_that_is_no_run(tmp_path, act):
    with pytest.raises(RunError, match="absent is not a folder: give the run directory"):
        act(tmp_path / "absent")
    (tmp_path / "config.yaml").write_text("seed: 1")
    with pytest.raises(RunError, match="is no run directory, or no step of the run has finished"):
        act(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]


def summary(directory: Path, width: int) -> str:
    console = Console(width=width, record=True, file=open("/dev/null", "w"))
    print_summary(directory, console)
    return console.export_text()


def test_summary_fits_a_plain_terminal(run):
    text = summary(run, 80)
    lines = text.splitlines()
    row = next(line for line in lines if line.strip().startswith("1 "))
    assert row.split()[:6] == ["1", "0.35", "35%", "3.2", "44%", "50%"]
    assert row.split()[7:] == ["1.2%", "1.38", "0.75", "4.2k/16k", "90"]
    assert "dropped: 6 × judge gave no verdict" in text
    assert "skipped updates (loss or gradient not finite): 1" in text


def test_time_with_a_total_is_not_counted_twice(tmp_path):
    RunLog(tmp_path).write_metrics(1, {"time": {"rollout": 3.0, "update": 2.0, "total": 6.0}})
    assert [line.split()[-1] for line in summary(tmp_path, 100).splitlines() if line.lstrip().startswith("1 ")] == ["6"]


def rollout(step=1, group=0, reward=1.0, types=(NORMAL,), advantage=0.0, gains=()) -> Rollout:
    return Rollout(step, group, reward, types, advantage, gains)


def test_figures_with_nothing_to_draw():
    assert sessions_plot([]) is None and reward_plot([{"step": 1}]) is None and update_plot([{"step": 1}]) is None
    assert advantage_plot([rollout(advantage=None)]) is None and gain_plot([rollout()]) is None
    assert reward_plot([{"step": 1, "reward_mean": math.nan}]) is None


def test_groups_are_mixed_inside_a_step_only():
    same_group = [rollout(step=1, reward=1.0), rollout(step=2, reward=0.0), rollout(step=2, reward=1.0)]
    alt = advantage_plot(same_group).alt
    assert "mixed groups, success: 1 from" in alt and "mixed groups, failure: 1 from" in alt
    assert "homogeneous groups, success: 1 from" in alt and "homogeneous groups, failure: none" in alt
    assert "homogeneous groups, success: none" in advantage_plot([rollout(reward=0.5)], success_threshold=0.6).alt


def test_only_eligible_finite_gains_count():
    record = {
        "sessions": [{"type": 0}, {"type": 1}, {"type": 0}, {"type": 0}],
        "reward": 1.0,
        "training": {"gain": [0.5, math.nan, None, 9.0], "eligible": [True, True, False, False], "group": 3},
    }
    read = Rollout.from_record(4, record)
    assert read == Rollout(4, 3, 1.0, (NORMAL, COMPACTION, NORMAL, NORMAL), None, ((NORMAL, 0.5),))
    assert "normal: 1 from 0.5 to 0.5, median 0.5, 100% above 0" in gain_plot([read]).alt


def test_many_points_stay_a_small_file():
    rng = random.Random(1)
    many = [
        rollout(
            step,
            group,
            float(rng.random() < 0.5),
            (NORMAL,) * rng.randint(1, 9),
            rng.gauss(0, 1),
            ((NORMAL, 0.1 * step),),
        )
        for step in range(1, 201)
        for group in range(40)
    ]
    for plot in (sessions_plot(many), advantage_plot(many), gain_plot(many)):
        assert plot.svg.count("<use") < 2500 and len(plot.svg) < 1_000_000
