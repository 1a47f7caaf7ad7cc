import copy
import math

import pytest
import torch

from mosaic.agents.chat import ChatFormat
from mosaic.models import tiny_policy
from mosaic.scoring import OPENING, MarginalGainScorer, State, session_states, turn_states
from mosaic.trajectory import Session, SessionType, Trajectory
from tests.mosaic.test_chat import THINKING_TEMPLATE


class Scene:
    """Sessions as an agent would leave them, in the real tokenizer's ids."""

    def __init__(self, tokenizer):
        self.tokenizer, self.chat = tokenizer, ChatFormat(tokenizer)

    def prompt(self, text):
        return self.chat.prompt_ids([{"role": "system", "content": "Research."}, {"role": "user", "content": text}])

    def turn(self, text):
        return [*self.tokenizer(text, add_special_tokens=False)["input_ids"], self.chat.end_of_turn]

    def session(self, type, prompt, parts, **options):
        """parts: texts that alternate between the policy and the environment."""
        response, mask = [], []
        for at, text in enumerate(parts):
            ids = self.turn(text) if at % 2 == 0 else self.chat.observation_ids(text, ended=True)
            response += ids
            mask += [at % 2 == 0] * len(ids)
        logprobs = [-1.0 if sampled else None for sampled in mask]
        return Session(type, self.prompt(prompt), response, mask, logprobs, **options)

    def chain(self, answers=("Paris", "City of Light")):
        return Trajectory(
            "p",
            [
                self.session(
                    SessionType.NORMAL,
                    "Capital of France?",
                    ["search France", "France: capital Paris", "look more", "nothing"],
                ),
                self.session(
                    SessionType.COMPACTION, "Summarise.", ["The capital is Paris."], temperature=0.1, parent=0
                ),
                self.session(SessionType.NORMAL, "Continue: Paris?", ["search", "found nothing new"], parent=1),
                self.session(SessionType.COMPACTION, "Summarise again.", ["Paris."], temperature=0.1, parent=2),
                self.session(SessionType.NORMAL, "Go on: Paris.", ["Paris it is"], terminal=True, parent=3),
            ],
            answers=answers,
        )

    def fork(self):
        main = self.session(
            SessionType.NORMAL,
            "Which is larger?",
            ["search x", "nothing", "fork both", "A is 3, B is 2", "A"],
            terminal=True,
        )
        children = [
            self.session(SessionType.SUBAGENT, f"Task {name}", [f"look {name}", "a fact", name], parent=2, fork_index=1)
            for name in ("A", "B")
        ]
        return Trajectory("f", [*children, main], answers=("A",))


@pytest.fixture(scope="module")
def scene(tokenizer):
    return Scene(tokenizer)


def fresh_value(model, scene, state_ids, answer):
    """V at a state from one plain forward of everything, in float64."""
    prefix = scene.chat.generation_prefix
    ids = list(state_ids)
    if ids[-len(prefix) :] != prefix:
        gap = scene.tokenizer("\n", add_special_tokens=False)["input_ids"]
        ids += ([] if ids[-1] == scene.chat.end_of_turn else [scene.chat.end_of_turn]) + gap + prefix
    ids += scene.tokenizer(f"{OPENING} <answer>", add_special_tokens=False)["input_ids"]
    target = scene.tokenizer(answer, add_special_tokens=False)["input_ids"]
    with torch.no_grad():
        logits = model(torch.tensor([ids + target])).logits[0].double()
    logprob = logits.log_softmax(-1)
    return sum(float(logprob[len(ids) - 1 + j, token]) for j, token in enumerate(target)) / len(target)


def test_states_of_a_compaction_chain(scene):
    chain = scene.chain()
    pairs = session_states(chain)
    lengths = [len(s.token_ids) for s in chain.sessions]
    prompts = [len(s.prompt_ids) for s in chain.sessions]
    assert pairs[0] == (State(0, prompts[0]), State(0, lengths[0]))
    assert pairs[1] == (State(0, lengths[0]), State(2, prompts[2]))  # the full history, then the summary's context
    assert pairs[2] == (State(2, prompts[2]), State(2, lengths[2]))
    assert pairs[3] == (State(2, lengths[2]), State(4, prompts[4]))
    assert pairs[4] is None
    assert len({state for pair in pairs[:4] for state in pair}) == 5  # 2m + 1 distinct states


def test_states_of_a_fork_are_the_mains(scene):
    trajectory = scene.fork()
    main = trajectory.sessions[2]
    pairs = session_states(trajectory)
    assert pairs[0] == pairs[1] and pairs[2] is None
    before, after = pairs[0]
    assert before.session == after.session == 2
    assert scene.tokenizer.decode(main.token_ids[: before.length]).endswith(
        "nothing\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    assert scene.tokenizer.decode(main.token_ids[before.length : after.length]).startswith("fork both")
    assert main.token_ids[after.length :] == scene.turn("A")


@pytest.mark.parametrize("space", ["log", "prob"])
@pytest.mark.parametrize("make", ["chain", "fork"])
def test_equals_fresh_forwards(scene, tiny_model, make, space):
    trajectory = getattr(scene, make)()
    scorer = MarginalGainScorer(tiny_model, scene.tokenizer, granularity="both", space=space)
    score = scorer.score([trajectory])[0]
    form = math.exp if space == "prob" else float

    def value(state):
        return form(
            fresh_value(tiny_model, scene, trajectory.sessions[state.session].token_ids[: state.length], score.answer)
        )

    for pair, gain, eligible in zip(session_states(trajectory), score.gain.tolist(), score.eligible.tolist()):
        assert eligible == (pair is not None)
        assert gain == pytest.approx(value(pair[1]) - value(pair[0]) if pair else 0.0, abs=1e-5)
    for at, (session, gains) in enumerate(zip(trajectory.sessions, score.turn_gain)):
        states = turn_states(session, at)
        assert len(gains) == len(states) == len(session.turns())
        for number, ((before, after), gain) in enumerate(zip(states, gains)):
            last = session.terminal and number == len(states) - 1
            assert gain == pytest.approx(0.0 if last else value(after) - value(before), abs=1e-5)


def test_gains_telescope(scene, tiny_model):
    trajectory = scene.chain()
    score = MarginalGainScorer(tiny_model, scene.tokenizer).score([trajectory])[0]
    first, last = State(0, len(trajectory.sessions[0].prompt_ids)), State(4, len(trajectory.sessions[4].prompt_ids))
    assert float(score.gain.sum()) == pytest.approx(score.value[last] - score.value[first], abs=1e-9)
    assert score.turn_gain is None and len(score.value) == 5


def test_old_logprobs_equal_a_plain_forward(scene, tiny_model):
    trajectory = scene.chain()
    score = MarginalGainScorer(tiny_model, scene.tokenizer).score([trajectory])[0]
    for session, logprob in zip(trajectory.sessions, score.logprob):
        with torch.no_grad():
            logits = tiny_model(torch.tensor([session.token_ids])).logits[0].double() / session.temperature
        for j, (token, sampled) in enumerate(zip(session.response_ids, session.response_mask)):
            expected = float(logits[len(session.prompt_ids) + j - 1].log_softmax(-1)[token]) if sampled else 0.0
            assert float(logprob[j]) == pytest.approx(expected, abs=2e-4)


def test_one_answer_a_trajectory(scene, tiny_model):
    trajectory = scene.chain(answers=("Paris", "Lutetia", "the capital"))
    last = trajectory.sessions[4].prompt_ids
    best = max(trajectory.answers, key=lambda answer: fresh_value(tiny_model, scene, last, answer))
    scored = MarginalGainScorer(tiny_model, scene.tokenizer).score([trajectory])[0]
    assert scored.answer == best
    alone = MarginalGainScorer(tiny_model, scene.tokenizer).score([scene.chain(answers=(best,))])[0]
    assert scored.gain.tolist() == alone.gain.tolist()
    first = MarginalGainScorer(tiny_model, scene.tokenizer, choose="first").score([trajectory])[0]
    assert first.answer == "Paris"


def test_a_single_session_has_no_gain_but_log_probs(scene, tiny_model):
    trajectory = Trajectory("p", [scene.session(SessionType.NORMAL, "q", ["a"], terminal=True)], answers=("a",))
    score = MarginalGainScorer(tiny_model, scene.tokenizer).score([trajectory])[0]
    assert score.gain.tolist() == [0.0] and score.eligible.tolist() == [False] and score.value == {}
    assert (score.logprob[0] < 0).all()


def test_training_mode_is_put_back(scene, tiny_model):
    tiny_model.train()
    try:
        MarginalGainScorer(tiny_model, scene.tokenizer).score([scene.fork()])
        assert tiny_model.training
    finally:
        tiny_model.eval()


def test_bad_input(scene, tiny_model):
    scorer = MarginalGainScorer(tiny_model, scene.tokenizer)
    with pytest.raises(ValueError, match="trajectory 0 .* has no answers: gains need a ground truth"):
        scorer.score([scene.chain(answers=())])
    with pytest.raises(ValueError, match="answer '' has no tokens"):
        scorer.score([scene.chain(answers=("",))])
    with pytest.raises(ValueError, match="trajectory 0, session 0: .* exceed max_tokens = 40"):
        MarginalGainScorer(tiny_model, scene.tokenizer, max_tokens=40).score([scene.chain()])
    with pytest.raises(ValueError, match="space must be one of log, prob, got 'logit'"):
        MarginalGainScorer(tiny_model, scene.tokenizer, space="logit")
    with pytest.raises(ValueError, match="max_tokens must be >= 1, or None for the model's context, got 0"):
        MarginalGainScorer(tiny_model, scene.tokenizer, max_tokens=0)
    orphan = scene.fork()
    orphan.sessions[0].fork_index = 7
    with pytest.raises(ValueError, match="fork_index of session 0 must be a turn of its parent, got 7"):
        scorer.score([orphan])
    lonely = Trajectory("p", [scene.session(SessionType.COMPACTION, "s", ["x"])], answers=("a",))
    with pytest.raises(ValueError, match="session 0 is a compaction without a session before and after it"):
        scorer.score([lonely])


def test_a_session_without_room_for_a_token_scores(scene, tiny_model):
    """A prompt that fills the session leaves an empty response."""
    empty = Trajectory("p", [Session(SessionType.NORMAL, [1, 2, 3], [], [], [], terminal=True)], answers=("a",))
    score = MarginalGainScorer(tiny_model, scene.tokenizer, granularity="both").score([empty])[0]
    assert score.gain.tolist() == [0.0] and score.turn_gain == [[]] and score.logprob[0].shape == (0,)


def test_a_probe_closes_the_thinking_that_the_template_opens(tokenizer):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = THINKING_TEMPLATE
    tokenizer.add_tokens(["<tool_call>", "</tool_call>", "<think>", "</think>"], special_tokens=False)
    scene, model = Scene(tokenizer), tiny_policy(tokenizer)
    trajectory = scene.chain(answers=("Paris",))
    score = MarginalGainScorer(model, tokenizer).score([trajectory])[0]

    def encode(text):
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    closing, target = encode(f"{OPENING}\n</think>\n\n<answer>"), encode("Paris")
    assert closing.count(tokenizer.convert_tokens_to_ids("</think>")) == 1
    for state, value in score.value.items():
        ids = trajectory.sessions[state.session].token_ids[: state.length]
        if ids[-2:] != encode("<think>\n"):  # the session's last turn was ended by the policy
            ids = [*ids, *encode("\n<|im_start|>assistant\n<think>\n")]
        with torch.no_grad():
            logprob = model(torch.tensor([ids + closing + target])).logits[0].double().log_softmax(-1)
        start = len(ids) + len(closing) - 1
        expected = sum(float(logprob[start + j, token]) for j, token in enumerate(target)) / len(target)
        assert value == pytest.approx(expected, abs=1e-5)
