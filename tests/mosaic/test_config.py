import pytest

from mosaic.config import ConfigError, RunConfig, load_config, parse_config


def write(tmp_path, text):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return path


def test_defaults_are_the_papers_constants():
    config = RunConfig()
    assert (config.rollout.prompts, config.rollout.group_size) == (16, 8)
    assert (config.agent.session_limit, config.agent.reserve, config.agent.max_compactions) == (131072, 16384, 10)
    assert (config.agent.max_fork_calls, config.agent.max_children, config.agent.summary_temperature) == (10, 3, 0.1)


def test_file_and_overrides(tmp_path):
    path = write(tmp_path, "steps: 5\noptimizer: {lr: 1e-5, epochs: 2}\n")  # YAML 1.1 reads 1e-5 as text
    config = load_config(path, ["optimizer.lr=2e-6", "algorithm.options.rho=1e-1", "rollout.scenarios=[forking]"])
    assert (config.steps, config.optimizer.lr, config.optimizer.epochs) == (5, 2e-6, 2)
    assert config.algorithm.options == {"rho": 0.1}
    assert config.rollout.scenarios == ("forking",)


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"optimiser": {}}, r"optimiser: unknown key; its section has .*optimizer"),
        ({"optimizer": {"learning_rate": 1}}, r"optimizer.learning_rate: unknown key; its section has lr, betas"),
        ({"optimizer": {"lr": -1}}, r"optimizer.lr: .*greater than 0, got -1 \(peak learning rate\)"),
        ({"rollout": {"group_size": "many"}}, r"rollout.group_size: .*got 'many' \(G: rollouts of each prompt\)"),
        (
            {"rollout": {"scenarios": ["swarm"]}},
            r"rollout.scenarios.0: .*'compaction', 'forking' or 'single', got 'swarm'",
        ),
        ({"steps": 0}, r"steps: .*greater than 0, got 0"),
        (
            {"agent": {"reserve": 100, "session_limit": 100}},
            r"agent.reserve \(100\) must be below agent.session_limit \(100\)",
        ),
        ({"algorithm": {"name": "ppo"}}, r"algorithm.name: 'ppo' is not one of .*broadcast.*mosaic"),
        ({"algorithm": {"options": {"rhoo": 1}}}, r"algorithm.options: mosaic has no option 'rhoo'; it has .*rho"),
        ({"algorithm": {"options": {"rho": 2}}}, r"algorithm.options: .*rho .*2"),
        ({"algorithm": {"name": "supo"}}, r"algorithm.mask_overlong must be true with supo"),
        (
            {"algorithm": {"name": "igpo", "options": {"version": "v1"}}},
            r"algorithm.options: igpo version 'v1' needs 'prob'",
        ),
        ({"algorithm": {"objective": "dpo"}}, r"algorithm.objective: 'dpo' is not one of clip"),
        (
            {"algorithm": {"objective_options": {"hi": 1}}},
            r"objective_options: clip has no option 'hi'; it has low, high",
        ),
        ({"algorithm": {"name": "compaction_ppo"}}, r"compaction_ppo needs a critic"),
        ({"judge": {"kind": "llm"}}, r"judge: kind llm needs base_url and model"),
        ({"optimizer": {"minibatches": 1000}}, r"optimizer.minibatches must not exceed"),
        ({"optimizer": 3}, r"optimizer: "),
        (
            {"agent": {"compaction_style": "live", "session_limit": 704, "reserve": 128}},
            r"agent.compaction_threshold \(16384\) must be below agent.session_limit \(704\) with .* live",
        ),
        (
            {"task": {"source": "a.jsonl", "split": "eval"}},
            r"task: split is for source atlas only, and a.jsonl is a file",
        ),
        ({"task": {"source": "a.jsonl", "hops": [1]}}, r"task: hops is for source atlas only"),
    ],
)
def test_faults_name_path_value_and_help(tree, message):
    with pytest.raises(ConfigError, match=message):
        parse_config(tree)


def test_every_fault_is_named_at_once():
    with pytest.raises(ConfigError) as caught:
        parse_config({"steps": 0, "seed": -1})
    assert len(str(caught.value).splitlines()) == 2


@pytest.mark.parametrize(
    ("text", "overrides", "message"),
    [
        ("steps: [", [], "no valid YAML"),
        ("- 1", [], "must hold a mapping"),
        ("", ["steps"], "must have the form key=value"),
        ("steps: 1", ["steps.x=1"], "steps is a value, not a section"),
        ("", ["steps=[1"], "no valid YAML value"),
    ],
)
def test_unreadable(tmp_path, text, overrides, message):
    with pytest.raises(ConfigError, match=message):
        load_config(write(tmp_path, text), overrides)


def test_missing_file():
    with pytest.raises(ConfigError, match="cannot read the configuration nowhere.yaml"):
        load_config("nowhere.yaml")


def test_empty_file_is_all_defaults(tmp_path):
    assert load_config(write(tmp_path, "")) == RunConfig()


def test_resolved_config_reads_back():
    for task in ({"hops": [2]}, {"source": "a.jsonl"}):
        config = parse_config({"algorithm": {"options": {"rho": 0.3}}, "task": task})
        assert parse_config(config.model_dump(mode="json")) == config
