from mosaic.demo import NOTE, demo_config, outcome


def test_quick_is_one_small_step():
    quick, whole = demo_config("x", quick=True), demo_config("x")
    assert (quick.steps, quick.rollout.group_size) == (1, 2)
    assert whole.steps >= 3 and whole.num_updates == 2
    assert whole.rollout.scenarios == ("compaction", "forking") and whole.rollout.prompts % 2 == 0


def test_overrides_and_output_reach_the_config():
    config = demo_config("some dir: x", ["seed=3"])
    assert (config.output, config.seed) == ("some dir: x", 3)


def test_the_note_names_what_is_small():
    text = NOTE.format(limit=672, group=4, prompts=2, steps=3)
    for number in ("135 million", "672", "131,072", "instead of 16"):
        assert number in text


def test_outcome_by_hand():
    steps = [
        {"trajectories": 8, "compaction_share": 0.25, "fork_share": 0.5, "groups_mixed": 1, "updates": [{}, {}]},
        {
            "trajectories": 6,
            "compaction_share": 0.5,
            "fork_share": 0.0,
            "groups_mixed": 2,
            "updates": [{}],
            "skipped_updates": 1,
        },
    ]
    assert outcome(steps) == (
        "The policy compacted in 5 and forked in 4 of 14 trajectories; rewards varied inside 3 prompt groups; "
        "3 optimiser updates, of which 1 were skipped."
    )
