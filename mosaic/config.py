"""One validated configuration tree; the command line is made from it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator


class Section(BaseModel):
    """Unknown keys are errors, and so are NaN and infinity."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class AgentConfig(Section):
    """Limits and protocol of one agent, all lengths in tokens."""

    session_limit: int = Field(131072, gt=0, description="L': most tokens of one session, prompt included")
    reserve: int = Field(
        16384,
        gt=0,
        description="B: tokens kept free for the next generation; a turn that would leave less is discarded",
    )
    max_turn_tokens: int = Field(16384, gt=0, description="most tokens sampled in one turn")
    max_turns: int = Field(200, gt=0, description="most turns of one session, then the forced answer")
    max_format_errors: int = Field(
        5, ge=0, description="malformed turns answered in one session; one more forces the answer"
    )
    max_compactions: int = Field(10, ge=0, description="most successful compactions of one rollout")
    compaction_style: Literal["record", "live"] = Field(
        "record",
        description="record: a summariser session over the serialised history (Mosaic); live: an instruction appended "
        "to the live history (CompactionRL)",
    )
    compaction_threshold: int = Field(
        16384, gt=0, description="live style: compact when fewer tokens than this are left of session_limit (T_comp)"
    )
    keep_steps: int = Field(2, ge=0, description="live style: last steps kept verbatim, fewer if they do not fit (k)")
    summary_tokens: int = Field(16384, gt=0, description="most tokens sampled for a summary")
    summary_temperature: float = Field(0.1, gt=0, description="sampling temperature of a record-style summary")
    max_fork_calls: int = Field(10, ge=0, description="most successful fork calls of one rollout")
    max_children: int = Field(3, gt=0, description="most subagents of one fork call")
    temperature: float = Field(1.0, gt=0, description="sampling temperature of every other session")
    tool_format: Literal["xml", "hermes"] = Field(
        "xml", description="tool-call syntax that the system prompt asks for; both are parsed"
    )
    date: str | None = Field(None, description="current date told to the agent; nothing is said without one")


class ModelConfig(Section):
    """The policy."""

    path: str = Field(
        "smollm2", description="a local folder, a hub name, or smollm2 for the small model that is fetched at first use"
    )
    adapter: str | None = Field(
        None,
        description="folder of a LoRA adapter that is merged into the weights before the run; 'warmstart' names the "
        "shipped one",
    )
    precision: Literal["bf16", "fp32"] = Field(
        "bf16", description="bf16: float32 master weights under bfloat16 autocast; fp32: float32 throughout"
    )
    activation_checkpointing: bool = Field(
        False, description="recompute activations in the backward pass to save memory"
    )

    @model_validator(mode="after")
    def _merged_once(self):
        folder = Path(self.path)
        if self.adapter is not None and folder.name == "policy" and (folder.parent / "state.json").is_file():
            raise ValueError(
                f"adapter {self.adapter} would be merged a second time into {self.path}, a checkpoint of a run: set "
                "model.adapter=null"
            )
        return self


class TaskConfig(Section):
    """Where the questions come from."""

    source: str = Field(
        "atlas", description="atlas, or the path of a JSONL file with question and answers on each line"
    )
    split: Literal["train", "eval"] = Field("train", description="atlas split; the two share no answer entity")
    hops: tuple[Literal[1, 2, 3], ...] = Field(
        (1, 2, 3), min_length=1, description="atlas question depths to draw from"
    )

    @model_validator(mode="after")
    def _belongs(self):
        for name in ("split", "hops"):
            if self.source != "atlas" and getattr(self, name) != TaskConfig.model_fields[name].default:
                raise ValueError(f"{name} is for source atlas only, and {self.source} is a file: leave {name} out")
        return self


class RolloutConfig(Section):
    """How trajectories are sampled."""

    prompts: int = Field(16, gt=0, description="prompt groups a step")
    group_size: int = Field(8, gt=0, description="G: rollouts of each prompt")
    scenarios: tuple[Literal["compaction", "forking", "single"], ...] = Field(
        ("compaction",), min_length=1, description="dealt to the prompt groups in turn; a group has one scenario"
    )
    max_batch_size: int = Field(16, gt=0, description="most sequences decoded at once")
    cache_tokens: int = Field(16384, ge=0, description="tokens whose keys and values are kept between turns")


class JudgeConfig(Section):
    """Who says whether an answer is right."""

    kind: Literal["exact", "llm"] = Field(
        "exact", description="exact: normalised match with aliases; llm: a chat-completions endpoint"
    )
    base_url: str | None = Field(
        None, description="llm: the endpoint, as http://host:port/v1; its key is read from MOSAIC_JUDGE_API_KEY"
    )
    model: str | None = Field(None, description="llm: the model's name at the endpoint")
    thinking: Literal["disable", "disable_if_accepted", "default"] = Field(
        "disable",
        description="llm: disable asks the server to switch thinking off; disable_if_accepted goes on where it refuses "
        "that; default does not ask, for servers that do not know chat_template_kwargs",
    )

    @model_validator(mode="after")
    def _complete(self):
        if self.kind == "llm" and not (self.base_url and self.model):
            raise ValueError("kind llm needs base_url and model")
        return self


class AlgorithmConfig(Section):
    """Credit assignment and the loss."""

    name: str = Field("mosaic", description="an entry of mosaic.advantages.ADVANTAGES")
    options: dict[str, Any] = Field(
        default_factory=dict, description="keyword arguments of that entry, such as rho or lambda_r"
    )
    objective: str = Field(
        "clip",
        description="clip, cispo, sao or reinforce; the ratio is to the trainer's log-probs before the update, that of "
        "sao to the rollout engine's",
    )
    objective_options: dict[str, Any] = Field(
        default_factory=dict, description="options of the objective, such as low, high, dual, level"
    )
    normalization: Literal["trajectory", "token", "prompt", "segment", "segment_flat"] = Field(
        "trajectory", description="what every unit of equal weight is in the loss"
    )
    mask_overlong: bool = Field(
        False,
        description="leave trajectories that ran out of a limit out of the loss; they still count in the advantages' "
        "statistics",
    )
    entropy_coef: float = Field(0.0, ge=0, description="weight of the entropy bonus")
    gain_space: Literal["log", "prob"] = Field(
        "log", description="marginal information gain of log-probabilities or of probabilities"
    )


Beta = Annotated[float, Field(ge=0, lt=1)]


class OptimizerConfig(Section):
    """AdamW and its schedule."""

    lr: float = Field(1e-6, gt=0, description="peak learning rate")
    betas: tuple[Beta, Beta] = Field((0.9, 0.999), description="AdamW betas")
    eps: float = Field(1e-8, gt=0, description="AdamW epsilon")
    weight_decay: float = Field(0.0, ge=0, description="AdamW weight decay")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="decay after the warm-up, over all optimiser updates of the run"
    )
    warmup_updates: int = Field(0, ge=0, description="optimiser updates of linear warm-up")
    grad_clip: float = Field(1.0, gt=0, description="largest gradient norm")
    epochs: int = Field(1, gt=0, description="passes over a rollout batch")
    minibatches: int = Field(1, gt=0, description="optimiser updates a pass; a trajectory stays inside one update")
    micro_batch_tokens: int = Field(
        4096,
        gt=0,
        description="most tokens of one forward and backward; a longer session is one micro-batch of its own",
    )


class RunConfig(Section):
    """A whole run."""

    output: str = Field("runs/mosaic", description="run directory")
    steps: int = Field(3, gt=0, description="rollout batches to train on")
    seed: int = Field(0, ge=0, description="every random stream of the run derives from it")
    checkpoint_every: int = Field(1, gt=0, description="steps between checkpoints; the last step always has one")
    keep_checkpoints: int = Field(2, gt=0, description="latest checkpoints kept")
    model: ModelConfig = Field(ModelConfig(), description=ModelConfig.__doc__)
    task: TaskConfig = Field(TaskConfig(), description=TaskConfig.__doc__)
    rollout: RolloutConfig = Field(RolloutConfig(), description=RolloutConfig.__doc__)
    agent: AgentConfig = Field(AgentConfig(), description=AgentConfig.__doc__)
    judge: JudgeConfig = Field(JudgeConfig(), description=JudgeConfig.__doc__)
    algorithm: AlgorithmConfig = Field(AlgorithmConfig(), description=AlgorithmConfig.__doc__)
    optimizer: OptimizerConfig = Field(OptimizerConfig(), description=OptimizerConfig.__doc__)

    @model_validator(mode="after")
    def _consistent(self):
        # Imported here: both registries sit above this module.
        from mosaic.advantages import ADVANTAGES
        from mosaic.objectives import objective_from

        _check_algorithm(self.algorithm, ADVANTAGES)
        objective_from(self.algorithm.objective, self.algorithm.objective_options)
        if self.agent.reserve >= self.agent.session_limit:
            raise ValueError(
                f"agent.reserve ({self.agent.reserve}) must be below agent.session_limit ({self.agent.session_limit})"
            )
        agent = self.agent
        if agent.compaction_style == "live" and agent.compaction_threshold >= agent.session_limit:
            raise ValueError(
                f"agent.compaction_threshold ({agent.compaction_threshold}) must be below agent.session_limit "
                f"({agent.session_limit}) with compaction_style live, which would compact after every turn"
            )
        if self.algorithm.name == "supo" and not self.algorithm.mask_overlong:
            raise ValueError(
                "algorithm.mask_overlong must be true with supo, which leaves overlong trajectories out of the loss"
            )
        if self.algorithm.name in NEEDS_CRITIC:
            raise ValueError(
                f"algorithm.name: {self.algorithm.name} needs a critic, which `mosaic train` does not have yet; its "
                "advantage can be called from your own trainer"
            )
        if self.algorithm.name in NEEDS_LINEAR_ORDER and "forking" in self.rollout.scenarios:
            raise ValueError(
                f"algorithm.name: {self.algorithm.name} needs sessions in a linear order, which rollout.scenarios must "
                "then not break by forking"
            )
        if self.optimizer.minibatches > self.num_rollouts:
            raise ValueError("optimizer.minibatches must not exceed rollout.prompts * rollout.group_size trajectories")
        return self

    @property
    def num_rollouts(self) -> int:
        """Rollouts a step."""
        return self.rollout.prompts * self.rollout.group_size

    @property
    def num_updates(self) -> int:
        """Optimiser updates a step."""
        return self.optimizer.epochs * self.optimizer.minibatches

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        return torch.bfloat16 if self.model.precision == "bf16" else None


NEEDS_CRITIC = ("compaction_ppo", "sao")
NEEDS_LINEAR_ORDER = ("compaction_grpo",)


def _check_algorithm(algorithm: AlgorithmConfig, registry: Mapping[str, Callable[..., Any]]) -> None:
    name, options = algorithm.name, algorithm.options
    if name not in registry:
        raise ValueError(f"algorithm.name: {name!r} is not one of {', '.join(sorted(registry))}")
    known = list(inspect.signature(registry[name]).parameters)[1:]
    for key in options:
        if key not in known:
            raise ValueError(f"algorithm.options: {name} has no option {key!r}; it has {', '.join(known) or 'none'}")
    try:
        registry[name](_empty_batch(algorithm.gain_space), **options)  # it checks its options' values itself
    except (TypeError, ValueError) as error:
        raise ValueError(f"algorithm.options: {error}") from None


def _empty_batch(gain_space: str) -> Any:
    """A batch of nothing, with everything that an algorithm may ask for."""
    from mosaic.batch import pack

    batch = pack([])
    batch.gain_space = gain_space
    batch.old_logprob = batch.value = torch.zeros(0)
    batch.gain = batch.turn_gain = torch.zeros(0, dtype=torch.float64)
    batch.eligible = torch.zeros(0, dtype=torch.bool)
    return batch


class ConfigError(Exception):
    """A configuration that cannot be used; the message names the key, the value and the key's help."""


class _Loader(yaml.SafeLoader):
    """YAML 1.1 with the one number of YAML 1.2 that people write: 1e-6, which 1.1 reads as text."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Reads a YAML file, applies `key=value` overrides (dotted keys, YAML values) and validates the whole.

    Raises:
        ConfigError: one line a fault, each with the key's path, the value and the help of that key.
    """
    try:
        tree = yaml.load(Path(path).read_text(encoding="utf-8"), _Loader)
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is no text in UTF-8: a configuration is a YAML file") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is no valid YAML: {error}") from None
    if tree is None:
        tree = {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} must hold a mapping of keys, got {type(tree).__name__}")
    for override in overrides:
        _apply(tree, override)
    return parse_config(tree)


def parse_config(tree: dict[str, Any]) -> RunConfig:
    """Validates a nested mapping; raises ConfigError."""
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(fault) for fault in error.errors())) from None


def flat_keys(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of a nested mapping by dotted key."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= flat_keys(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def _apply(tree: dict[str, Any], override: str) -> None:
    key, equals, value = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"override {override!r} must have the form key=value, such as optimizer.lr=1e-6")
    *parents, last = key.split(".")
    for parent in parents:
        tree = tree.setdefault(parent, {})
        if not isinstance(tree, dict):
            raise ConfigError(f"override {override!r}: {parent} is a value, not a section")
    try:
        tree[last] = yaml.load(value, _Loader)
    except yaml.YAMLError:
        raise ConfigError(f"override {override!r}: {value!r} is no valid YAML value") from None


def _explain(fault: Any) -> str:
    where = ".".join(map(str, fault["loc"]))
    if fault["type"] == "extra_forbidden":
        return f"{where}: unknown key; its section has {', '.join(_section(fault['loc'][:-1]).model_fields)}"
    message = fault["msg"].removeprefix("Value error, ")
    if not where:
        return message
    shown = "" if isinstance(fault["input"], dict) else f", got {fault['input']!r}"
    return f"{where}: {message}{shown}{_help(fault['loc'])}"


def _section(path: Sequence[Any]) -> type[BaseModel]:
    section: type[BaseModel] = RunConfig
    for key in path:
        section = section.model_fields[key].annotation
    return section


def _help(path: Sequence[Any]) -> str:
    section: Any = RunConfig
    description = ""
    for key in path:
        if not (inspect.isclass(section) and issubclass(section, BaseModel)) or key not in section.model_fields:
            break
        field = section.model_fields[key]
        section, description = field.annotation, f" ({field.description})"
    return description
