"""The command line: every command works, and every fault of the user's is one message before a model loads."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import mosaic.commands
import mosaic.train
from mosaic.cli import main
from mosaic.config import load_config
from mosaic.demo import demo_config
from mosaic.log import RunLog, write_trajectory_file
from mosaic.rewards import JudgeError
from tests.mosaic.small import made_trajectories, make_tools, settings, write_policy

ROOT = Path(__file__).parents[2]
COMMANDS = ("demo", "train", "rollout", "score", "eval", "report", "warmstart")


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return write_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture
def config(tmp_path, policy):
    """A configuration file of a small run, written as a user would."""
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(settings(tmp_path, policy, steps=1)))
    return str(path)


@pytest.fixture(autouse=True)
def quick_tools(monkeypatch):
    monkeypatch.setattr(mosaic.train, "make_tools", make_tools)
    monkeypatch.setattr(mosaic.commands, "make_tools", make_tools)


@pytest.fixture
def no_model(monkeypatch):
    def load(*arguments, **options):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(mosaic.train, "load_policy", load)
    monkeypatch.setattr(mosaic.commands, "load_policy", load)


def fails(capsys, *argv):
    """The one message of a command that fails."""
    assert main([str(part) for part in argv]) == 1
    output = capsys.readouterr()
    assert output.err.startswith("mosaic: ") and "Traceback" not in output.err
    return output.err


@pytest.mark.parametrize("command", COMMANDS)
def test_help_says_what_it_does_with_an_example_that_parses(capsys, command):
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    what, _, example = text.partition("example: ")
    assert len(what.splitlines()) > 4 and example.startswith(f"mosaic {command} ")
    from mosaic.cli import _parser

    assert _parser().parse_args(example.split()[1:]).command == command


def test_help_lists_every_command(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    assert all(re.search(rf"^    {command}\s", text, re.MULTILINE) for command in COMMANDS)


@pytest.mark.parametrize("command", ["train", "rollout", "eval"])
@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optimizer.learning_rate=1", "optimizer.learning_rate: unknown key; its section has lr, betas"),
        ("optimizer.lr=-1", "optimizer.lr: Input should be greater than 0, got -1 (peak learning rate)"),
        ("optimizer.lr=.nan", "optimizer.lr: Input should be a finite number, got nan (peak learning rate)"),
        ("task.hops=[4]", "task.hops.0: Input should be 1, 2 or 3, got 4 (atlas question depths to draw from)"),
        ("task.source=none.jsonl", "task.source: cannot read none.jsonl: No such file or directory"),
        ("algorithm.objective_options={low: a}", "algorithm.objective_options: low must be a number, got 'a'"),
        ("judge={kind: llm, base_url: localhost, model: m}", "judge.base_url must start with http"),
        ("algorithm.name=compaction_grpo", "algorithm.name: compaction_grpo needs sessions in a linear order"),
    ],
)
def test_faults_of_the_configuration(capsys, no_model, config, command, override, message):
    assert message in fails(capsys, command, config, override)


def test_files_that_are_not_there(capsys, tmp_path, config, no_model):
    assert "cannot read the configuration none.yaml: No such file" in fails(capsys, "train", "none.yaml")
    assert "none is not a folder: give the run directory" in fails(capsys, "report", tmp_path / "none")
    assert "No such file or directory" in fails(capsys, "score", config, tmp_path / "none.jsonl.zst")
    assert "is no run directory" in fails(capsys, "report", tmp_path)
    (tmp_path / "latin.yaml").write_bytes("output: Köln".encode("latin-1"))
    assert "latin.yaml is no text in UTF-8" in fails(capsys, "train", tmp_path / "latin.yaml")


@pytest.mark.parametrize("command", ["train", "rollout", "eval", "score"])
def test_models_and_adapters_that_are_not_there(capsys, tmp_path, config, command, monkeypatch):
    from transformers import AutoModelForCausalLM

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", None)  # nothing is loaded to find out
    write_trajectory_file(tmp_path / "t.jsonl.zst", [t.to_dict() for t in made_trajectories()])
    extra = [tmp_path / "t.jsonl.zst"] if command == "score" else []
    message = fails(capsys, command, config, *extra, "model.path=./none")
    assert "model './none' is no folder with a config.json: give a folder" in message
    message = fails(capsys, command, config, *extra, "model.adapter=./none")
    assert "adapter 'none' is no folder with an adapter_config.json: give a LoRA adapter's folder" in message
    assert not (tmp_path / "run").exists()


def test_score_refuses_files_that_hold_no_trajectories(capsys, tmp_path, config, no_model):
    (tmp_path / "text.zst").write_text("hello")
    assert "text.zst is no trajectory file" in fails(capsys, "score", config, tmp_path / "text.zst")
    good = made_trajectories()[0].to_dict()
    for name, record, message in (
        ("list", [1], "line 2 is no trajectory"),
        ("keys", {"prompt_id": "a"}, "line 2 is no trajectory: 'sessions'"),
        ("short", {**good, "sessions": [{**good["sessions"][0], "response_mask": []}]}, "response_mask must have one"),
        ("answers", {**good, "answers": []}, "line 2: the trajectory has no answers"),
    ):
        write_trajectory_file(tmp_path / name, [good, record])
        assert message in fails(capsys, "score", config, tmp_path / name)


def test_score_names_the_session_that_cannot_be_scored(capsys, tmp_path, config):
    orphan = made_trajectories()[1].to_dict()
    orphan["sessions"][0]["fork_index"] = 9
    write_trajectory_file(tmp_path / "orphan.zst", [orphan])
    message = fails(capsys, "score", config, tmp_path / "orphan.zst")
    assert "orphan.zst: fork_index of session 0 must be a turn of its parent, got 9" in message


def test_eval_counts_are_checked(capsys, config, no_model):
    for count in (0, 4):
        message = fails(capsys, "eval", config, "--count", count)
        assert f"--count must be between 1 and the 3 tasks there are, got {count}" in message


def test_sessions_longer_than_the_models_context(capsys, tmp_path, config):
    for command in ("train", "rollout", "eval"):
        message = fails(capsys, command, config, "agent.session_limit=9000")
        assert "agent.session_limit: 9000 tokens" in message and "exceed the model's context of 8192" in message
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "error", [JudgeError("check the key"), NotImplementedError("use another model"), OSError("full")]
)
def test_other_faults_that_a_user_can_put_right(capsys, config, monkeypatch, error):
    def train(*arguments, **options):
        raise error

    monkeypatch.setattr(mosaic.commands, "train", train)
    assert fails(capsys, "train", config) == f"mosaic: {error}\n"


def test_our_own_faults_keep_their_traceback(config, monkeypatch):
    monkeypatch.setattr(mosaic.commands, "train", lambda *arguments, **options: [][0])
    with pytest.raises(IndexError):
        main(["train", config])


def test_an_interrupted_run_says_how_to_go_on(capsys, config, monkeypatch):
    def train(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(mosaic.commands, "train", train)
    assert "goes on from its last checkpoint with --resume" in fails(capsys, "train", config)


@pytest.mark.parametrize(
    ("package", "override", "message"),
    [
        ("bm25s", "task.source=atlas", "local search needs the package bm25s: pip install 'mosaic-rl[demo]'"),
        ("peft", "model.adapter={adapter}", "pip install 'mosaic-rl[demo]'"),
        ("tenacity", "judge={{kind: llm, base_url: 'http://x', model: m}}", "pip install 'mosaic-rl[train]'"),
    ],
)
def test_a_missing_extra_is_named(capsys, tmp_path, config, monkeypatch, package, override, message):
    from mosaic.parts import make_tools

    monkeypatch.setattr(mosaic.train, "make_tools", make_tools)
    monkeypatch.setitem(sys.modules, package, None)
    (tmp_path / "adapter_config.json").write_text("{}")
    said = fails(capsys, "train", config, override.format(adapter=tmp_path))
    assert message in said and said.count("pip install") == 1


def test_without_the_extras_there_is_help_and_a_message():
    """A base install: torch alone. Blocked imports stand in for packages that are not there."""
    script = (
        "import sys\n"
        "for name in ('transformers', 'rich', 'pydantic', 'yaml', 'jinja2', 'zstandard'): sys.modules[name] = None\n"
        "from mosaic.cli import main\n"
        "status = main(['train', 'x.yaml'])\n"
        "assert status == 1, status\n"
        "main(['train', '--help'])\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "this command needs an extra: pip install 'mosaic-rl[train]'" in done.stderr
    assert "Traceback" not in done.stderr and "example: mosaic train" in done.stdout


def test_overrides_may_stand_before_and_behind_options(monkeypatch, config):
    seen = []
    monkeypatch.setitem(mosaic.commands.COMMANDS, "train", seen.append)
    assert main(["train", config, "seed=1", "--resume", "steps=2", "optimizer.lr=-1"]) == 0
    assert seen[0].resume and seen[0].overrides == ["seed=1", "steps=2", "optimizer.lr=-1"]


@pytest.mark.parametrize(
    "argv",
    [
        ["train", "c.yaml", "--resum3"],
        ["train", "c.yaml", "--resume", "steps"],
        ["report", "a", "b=c"],
        ["warmstart", "--output", "x", "--updates", "0"],
        ["train"],
        [],
        ["trian", "c.yaml"],
    ],
)
def test_what_argparse_refuses(capsys, argv):
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 2
    assert "mosaic" in capsys.readouterr().err


def test_values_of_overrides(config):
    def value(text, *path):
        read = load_config(config, [text]).model_dump()
        for key in path:
            read = read[key]
        return read

    assert value("optimizer.lr=2e-6", "optimizer", "lr") == 2e-6
    assert value("algorithm.options.eps=1e-8", "algorithm", "options", "eps") == 1e-8
    assert value("output='123'", "output") == "123"
    assert value("output=inf", "output") == "inf"
    assert value("agent.date=2026-01", "agent", "date") == "2026-01"


def test_numbers_of_yaml_1_2_in_a_file(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("algorithm: {options: {eps: 1e-8}}\noptimizer: {lr: 1E-5}\n")
    config = load_config(path)
    assert config.algorithm.options == {"eps": 1e-8} and config.optimizer.lr == 1e-5


def test_train_score_report_and_eval(capsys, tmp_path, config, policy):
    run = tmp_path / "run"
    assert main(["train", config]) == 0
    said = capsys.readouterr().out
    assert "step 1 done: reward_mean 0" in said and str(run / "report.html") in said.replace("\n", "")
    assert (run / "report.html").exists() and (run / "checkpoints" / "step_000001").exists()
    assert "holds a run already" in fails(capsys, "train", config)
    assert "holds a run already" in fails(capsys, "rollout", config)
    assert "holds a run already" in fails(capsys, "eval", config)
    assert "--resume: seed differ from" in fails(capsys, "train", config, "seed=5", "--resume")
    assert main(["train", config, "--resume", "steps=2"]) == 0
    assert [m["step"] for m in RunLog(run).metrics()] == [1, 2]

    (run / "report.html").unlink()
    capsys.readouterr()
    assert main(["report", str(run)]) == 0
    assert (run / "report.html").exists() and "reward" in capsys.readouterr().out

    stored = str(run / "trajectories" / "step_000002.jsonl.zst")
    for granularity in ("session", "turn", "both"):
        assert main(["score", config, stored, "--granularity", granularity]) == 0
        lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert len(lines) == 4 and all(line["eligible"] == [False] for line in lines)
        assert [line["answer"] in ("Paris", "City of Light", "Tallinn", "Lima") for line in lines] == [True] * 4
        assert all((line["turn_gain"] is None) == (granularity == "session") for line in lines)
    checkpoint = run / "checkpoints" / "step_000002" / "policy"
    assert "set model.adapter=null" in fails(
        capsys, "eval", config, f"model.path={checkpoint}", "model.adapter=warmstart"
    )
    output = tmp_path / ("[red]evaluated[/b] in a folder whose name is " + "long " * 20).strip()
    assert main(["eval", config, f"model.path={checkpoint}", f"output={output}", "--count", "1"]) == 0
    said = capsys.readouterr().out
    assert "evaluation of 1 prompts" in said and "success_rate" in said and f"metrics: {output}\n" in said
    (metrics,) = RunLog(output).metrics()
    assert metrics["trajectories"] == 2 and len(RunLog(output).read_trajectories(1)) == 2
    assert main(["report", str(output)]) == 0
    assert f"report: {output / 'report.html'}\n" in capsys.readouterr().out


def test_rollout_samples_what_the_first_step_of_training_would(capsys, tmp_path, config):
    assert main(["rollout", config, f"output={tmp_path / 'sampled'}"]) == 0
    assert "rollouts" in capsys.readouterr().out
    assert main(["train", config]) == 0
    sampled, trained = (RunLog(tmp_path / name).read_trajectories(1) for name in ("sampled", "run"))
    assert sampled == [{key: value for key, value in record.items() if key != "training"} for record in trained]


def test_the_demo_runs_with_what_it_is_told(capsys, tmp_path, policy):
    output, limit = tmp_path / "demo", demo_config("unused").agent.session_limit
    overrides = [f"model.path={policy}", "model.adapter=null", "agent.max_turns=1", "agent.max_turn_tokens=8"]
    assert main(["demo", "--quick", "--output", str(output), *overrides]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"sessions hold {limit} tokens instead of 131,072, groups have 2 rollouts" in said
    assert str(output / "report.html") in said.replace(" ", "")
    (metrics,) = RunLog(output).metrics()
    assert metrics["trajectories"] == 4 and len(metrics["updates"]) == 2
    assert f"sessions hold {limit} tokens" in (output / "report.html").read_text()
