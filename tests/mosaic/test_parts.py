"""What a configuration names, made or refused."""

from __future__ import annotations

import json

import pytest
import torch

from mosaic.config import ConfigError, parse_config
from mosaic.models import tiny_policy
from mosaic.parts import check_context, make_decoder, make_engine, make_judge, make_tasks, make_tools, read_jsonl
from mosaic.rewards import ExactMatchJudge, LLMJudge
from mosaic.tasks import Task


def write(tmp_path, *lines):
    path = tmp_path / "tasks.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines), encoding="utf-8")
    return path


def test_jsonl_tasks(tmp_path):
    path = write(
        tmp_path,
        {"id": "x", "question": "Which?", "answers": ["a", "A."]},
        "",
        {"question": "Who?", "answer": "b", "source": "ignored"},
        {"id": 7, "question": "Wo liegt Köln?", "answers": ["am Rhein"]},
    )
    assert read_jsonl(path) == [
        Task("x", "Which?", ("a", "A.")),
        Task("3", "Who?", ("b",)),
        Task("7", "Wo liegt Köln?", ("am Rhein",)),
    ]
    assert make_tasks(parse_config({"task": {"source": str(path)}})) == read_jsonl(path)


def test_only_line_feeds_end_a_line(tmp_path):
    """JSON strings may hold other characters that Unicode calls line ends."""
    path = write(tmp_path, '{"question": "one\u2028two\x85three?", "answer": "b"}\r', {"question": "q", "answer": "c"})
    assert [task.question for task in read_jsonl(path)] == ["one\u2028two\x85three?", "q"]


GOOD = {"question": "q", "answers": ["a"]}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "no valid JSON"),
        ('"q"', "must be an object with question and answers, got str"),
        ({"answers": ["a"]}, "field question must be a non-empty text, got None"),
        ({"question": " ", "answers": ["a"]}, "field question must be a non-empty text, got ' '"),
        ({"question": 3, "answers": ["a"]}, "field question must be a non-empty text, got 3"),
        ({"question": "q"}, "field answers must be a list of non-empty texts, got None"),
        ({"question": "q", "answers": []}, r"field answers must be a list of non-empty texts, got \[\]"),
        ({"question": "q", "answers": "a"}, "field answers must be a list of non-empty texts, got 'a'"),
        ({"question": "q", "answers": ["a", ""]}, r"field answers must be a list of non-empty texts, got \['a', ''\]"),
        ({"question": "q", "answer": None}, "field answer must be a non-empty text, got None"),
        ({"question": "q", "answer": ["a"]}, r"field answer must be a non-empty text, got \['a'\]"),
        ({"id": ["x"], **GOOD}, r"field id must be a text or whole number that no line before has, got \['x'\]"),
        ({"id": 1, **GOOD}, "field id must be a text or whole number that no line before has, got 1"),
    ],
)
def test_jsonl_faults_name_file_line_and_field(tmp_path, line, message):
    path = write(tmp_path, GOOD, line)
    with pytest.raises(ConfigError, match=rf"^task.source: .*tasks.jsonl, line 2: {message}"):
        read_jsonl(path)


def test_jsonl_files_that_cannot_be_read(tmp_path):
    with pytest.raises(
        ConfigError, match=r"task.source: cannot read .*none.jsonl: No such file.*give atlas or a JSONL"
    ):
        read_jsonl(tmp_path / "none.jsonl")
    with pytest.raises(ConfigError, match=r"task.source: cannot read .*: Is a directory"):
        read_jsonl(tmp_path)
    (tmp_path / "latin").write_bytes('{"question": "Köln"}'.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"task.source: .*latin is no text in UTF-8"):
        read_jsonl(tmp_path / "latin")
    with pytest.raises(ConfigError, match=r"task.source: .*tasks.jsonl holds no task"):
        read_jsonl(write(tmp_path, "", " "))


def test_atlas_tasks_follow_the_configuration():
    tasks = make_tasks(parse_config({"seed": 5, "task": {"hops": [2], "split": "eval"}}))
    assert {task.metadata["hops"] for task in tasks} == {2}
    assert make_tasks(parse_config({"seed": 6, "task": {"hops": [2], "split": "eval"}})) != tasks


def test_tools():
    assert sorted(make_tools(parse_config({}))) == ["search", "visit"]


def test_judges():
    assert isinstance(make_judge(parse_config({})), ExactMatchJudge)
    tree = {"judge": {"kind": "llm", "base_url": "http://localhost:1/v1", "model": "m"}}
    judge = make_judge(parse_config(tree))
    assert isinstance(judge, LLMJudge) and judge.thinking == "disable"
    tree["judge"]["thinking"] = "default"
    assert make_judge(parse_config(tree)).thinking == "default"
    tree["judge"]["base_url"] = "localhost:1"
    with pytest.raises(ConfigError, match="judge.base_url must start with http"):
        make_judge(parse_config(tree))


def test_engine_has_weights_of_its_own_in_the_runs_precision():
    model = tiny_policy(50)
    engine = make_engine(model, parse_config({"model": {"precision": "bf16"}, "rollout": {"max_batch_size": 3}}))
    assert engine.model.dtype == torch.bfloat16 and model.dtype == torch.float32
    assert engine.max_batch_size == 3
    exact = make_engine(model, parse_config({"model": {"precision": "fp32"}}))
    assert exact.model.dtype == torch.float32
    with torch.no_grad():
        model.lm_head.weight += 1
    assert not torch.equal(exact.model.lm_head.weight, model.lm_head.weight)
    exact.load_weights(model.state_dict().items(), version=1)
    assert torch.equal(exact.model.lm_head.weight, model.lm_head.weight)


def test_sessions_must_fit_the_models_context():
    model = tiny_policy(50)  # 8192 positions
    fits = parse_config({"agent": {"session_limit": 8192, "reserve": 100}})
    check_context(model, fits)
    message = r"agent.session_limit: 8192 tokens and 128 tokens of a probe exceed .* 8192; give at most 8064"
    with pytest.raises(ConfigError, match=message):
        check_context(model, fits, probe_tokens=128)
    with pytest.raises(ConfigError, match=r"131072 tokens exceed the model's context of 8192; give at most 8192"):
        check_context(model, parse_config({}))


def test_decoder(tmp_path, tokenizer):
    assert make_decoder(tmp_path) is None
    tokenizer.save_pretrained(tmp_path / "checkpoints" / "step_000001" / "policy")
    assert make_decoder(tmp_path)(tokenizer("a river")["input_ids"]) == "a river"
