import pytest
import torch

from mosaic.batch import pack, response_rows
from mosaic.trajectory import Session, SessionType, Trajectory


def session(prompt, response, mask, *, type=SessionType.NORMAL, **options):
    logprobs = [-0.5 - i if sampled else None for i, sampled in enumerate(mask)]
    return Session(type, prompt, response, [bool(m) for m in mask], logprobs, **options)


@pytest.fixture
def trajectories():
    chain = [
        session([1, 2], [3, 4, 5, 6], [1, 1, 0, 1]),
        session([7], [8, 9], [1, 1], type=SessionType.COMPACTION, temperature=0.1),
        session([1, 9], [10], [1], terminal=True),
    ]
    return [
        Trajectory("a", chain, reward=1.0, answers=("x",)),
        Trajectory("b", [session([1], [2, 3], [0, 1], terminal=True)], reward=0.0, metadata={"overlong": True}),
        Trajectory("a", [session([5, 5, 5], [6], [1], terminal=True)], reward=0.0),
    ]


def test_pack_by_hand(trajectories):
    batch = pack(trajectories)
    assert batch.layout.cu_seqlens.tolist() == [0, 6, 9, 12, 15, 19]
    assert batch.layout.segment_trajectory.tolist() == [0, 0, 0, 1, 2]
    assert batch.group.tolist() == [0, 1, 0]
    # The first segment is 1 2 | 3 4 5 6: rows 1 and 2 predict the sampled 3 and 4, row 4 the sampled 6.
    assert batch.input_ids[:6].tolist() == [1, 2, 3, 4, 5, 6]
    assert batch.target[:6].tolist() == [2, 3, 4, 5, 6, -100]
    assert batch.mask[:6].tolist() == [False, True, True, False, True, False]
    assert batch.turn[:6].tolist() == [-1, 0, 0, -1, 1, -1]
    assert batch.rollout_logprob[:6].tolist() == [0, -0.5, -1.5, 0, -3.5, 0]
    assert batch.temperature[6:9].tolist() == pytest.approx([0.1] * 3)
    assert batch.session_type.tolist() == [0, 1, 0, 0, 0]
    assert batch.terminal.tolist() == [False, False, True, True, True]
    assert batch.session_count.tolist() == [3, 1, 1]
    assert batch.overlong.tolist() == [False, True, False]
    assert batch.reward.tolist() == [1, 0, 0]


def test_targets_are_the_sampled_tokens(trajectories):
    batch = pack(trajectories)
    sampled = [
        token
        for trajectory in trajectories
        for s in trajectory.sessions
        for token, kept in zip(s.response_ids, s.response_mask)
        if kept
    ]
    assert batch.target[batch.mask].tolist() == sampled


def test_trajectories_keeps_ids(trajectories):
    part = pack(trajectories).trajectories(torch.tensor([False, False, True]))
    assert part.input_ids.tolist() == [5, 5, 5, 6]
    assert part.layout.segment_trajectory.tolist() == [2]
    assert part.layout.num_trajectories == 3
    assert part.terminal.tolist() == [True]
    assert part.reward.shape == (3,)


@pytest.mark.parametrize("max_tokens", [1, 5, 6, 9, 10, 100])
def test_micro_batches_cover_everything_once(trajectories, max_tokens):
    batch = pack(trajectories)
    parts = list(batch.micro_batches(max_tokens))
    assert torch.cat([part.input_ids for part in parts]).tolist() == batch.input_ids.tolist()
    for part in parts:
        assert part.layout.num_tokens <= max_tokens or part.layout.num_segments == 1


def test_micro_batches_of_whole_trajectories(trajectories):
    parts = list(pack(trajectories).micro_batches(5, whole_trajectories=True))
    assert [part.layout.segment_trajectory.tolist() for part in parts] == [[0, 0, 0], [1], [2]]


def test_moving_keeps_every_field(trajectories):
    batch = pack(trajectories)
    batch.advantage = torch.ones(19)
    moved = batch.to("cpu")
    assert vars(moved).keys() == vars(batch).keys()
    assert torch.equal(moved.advantage, batch.advantage)


def test_response_rows():
    rows = response_rows(session([1, 2], [3, 4], [1, 0]), [-1.0, 0.0])
    assert rows.tolist() == [0, -1, 0, 0]


def test_unjudged_and_unscored_are_refused(trajectories):
    trajectories[1].reward = None
    with pytest.raises(ValueError, match="prompt 'b' has reward None: judge it"):
        pack(trajectories)
    trajectories[1].reward = 0.0
    trajectories[1].sessions[0].response_logprobs[1] = None
    with pytest.raises(ValueError, match="must be finite on policy tokens"):
        pack(trajectories)


def test_empty_batch():
    batch = pack([])
    assert batch.layout.num_tokens == 0 and batch.mask.shape == (0,)


def test_one_answer_is_not_taken_for_its_letters():
    with pytest.raises(ValueError, match=r"answers must hold the accepted answers, got 'Paris': write \('Paris',\)"):
        Trajectory("a", [], answers="Paris")
